"""The newest state is sent after every enqueue, failure and rollback."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

from jobs_lib import Job, exponential
from tests.support.apps import HOME, executing

STREAM_SECONDS = 5.0
MAX_WAIT = 0.5


def is_empty(admin) -> bool:
    return admin.execute("select not exists (select from jobs_lib.jobs)").fetchone()[0]


@pytest.mark.guarantee("J11", "I16")
@pytest.mark.parametrize("waits", [{"debounce": 0.2, "max_wait": MAX_WAIT}, {}])
def test_a_stream_runs_at_least_once_per_maximum_wait_and_ends_with_the_last(
    app, admin, connect, wait_for, waits
):
    admin.execute("create table state (version int)")
    admin.execute("insert into state values (0)")
    runs: list[tuple[float, float, int, int]] = []

    @app.job(group="group", last_only=True, **waits)
    def publish(job: Job, n: int, group: str) -> None:
        started = time.monotonic()
        threading.Event().wait(0.02)
        with job.transaction() as connection:
            row = connection.execute("select version from state").fetchone()
            assert row is not None
        runs.append((started, time.monotonic(), n, row[0]))

    sent, longest = 0, 0.0
    with executing(app, HOME), connect() as connection:
        # Not before: a busy machine takes seconds to start the executor.
        first = time.monotonic()
        # The state changes 200 times a second, so there are never 0.2 s of quiet.
        for sent in itertools.count(1):
            began = time.monotonic()
            connection.execute("update state set version = %s", (sent,))
            publish.enqueue(connection, n=sent, group="g")
            connection.commit()
            longest = max(longest, time.monotonic() - began)
            ahead = first + sent / 200 - time.monotonic()
            threading.Event().wait(max(0.0, ahead))
            if time.monotonic() - first > STREAM_SECONDS:
                break
        last = time.monotonic()
        wait_for(lambda: is_empty(admin), what="it has come to rest")
    starts = [first, *(start for start, *_ in runs)]
    # On a busy machine a gap may exceed the maximum by what the machine takes for
    # anything, but it is far shorter than the stream.
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert max(gaps) < MAX_WAIT + 2.0 + longest, gaps
    # Runs are merged: at most one for each maximum wait, and the last by the debounce.
    if waits:
        assert len(runs) <= STREAM_SECONDS / MAX_WAIT + 3
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(runs))
    # Each run saw the states enqueued before it, and the last one saw all.
    assert all(version >= n for _, _, n, version in runs)
    assert (runs[-1][2], runs[-1][3]) == (sent, sent)
    assert runs[-1][0] < last + MAX_WAIT + 2.0 + longest
    ended = dict(
        admin.execute(
            "select outcome, count(*) from jobs_lib.history group by 1"
        ).fetchall()
    )
    assert ended == {"completed": len(runs), "superseded": sent - len(runs)}


def test_a_burst_runs_once_after_a_time_of_quiet(app, admin, connect, wait_for):
    ran: list[tuple[float, int]] = []

    # A busy machine may make a pause within the burst, though none of a second.
    @app.job(group="group", last_only=True, debounce=1)
    def publish(job: Job, n: int, group: str) -> None:
        ran.append((time.monotonic(), n))

    with executing(app, HOME), connect() as connection:
        for n in range(30):
            publish.enqueue(connection, n=n, group="g")
            connection.commit()
            enqueued = time.monotonic()
        wait_for(lambda: is_empty(admin), what="it has run")
    assert [n for _, n in ran] == [29]
    assert ran[0][0] - enqueued >= 0.99


# The steps of a history, one letter for each:
#   e  enqueue a new state, and commit
#   u  the same, but leave the transaction open: c commits it, r rolls it back
#   t  another enqueuer comes meanwhile; it waits for the open one, and commits
#   b  a run is busy from here on: s lets it succeed, f lets it fail
MOVES = "eutcrbsf"
LENGTH = 5
LONGER = ["eubscbs", "eubfcbs", "ebutrfbs", "ebuscbs"]


def histories(done: str = "", *, opened: str = "", busy: bool = False, due: int = 0):
    """Find all possible sequences of steps that end with nothing open."""
    if done and not opened and not busy:
        yield done
    if len(done) == LENGTH:
        return
    for move in MOVES:
        after: dict[str, Any] = {"opened": opened, "busy": busy, "due": due}
        if move == "e" and not opened:
            after["due"] = 1
        elif move == "u" and not opened:
            after["opened"] = "u"
        elif move == "t" and opened == "u":
            after["opened"] = "ut"
        elif move in "cr" and opened:
            due_then = move == "c" or opened == "ut" or due
            after |= {"opened": "", "due": int(due_then)}
        elif move == "b" and due and not busy:
            after |= {"busy": True, "due": 0}
        elif move in "sf" and busy:
            after |= {"busy": False, "due": int(move == "f" or due)}
        else:
            continue
        yield from histories(done + move, **after)


class History:
    """One group that goes through one history."""

    def __init__(self, group: str, connect, job_type) -> None:
        self.committed: list[int] = []
        self.seen: list[tuple[int, int]] = []
        """For each run that succeeded: the number in its job, and the state it saw."""
        self.most = 0
        """The most runs at once."""
        self._group = group
        self._connect = connect
        self._type = job_type
        self._version = 0
        self._open: tuple[Any, int] | None = None
        self._others: list[threading.Thread] = []
        self.inside = 0
        self._busy, self._verdict = threading.Semaphore(0), threading.Semaphore(0)
        self._told: list[str] = []
        self._is_over = False

    def step(self, move: str) -> None:
        """Make one step."""
        if move == "b":
            assert self._busy.acquire(timeout=20)
        elif move in "sf":
            self._told.append(move)
            self._verdict.release()
        elif move == "e":
            self._send(self._draw())
        elif move == "u":
            connection = self._connect()
            self._open = connection, self._draw()
            self._write(*self._open)
        elif move == "t":
            other = threading.Thread(target=self._send, args=(self._draw(),))
            other.start()
            self._others.append(other)
        else:
            assert self._open is not None
            connection, version = self._open
            connection.commit() if move == "c" else connection.rollback()
            connection.close()
            if move == "c":
                self.committed.append(version)
            for other in self._others:
                other.join()

    def end(self) -> None:
        """Let every run succeed from now on."""
        self._is_over = True
        self._told.append("s")
        self._verdict.release()

    def run(self, job: Job, version: int) -> None:
        """Act as the handler."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            with job.transaction() as connection:
                row = connection.execute(
                    "select max(version) from states where name = %s", (self._group,)
                ).fetchone()
                self._busy.release()
                if not self._is_over:
                    assert self._verdict.acquire(timeout=20)
                    if self._told.pop(0) == "f":
                        raise RuntimeError("as told")
            assert row is not None
            self.seen.append((version, row[0]))
        finally:
            self.inside -= 1

    def _draw(self) -> int:
        self._version += 1
        return self._version

    def _send(self, version: int) -> None:
        with self._connect() as connection:
            self._write(connection, version)
        self.committed.append(version)

    def _write(self, connection, version: int) -> None:
        connection.execute("insert into states values (%s, %s)", (self._group, version))
        self._type.enqueue(connection, group=self._group, version=version)


