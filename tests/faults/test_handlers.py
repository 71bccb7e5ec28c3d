"""Handlers misbehave: the pod lives on, and the attempt counts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib import exponential
from jobs_lib.errors import FencedError
from tests.faults.helpers import attempts, await_heartbeats, count, effects
from tests.support import wait_for
from tests.support.apps import HOME, executing, heard, make_app
from tests.support.canary import VALUE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib import App
    from jobs_lib.ownership import Process

RETRY = exponential(first=0.01, cap=0.01, max_attempts=3)
ADD = "insert into effects values (%s, %s)"


class Rude(BaseException):
    """An error that is not an Exception."""


def raise_base(job) -> None:
    raise Rude("rude")


def leave(job) -> None:
    raise SystemExit(1)


def interrupt(job) -> None:
    raise KeyboardInterrupt


def close(job) -> None:
    with job.transaction() as connection:
        connection.execute(ADD, (1, job.id))
        connection.close()


def commit(job) -> None:
    with job.transaction() as connection:
        connection.execute("select 1")
        connection.execute("commit")


def roll_back(job) -> None:
    with job.transaction() as connection:
        connection.execute(ADD, (1, job.id))
        connection.rollback()


def fail_inside(job) -> None:
    with job.transaction() as connection:
        connection.execute(ADD, (1, job.id))
        connection.execute("select 1 / 0")


RUDE = [raise_base, leave, interrupt, close, commit, roll_back, fail_inside]


@pytest.mark.guarantee("FJ4")
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("handler", RUDE, ids=lambda handler: handler.__name__)
def test_a_rude_handler_spends_its_attempts_and_nothing_else(
    url, app, connect, handler, kind
):
    rude = app.job(name="rude", retry=RETRY)(
        handler if kind == "plain" else make_async(handler)
    )

    @app.job(retry=RETRY)
    def add(job, n: int) -> None:
        with job.transaction() as connection:
            connection.execute(ADD, (n, job.id))

    with connect() as connection:
        rude.options(headers={"who": VALUE}).enqueue(connection)
        add.enqueue_many(connection, [{"n": n} for n in range(100, 120)])
    threads = set(threading.enumerate())
    with executing(app, HOME, workers=2):
        wait_for(lambda: count(url) == 0, what="all have ended")
        names = [t.name for t in set(threading.enumerate()) - threads]
        assert sum(name.startswith("jobs_lib worker") for name in names) == 2
        with connect() as connection:
            add.enqueue(connection, n=120)
        wait_for(lambda: count(url) == 0, what="it goes on")
    assert effects(url) == [*range(100, 121)]
    assert attempts(url) == {("completed", 1), ("discarded", 3)}
    with connect() as connection:
        (errors,) = connection.execute(
            "select errors from jobs_lib.discarded"
        ).fetchone()
    assert [error["attempt"] for error in errors] == [1, 2, 3]


def make_async(handler):
    """Make an async handler that misbehaves in the same way."""
    rude = {
        "close": lambda c: c.close(),
        "commit": lambda c: c.execute("commit"),
        "roll_back": lambda c: c.rollback(),
        "fail_inside": lambda c: c.execute("select 1 / 0"),
    }.get(handler.__name__)

    async def run(job) -> None:
        if rude is None:
            handler(job)
        else:
            async with job.transaction() as connection:
                await rude(connection)

    return run


class Late:
    """A job that ignores the time limit of its first attempt until it is freed."""

    def __init__(self, app: App, kind: str) -> None:
        self.kind = kind
        self.freed = threading.Event()
        self.refused: list[int] = []
        """The attempts whose commit was refused."""
        handler = self._make_plain() if kind == "plain" else self._make_async()
        # The limit gives a busy machine time for transactions.
        self.type = app.job(name="late", time_limit=2, retry=RETRY)(handler)

    @property
    def blocks_the_loop(self) -> bool:
        """Whether no other async handler can run meanwhile, the next attempt's too."""
        return self.kind == "blocks the loop"

    def end(self, url: str, admin: Any) -> None:
        """Free it, and wait until all jobs have ended and its commit was refused."""
        # Its commit is refused only once the attempt is counted in the database.
        wait_for(lambda: attempt_of_late(admin) != 0, what="the attempt is counted")
        self.freed.set()
        wait_for(lambda: count(url) == 0, what="it has ended")
        wait_for(lambda: self.refused, what="the first attempt may not commit")

    def _make_plain(self):
        def overrun(job) -> None:
            try:
                with job.transaction() as connection:
                    connection.execute(ADD, (job.attempt, job.id))
                    if job.attempt == 1:
                        assert self.freed.wait(60)
            except FencedError:
                self.refused.append(job.attempt)
                raise

        return overrun

    def _make_async(self):
        async def overrun(job) -> None:
            try:
                async with job.transaction() as connection:
                    await connection.execute(ADD, (job.attempt, job.id))
                    if job.attempt == 1 and self.blocks_the_loop:
                        assert self.freed.wait(60)
                    while job.attempt == 1 and not self.freed.is_set():
                        with contextlib.suppress(asyncio.CancelledError):
                            await asyncio.sleep(0.01)
            except FencedError:
                self.refused.append(job.attempt)
                raise

        return overrun


