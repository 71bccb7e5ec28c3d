"""The parts that Python adapters share: commands, the clock, the no-op handler.

An adapter is called with a command and one JSON object. It finds the database in
PGHOST, PGPORT, PGUSER, PGPASSWORD and PGDATABASE, and writes JSON objects to stdout,
one a line:

- ``setup {...}`` makes the tables.
- ``enqueue {connections, seconds}`` enqueues one job per transaction on each.
- ``bulk {jobs, mode}`` enqueues many, in the fastest way.
- ``work {jobs, seconds, log, settings}`` runs jobs until it is ended. It says
  ``ready``, ``first`` at the first job, and ``end`` at the last one or when the time is
  up. With a log it writes ``number time`` of each start there instead.
- ``send {jobs, seconds, connections, gap_ms, log}`` enqueues one job after the other,
  with pauses between the two bounds. It stops when all are sent or the time is up. It
  writes ``number before after`` of each commit.

All times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
The group of job number i in each mode is that of `group_of`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

SMALL_GROUPS = 1_000


def read_command() -> tuple[str, dict[str, Any]]:
    """The command and its arguments."""
    return sys.argv[1], json.loads(sys.argv[2]) if sys.argv[2:] else {}


def say(**event: Any) -> None:
    """Report an event to the benchmark."""
    os.write(1, json.dumps(event).encode() + b"\n")


def database_address() -> str:
    """The database, in the form that libpq wants."""
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER"}
    names["password"] = "PGPASSWORD"
    parts = [f"{key}={os.environ[name]}" for key, name in names.items()]
    return " ".join([*parts, f"dbname={os.environ['PGDATABASE']}"])


def group_of(number: int, mode: str) -> str | None:
    """The group of a job: none, one of 1,000, or a hot one for every second job."""
    if mode in ("groups", "crowded"):
        return f"g{number % SMALL_GROUPS}"
    if mode == "hot":
        return "hot" if number % 2 else f"g{number // 2 % SMALL_GROUPS}"
    return None


def payload_of(number: int, mode: str) -> dict[str, Any]:
    """The fields of a job: its number, and its group if it has one."""
    group = group_of(number, mode)
    return {"i": number} if group is None else {"i": number, "k": group}


class Handled:
    """Counts handled jobs; any thread may call it."""

    def __init__(self, jobs: int, seconds: float) -> None:
        self._jobs = jobs
        self._seconds = seconds
        self._numbers = itertools.count(1)  # one step of the interpreter needs no lock
        self._hot = itertools.count(1)
        self._count = self._hot_count = 0
        self._first = self._last = self._hot_last = self._small_last = 0
        self._ended = False

    def note(self, number: int, group: str | None = None) -> None:
        """Note the first line of the handler."""
        now = time.monotonic_ns()
        count = next(self._numbers)
        if count == 1:
            self._begin(now)
        self._count, self._last = count, now
        if group is not None:
            if group == "hot":
                self._hot_count, self._hot_last = next(self._hot), now
            else:
                self._small_last = now
        if count == self._jobs:
            self._end()

    def _begin(self, now: int) -> None:
        self._first = now
        say(event="first", at=now)
        limit = threading.Timer(self._seconds, self._end)
        limit.daemon = True
        limit.start()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        say(
            event="end",
            jobs=self._count,
            first=self._first,
            last=self._last,
            hot=self._hot_count,
            hot_last=self._hot_last,
            small_last=self._small_last,
        )


class StartLog:
    """Notes when each job started."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, number: int, group: str | None = None) -> None:
        """Note the first line of the handler."""
        now = time.monotonic_ns()
        os.write(self._file, b"%d %d\n" % (number, now))


def make_sink(given: dict[str, Any]) -> Handled | StartLog:
    """The object that the handler of ``work`` calls."""
    if given.get("log"):
        return StartLog(given["log"])
    return Handled(given["jobs"], given["seconds"])


def say_enqueued(latencies: Sequence[float], seconds: float) -> None:
    """Report the outcome of ``enqueue``, from the seconds of each call."""
    ordered = sorted(latencies)
    say(
        jobs=len(ordered),
        seconds=seconds,
        p50_ms=ordered[len(ordered) // 2] * 1e3,
        p99_ms=ordered[len(ordered) * 99 // 100] * 1e3,
    )


async def enqueue_for(
    seconds: float, enqueues: Sequence[Callable[[], Awaitable[Any]]]
) -> None:
    """Call each function, one per connection, repeatedly."""
    latencies: list[float] = []
    began = time.perf_counter()

    async def one(enqueue: Callable[[], Awaitable[Any]]) -> None:
        while (called := time.perf_counter()) < began + seconds:
            await enqueue()
            latencies.append(time.perf_counter() - called)

    await asyncio.gather(*map(one, enqueues))
    say_enqueued(latencies, time.perf_counter() - began)


def timetable(given: dict[str, Any]) -> Iterator[tuple[int, float]]:
    """The number of each job and its due time, in seconds of ``time.monotonic``."""
    began = due = time.monotonic()
    for number in range(given["jobs"]):
        if time.monotonic() > began + given["seconds"]:
            return
        yield number, due
        due += random.uniform(*given["gap_ms"]) / 1e3


async def send_in_turn(
    given: dict[str, Any], sends: Sequence[Callable[[int], Awaitable[Any]]]
) -> None:
    """When a job is due, call any function, one per connection, that is free."""
    due_jobs = timetable(given)
    with open(given["log"], "w") as log:

        async def one(send: Callable[[int], Awaitable[Any]]) -> None:
            for number, due in due_jobs:
                await asyncio.sleep(due - time.monotonic())
                before = time.monotonic_ns()
                await send(number)
                log.write(f"{number} {before} {time.monotonic_ns()}\n")

        await asyncio.gather(*map(one, sends))
