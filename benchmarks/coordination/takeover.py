"""Take-overs: from the end of a process until another one has its partitions."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from signal import SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

from benchmarks.coordination.stage import GROUP, LONG, Figures, Stage, tell
from benchmarks.figures import median
from benchmarks.ownership.pods import wait_until
from benchmarks.peers.peer import REPOSITORY
from jobs_lib.coordination.messages import ClaimingPartition, ReleasingPartition, Shared
from jobs_lib.coordination.world import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobs_lib.coordination.messages import Message

PARTITIONS = 8
INTERVAL = 3.0
"""Seconds. The group's session is as long as two intervals."""
KINDS = ("coordination", "classic", "consumer")


class Process:
    """A member in a process of its own: see :mod:`benchmarks.coordination.member`."""

    def __init__(self, kind: str, given: dict[str, Any]) -> None:
        self.has: set[int] = set()
        """The partitions of which it has had a record."""
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.coordination.member"),
                *(kind, json.dumps(given)),
            ],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Kill what is left of it."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("has "):
                self.has.add(int(line[4:]))


class Passed:
    """The claims and releases of a log, with their append times."""

    def __init__(self) -> None:
        self.last: dict[Shared, int] = {}
        """The time of the last valid record about a partition."""
        self.waits: list[int] = []
        """Milliseconds from the last record of one holder to the claim of the next."""
        self._released: set[Shared] = set()

    def applied(self, place: int, message: Message, outcome: Outcome) -> None:
        """See :class:`jobs_lib.coordination.log.LogListener`."""
        shared: Shared | None = getattr(message, "shared", None)
        if shared is None or outcome is not Outcome.VALID:
            return
        now = self.log.get_world(place).now_ms
        is_claim = isinstance(message, ClaimingPartition)
        if is_claim and shared in self.last and shared not in self._released:
            self.waits.append(now - self.last[shared])
        self.last[shared] = now
        if isinstance(message, ReleasingPartition):
            self._released.add(shared)
        else:
            self._released.discard(shared)

    def lost(self, reason: str) -> None:
        """See :class:`jobs_lib.coordination.log.LogListener`."""

    def known(self) -> None:
        """See :class:`jobs_lib.coordination.log.LogListener`."""

    log: Any


def measure(stage: Stage) -> Figures:
    """Kill one of two processes, or end it properly: when has the other one all?"""
    figures: Figures = {}
    waits: list[int] = []
    for how, number in (("kill", SIGKILL), ("clean", SIGTERM)):
        for kind in KINDS:
            took: list[float | None] = []
            for _ in range(stage.size(5, 1)):
                took.append(_take_over(stage, kind, number, waits))
                tell(f"{how} {kind}: {took[-1]:.3f} s")
            suffix = "" if kind == "coordination" else f"_{kind}"
            seconds = median(took)
            if how == "kill":
                figures[f"takeover_kill_s{suffix}"] = seconds
            else:
                figures[f"handover_clean_ms{suffix}"] = seconds and 1_000 * seconds
    figures["takeover_intervals_min"] = min(waits) / 1_000 / INTERVAL
    figures["takeover_intervals_max"] = max(waits) / 1_000 / INTERVAL
    return figures


def _take_over(stage: Stage, kind: str, number: int, waits: list[int]) -> float:
    """End one of two processes; return seconds until the other one has all."""
    topic, log = stage.make_topic("data", PARTITIONS), stage.make_log(2)
    given = {
        "servers": stage.broker.bootstrap_servers,
        "log": log,
        "group": f"{GROUP}.{topic}",
        "topic": topic,
        "interval": INTERVAL,
    }
    passed = Passed()
    passed.log = stage.make_reader(log, "watch", only_reads=True)
    passed.log.listen(passed)
    processes: list[Process] = []
    with _feeding(stage, topic), passed.log:
        try:
            first = Process(kind, given | {"client_id": "a"})
            processes.append(first)
            _await([first], PARTITIONS)
            second = Process(kind, given | {"client_id": "b"})
            processes.append(second)
            half = PARTITIONS // 2
            wait_until(partial(_has, [second], half), LONG, "both share")
            passed.waits.clear()
            time.sleep(1)  # The group has nothing more to settle.
            began = time.monotonic()
            first.send(number)
            _await([second], PARTITIONS)
            took = time.monotonic() - began
        finally:
            for process in processes:
                process.close()
        if kind == "coordination" and number == SIGKILL:
            passed.log.read_to_end(LONG)
            waits += passed.waits
    return took


def _has(processes: Sequence[Process], count: int) -> bool:
    return len(set().union(*(one.has for one in processes))) >= count


def _await(processes: Sequence[Process], count: int) -> None:
    wait_until(partial(_has, processes, count), LONG, f"{count} partitions are read")


@contextmanager
def _feeding(stage: Stage, topic: str) -> Iterator[None]:
    """Write a record to each partition again and again."""
    producer = Producer({"bootstrap.servers": stage.broker.bootstrap_servers})
    stopping = threading.Event()

    def feed() -> None:
        while not stopping.wait(0.02):
            for number in range(PARTITIONS):
                producer.produce(topic, b"x", partition=number)
            producer.poll(0)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        producer.flush(LONG)