@pytest.fixture(params=["plain", "blocks the loop", "ignores cancel"])
def late(request, app, connect) -> Late:
    """A job that is enqueued, and will overrun its time limit."""
    late = Late(app, request.param)
    with connect() as connection:
        late.type.enqueue(connection)
    return late


@contextlib.contextmanager
def executing_late(app: App) -> Iterator[Process]:
    """Run a pod with one worker, on which the late job has started."""
    with heard("job.started") as started, executing(app, HOME, workers=1) as process:
        wait_for(lambda: started, what="it runs")
        yield process


@pytest.mark.expects("jobs.fenced")
@pytest.mark.guarantee("FJ3")
def test_a_handler_that_ignores_its_time_limit_is_fenced(url, app, admin, late):
    with executing_late(app):
        # The attempt is over for everything else, while the handler still runs.
        wait_for(lambda: attempt_of_late(admin) != 0, what="the attempt is counted")
        if not late.blocks_the_loop:
            wait_for(lambda: count(url) == 0, what="the next attempt has ended")
        late.end(url, admin)
    assert late.refused == [1]
    assert effects(url) == [2]
    assert attempts(url) == {("completed", 2)}


@pytest.mark.expects("jobs.fenced")
def test_a_handler_that_ignores_its_time_limit_holds_up_nothing_else(
    url, app, admin, connect, late
):
    @app.job()
    def add(job, n: int) -> None:
        with job.transaction() as connection:
            connection.execute(ADD, (n, job.id))

    with heard("job.stuck") as stuck, executing_late(app) as process:
        with connect() as connection:
            add.enqueue_many(connection, [{"n": 100}, {"n": 101}])
        wait_for(lambda: {100, 101} <= set(effects(url)), what="the others have run")
        wait_for(lambda: stuck, what="its time is over")
        await_heartbeats(admin, process)
        late.end(url, admin)
    assert effects(url) == [2, 100, 101]
    assert attempts(url) == {("completed", 1), ("completed", 2)}


@pytest.mark.expects("jobs.fenced")
def test_a_handler_that_ignores_its_time_limit_is_reported(url, app, admin, late):
    with (
        heard("loop.blocked") as blocked,
        heard("job.stuck") as stuck,
        executing_late(app),
    ):
        wait_for(lambda: stuck, what="it is reported")
        assert stuck[0][1]["job"].attempt == 1
        assert "overrun" in stuck[0][1]["stack"]
        if late.blocks_the_loop:
            # On a busy machine the loop may have stood still before.
            by_it = wait_for(
                lambda: [e for _, e in blocked if "freed.wait" in e["stack"]],
                timeout=30,
                what=lambda: f"the lag is reported: {blocked}",
            )
            assert by_it[0]["seconds"] >= 0.5
        late.end(url, admin)


def attempt_of_late(admin) -> int | None:
    """Return how many attempts of the late job are over; None once it has ended."""
    row = admin.execute("select attempt from jobs_lib.jobs where type = 'late'")
    found = row.fetchone()
    return None if found is None else found[0]


