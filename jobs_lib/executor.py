"""The executor: claim for the owned origins, run on threads, settle in batches.

One dispatcher thread talks to the database: it settles what has ended, promotes what is
due, claims more while there is room, and sleeps until something ends or the next look
is due. Worker threads only run handlers: the next claim is in flight while they do.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.jobs.claim import Claimer
from jobs_lib.jobs.complete import Completer
from jobs_lib.jobs.model import Lane, Outcome, Result
from jobs_lib.jobs.run import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from uuid import UUID

    import psycopg

    from jobs_lib.db import Database
    from jobs_lib.jobs.type import JobType

_STOPS_LANE = {Result.RETRIED, Result.SNOOZED, Result.FENCED}
_PROMOTE_LIMIT = 1_000


class Executor:
    """Runs the jobs of the origins it is given; a Holder of the role ``execute``."""

    def __init__(
        self,
        database: Database,
        types: Mapping[str, JobType[Any]],
        owner: UUID,
        installation: UUID,
        *,
        workers: int,
        batch: int,
        poll_interval: float,
    ) -> None:
        self._database = database
        self._batch = batch
        self._poll_interval = poll_interval
        # One connection more than workers, so that handlers cannot starve each other.
        self._pool = database.pool("handlers", workers + 1)
        self._claimer = Claimer(database.queries, owner, installation, types)
        self._completer = Completer(database.queries, owner, types)
        self._runner = Runner(types, database.queries, owner, self._pool.connection)
        self._commands: deque[Callable[[], None]] = deque()
        self._ended: deque[tuple[Lane, Outcome | None]] = deque()
        self._ready: deque[Lane] = deque()
        self._work = threading.Condition()
        self._idle = 0
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._dispatcher = threading.Thread(
            target=self._dispatch, name="jobs_lib dispatcher", daemon=True
        )
        self._workers = [
            threading.Thread(
                target=self._work_on, name=f"jobs_lib worker {n}", daemon=True
            )
            for n in range(workers)
        ]

    def start(self) -> None:
        """Start the threads; nothing runs until origins are acquired."""
        self._dispatcher.start()
        for worker in self._workers:
            worker.start()

    def stop(self) -> None:
        """Stop the threads. Call after the origins have been released."""
        self._stopping.set()
        self._wake.set()
        self._dispatcher.join()
        with self._work:
            self._ready.clear()
            self._work.notify_all()
        self._pool.close(timeout=1)

    def acquire(self, origins: Mapping[str, int]) -> None:
        """Start to claim from origins at these epochs."""
        self._do(lambda: self._claimer.add(origins))

    def release(self, origins: frozenset[str], timeout: float) -> None:
        """Stop claiming from origins; wait for their running jobs, and settle them."""
        quiet = threading.Event()
        deadline = time.monotonic() + timeout

        def leave() -> None:
            lanes = self._claimer.retire(origins)
            running = any(lane.started and not lane.ended for lane in lanes)
            if running and time.monotonic() < deadline and not self._stopping.is_set():
                # Again after the next outcome: settled under the epoch we still have.
                self._commands.append(leave)
            else:
                self._claimer.drop(origins)
                quiet.set()

        self._do(leave)
        # A dispatcher that cannot reach the database must not hold up the hand-over.
        quiet.wait(timeout + self._poll_interval)

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    # The dispatcher's thread

    def _dispatch(self) -> None:
        failures = 0
        unsettled: list[tuple[Lane, Outcome | None]] = []
        while not self._stopping.is_set():
            try:
                with self._database.connect("executor") as connection:
                    while not self._stopping.is_set():
                        self._round(connection, unsettled)
                        failures = 0
                    self._settle(connection, unsettled)
            except Exception as error:
                failures += 1
                telemetry.emit("loop.failed", loop="executor", error=error)
                self._stopping.wait(RECONNECT.delay(failures))

    def _round(
        self,
        connection: psycopg.Connection[Any],
        unsettled: list[tuple[Lane, Outcome | None]],
    ) -> None:
        # Cleared first: whatever is set from here on is seen at the end of the round.
        self._wake.clear()
        self._settle(connection, unsettled)
        for _ in range(len(self._commands)):
            self._commands.popleft()()
        found = False
        room = self._batch - self._claimer.flying
        # Few and large claims: a trickle of small ones costs a round trip each.
        if room >= self._batch // 2 or not self._ready:
            found = self._claim(connection, max(room, 0))
        if not found and not self._ended:
            # With jobs in flight, an end wakes us; without, only the next look.
            self._wake.wait(self._poll_interval)

    def _claim(self, connection: psycopg.Connection[Any], room: int) -> bool:
        if not room:
            return False
        late = self._claimer.sweep(connection)
        fresh, due = self._claimer.look(connection)
        if due:
            self._claimer.promote(connection, _PROMOTE_LIMIT)
        if not (fresh or due or late):
            return False
        lanes = self._claimer.claim(connection, room)
        if lanes:
            with self._work:
                self._ready.extend(lanes)
                self._work.notify(min(len(lanes), self._idle))
        return bool(lanes)

    def _settle(
        self,
        connection: psycopg.Connection[Any],
        unsettled: list[tuple[Lane, Outcome | None]],
    ) -> None:
        # Kept until they are known to be written: after a lost connection they are
        # written again, and what was written already is not found.
        unsettled.extend(self._ended.popleft() for _ in range(len(self._ended)))
        if not unsettled:
            return
        outcomes = [outcome for _, outcome in unsettled if outcome is not None]
        self._completer.settle(connection, outcomes, self._claimer.origins)
        for lane, outcome in unsettled:
            if outcome is None:
                self._claimer.end_lane(lane)
            else:
                self._claimer.end_job(lane, outcome.job)
        unsettled.clear()
        self._completer.end_claims(connection, self._claimer.ended_claims())

    # The workers' threads

    def _work_on(self) -> None:
        while not self._stopping.is_set():
            try:
                lane = self._ready.popleft()
            except IndexError:
                with self._work:
                    self._idle += 1
                    self._work.wait_for(lambda: self._ready or self._stopping.is_set())
                    self._idle -= 1
                continue
            self._run_lane(lane)

    def _run_lane(self, lane: Lane) -> None:
        lane.started = True
        ran = 0
        for job in lane.jobs:
            if lane.dropped or self._stopping.is_set():
                break
            outcome = self._runner.run(lane, job)
            # What is behind a job that waits for another attempt waits with it.
            lane.failed = outcome.result in _STOPS_LANE
            self._ended.append((lane, outcome))
            ran += 1
            if lane.failed:
                break
        if lane.group is not None or ran < len(lane.jobs):
            self._ended.append((lane, None))
        if not self._ready or len(self._ended) > self._batch // 4:
            self._wake.set()