@pytest.mark.slow
@pytest.mark.guarantee("FJ17", "I15", "I16", "I17")
def test_the_last_run_sees_the_last_committed_state_under_every_interleaving(
    app, admin, connect, wait_for
):
    admin.execute("create table states (name text, version int)")
    going: dict[str, History] = {}

    @app.job(group="group", last_only=True, retry=exponential(first=0.01, cap=0.01))
    def publish(job: Job, group: str, version: int) -> None:
        going[group].run(job, version)

    with executing(app, HOME, workers=2):
        for group in [*histories(), *LONGER]:
            history = going[group] = History(group, connect, publish)
            for move in group:
                history.step(move)
            history.end()
            wait_for(
                lambda h=history: is_empty(admin) and not h.inside,
                what=f"{group} has come to rest",
            )
            if not history.committed:
                assert history.seen == [], group
                continue
            # The last run saw the last state; rolled-back states never ran.
            assert history.seen[-1] == (max(history.committed),) * 2, group
            assert {version for version, _ in history.seen} <= set(history.committed)
            assert len(history.seen) <= len(history.committed), group
            assert history.most == 1, group


def test_a_newer_job_of_another_value_replaces_the_older_ones(
    app, admin, connect, wait_for
):
    ran: list[str] = []

    @app.job(group="entity", last_only=True, limit=(1, "tenant"))
    def publish(job: Job, entity: str, tenant: str) -> None:
        ran.append(tenant)

    # Both wait when the first claim comes.
    with connect() as connection:
        for tenant in ("a", "b"):
            publish.enqueue(connection, entity="e", tenant=tenant)
    with executing(app, HOME):
        wait_for(lambda: is_empty(admin), what="nothing is left")
    assert ran == ["b"]