@pytest.mark.guarantee("FP14")
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_handlers_that_hold_every_connection_hold_up_no_other_jobs(
    url, admin, connect, kind
):
    app = make_app(url, async_workers=4)
    freed = threading.Event()
    inside: list[int] = []

    def hold(job) -> None:
        with job.transaction() as connection:
            connection.execute("select 1")
            inside.append(job.id)
            freed.wait(60)

    async def hold_async(job) -> None:
        async with job.transaction() as connection:
            await connection.execute("select 1")
            inside.append(job.id)
            while not freed.is_set():
                await asyncio.sleep(0.01)

    holding = app.job(name="hold")(hold if kind == "plain" else hold_async)

    @app.job()
    def quick(job) -> None: ...

    @app.job()
    async def quick_async(job) -> None: ...

    other = quick_async if kind == "plain" else quick
    with connect() as connection:
        # There are as many jobs as connections: two for each dispatcher.
        for n in range(4):
            holding.options(origin=f"local/{n}").enqueue(connection)
    with executing(app, HOME, workers=4) as process:
        wait_for(lambda: len(inside) == 4, what="all connections are held")
        with connect() as connection:
            other.enqueue_many(connection, [{}] * 20)
        wait_for(
            lambda: (
                admin.execute(
                    "select count(*) from jobs_lib.history where type like 'quick%'"
                ).fetchone()
                == (20,)
            ),
            what="others are claimed, run and completed",
        )
        await_heartbeats(admin, process)
        assert len(inside) == 4
        freed.set()
        wait_for(lambda: count(url) == 0, what="all have ended")


def exit_itself() -> None:
    os._exit(7)


def leave_the_handler() -> None:
    raise SystemExit(7)


def come_back() -> None: ...


@pytest.mark.guarantee("FP18")
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize(
    ("act", "code"), [(exit_itself, 7), (leave_the_handler, 70), (come_back, 70)]
)
def test_a_fork_in_a_handler_is_harmless(url, app, connect, act, code, kind):
    codes: list[int] = []

    def split() -> None:
        child = os.fork()
        if child:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            # No code of the parent runs here: no thread, and no claim.
            act()

    @app.job(name="plain")
    def fork(job, n: int) -> None:
        with job.transaction() as connection:
            connection.execute(ADD, (n, job.id))
            split()

    @app.job(name="async")
    async def fork_async(job, n: int) -> None:
        async with job.transaction() as connection:
            await connection.execute(ADD, (n, job.id))
            split()

    with connect() as connection:
        app.jobs[kind].enqueue_many(connection, [{"n": n} for n in range(5)])
        app.jobs["plain" if kind == "async" else "async"].enqueue(connection, n=5)
    with executing(app, HOME, workers=2):
        wait_for(lambda: count(url) == 0, what="all have run")
    assert codes == [code] * 6
    assert effects(url) == [*range(6)]
    assert attempts(url) == {("completed", 1)}


@pytest.mark.guarantee("FJ1")
def test_a_job_that_always_fails_is_retried_more_and_more_rarely(
    url, admin, app, connect, monkeypatch
):
    # Draw nearly the longest delay below each bound.
    monkeypatch.setattr("jobs_lib.backoff.random.random", lambda: 0.999)
    times: list[float] = []

    @app.job(retry=exponential(first=0.05, cap=0.4))
    def poison(job) -> None:
        times.append(time.monotonic())
        raise ValueError(job.attempt)

    with connect() as connection:
        poison.enqueue(connection)
    with heard("job.failed") as failed, executing(app, HOME):
        wait_for(lambda: len(failed) >= 14, timeout=60, what="it has failed often")
    row = admin.execute("select attempt, errors from jobs_lib.jobs").fetchone()
    assert row is not None
    attempt, errors = row
    assert attempt == len(times) >= 14
    assert [e["attempt"] for e in errors] == [*range(attempt - 9, attempt + 1)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    # Each bound doubles until the last one stays. On no machine does an attempt come
    # early.
    bounds = [0.05, 0.1, 0.2] + [0.4] * (len(gaps) - 3)
    assert all(gap > 0.99 * bound for gap, bound in zip(gaps, bounds, strict=True))
    # Nor is it meant to come late. When it comes, the machine decides, too.
    delays = [fields["retry_in"] for _, fields in failed]
    assert delays == [round(0.999 * bound, 3) for bound in [*bounds, 0.4]]
