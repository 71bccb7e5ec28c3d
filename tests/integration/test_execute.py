"""Claim, order, execute, retry and complete: an executor on the real server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pytest
from psycopg.rows import dict_row

from jobs_lib import Discard, Job, Rate, Snooze, exponential
from jobs_lib.errors import FencedError
from tests.support.apps import HOME, count, executing, heard, make_app


@pytest.mark.guarantee("S9")
def test_a_group_runs_one_job_at_a_time_in_the_order_of_enqueue(
    app, admin, connect, wait_for
):
    runs: list[tuple[float, float, int]] = []

    @app.job(group="group")
    def work(job: Job, group: str) -> None:
        started = time.monotonic()
        runs.append((started, time.monotonic(), job.id))

    @app.job()
    def scatter(job: Job, times: int) -> None:
        # Handlers in different origins enqueue it: the group has an origin of its own.
        with job.transaction() as connection:
            for _ in range(times):
                work.enqueue(connection, group="g")

    def enqueue_like_a_request():
        for _ in range(100):
            with connect() as connection:
                work.enqueue(connection, group="g")

    with connect() as connection:
        for n in range(16):
            scatter.options(origin=f"local/{n}").enqueue(connection, times=50)
    thread = threading.Thread(target=enqueue_like_a_request)
    with executing(app, HOME, workers=16):
        thread.start()
        thread.join()
        wait_for(lambda: count(admin, "history") == 916, timeout=60, what="all ran")
    assert len(runs) == 900
    assert all(before[1] <= after[0] for before, after in pairwise(runs))
    # The lock of the group makes the order of commits the order of ids.
    assert [job_id for _, _, job_id in runs] == sorted(job_id for _, _, job_id in runs)


@pytest.mark.guarantee("S10")
def test_groups_run_in_parallel(app, admin, connect, wait_for):
    # Each job waits for the other: this works only if both run at once.
    together = threading.Barrier(2, timeout=30)

    @app.job(group="group")
    def meet(job: Job, group: str) -> None:
        together.wait()

    with connect() as connection:
        meet.options(origin="local/1").enqueue(connection, group="a")
        meet.options(origin="local/1").enqueue(connection, group="b")
    with executing(app, HOME, workers=2):
        wait_for(lambda: count(admin, "history") == 2, timeout=60, what="both ran")


@pytest.mark.guarantee("S6")
def test_a_job_for_later_runs_when_it_is_due_and_not_before(
    app, admin, connect, wait_for
):
    seen: list[tuple[datetime, datetime]] = []

    @app.job()
    def work(job: Job) -> None:
        assert job.run_at is not None
        seen.append((job.run_at, datetime.now(UTC)))

    now = datetime.now(UTC)
    with connect() as connection:
        work.options(run_at=now + timedelta(days=1)).enqueue(connection)
        for n in range(5):
            due = now + timedelta(milliseconds=200 * n)
            work.options(run_at=due).enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 5, what="those due ran")
    assert all(due <= ran for due, ran in seen)
    # Only the database's clock counts: tomorrow is moved to now.
    admin.execute("update jobs_lib.jobs set run_at = clock_timestamp()")
    with executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 6, what="the last one is due")


@pytest.mark.guarantee("S7")
def test_an_unknown_type_stays_and_is_reported_and_others_run(
    app, admin, connect, database_url, wait_for
):
    newer = make_app(database_url)

    @newer.job(group="group")
    def unknown(job: Job, group: str | None = None) -> None: ...

    @app.job(group="group")
    def known(job: Job, group: str | None = None) -> None: ...

    with connect() as connection:
        unknown.options(origin="local/0").enqueue(connection)
        unknown.enqueue(connection, group="blocked")
        known.enqueue(connection, group="blocked")
        known.enqueue(connection, group="free")
        known.enqueue(connection)
    with heard("jobs.unknown") as reported, executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 2, what="the known ones ran")
        wait_for(lambda: len(reported) == 2, what="both origins are reported")
    found = {(fields["type"], fields["origin"]) for _, fields in reported}
    assert found == {("unknown", "local/0"), ("unknown", "local/15")}
    left = admin.execute("select type, attempt, state from jobs_lib.jobs order by id")
    assert left.fetchall() == [
        ("unknown", 0, "available"),
        ("unknown", 0, "available"),
        ("known", 0, "available"),
    ]
    # A pod that knows both types finishes the rest, in the order of the group.
    newer.jobs["known"] = known
    with executing(newer, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="the newer pod ran the rest")


@pytest.mark.guarantee("J4")
def test_a_handler_gets_the_values_of_an_enqueue_with_their_types(
    app, connect, wait_for
):
    seen: list[tuple[Any, ...]] = []

    @app.job()
    def work(
        job: Job, at: datetime, price: Decimal, raw: bytes, more: set[int]
    ) -> None:
        seen.append((at, price, raw, more))

    given = (datetime(2024, 2, 29, tzinfo=UTC), Decimal("1.10"), b"\x00\xff", {1, 2})
    at, price, raw, more = given
    with connect() as connection:
        work.enqueue(connection, at=at, price=price, raw=raw, more=more)
    with executing(app, HOME):
        wait_for(lambda: seen, what="it ran")
    assert seen == [given]
    assert [type(value) for value in seen[0]] == [type(value) for value in given]


@pytest.mark.guarantee("S16")
def test_a_failing_job_backs_off_alone_and_nothing_is_lost(
    app, admin, connect, wait_for, monkeypatch
):
    # Draw nearly the longest delay below each bound.
    monkeypatch.setattr("jobs_lib.backoff.random.random", lambda: 0.999)
    order: list[int] = []

    @app.job(group="group", retry=exponential(first=0.05, factor=2, cap=0.2))
    def work(job: Job, n: int, group: str, fails: int = 0) -> None:
        if job.attempt <= fails:
            raise RuntimeError(f"attempt {job.attempt} of {n}")
        if group == "bad":
            order.append(n)

    with connect() as connection:
        work.enqueue(connection, n=0, group="bad")
        work.enqueue(connection, n=1, group="bad", fails=6)
        work.enqueue(connection, n=2, group="bad")
        many = [{"n": n, "group": f"g{n % 50}"} for n in range(500)]
        work.enqueue_many(connection, many)
        stuck = work.options(origin="local/0")
        stuck.enqueue(connection, n=9, group="stuck", fails=10**6)
    with heard("jobs.retried") as retried, executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 503, what="all but one finished")
        again = "select attempt > 3 from jobs_lib.jobs"
        wait_for(lambda: admin.execute(again).fetchone() == (True,), what="it fails on")
    assert order == [0, 1, 2]
    assert len(retried) >= 7
    state, attempt, errors, delay = admin.execute(
        "select state, attempt, errors, run_at - (errors->-1->>'at')::timestamptz"
        " from jobs_lib.jobs"
    ).fetchone()
    assert state in {"scheduled", "available"}
    assert attempt >= 1
    assert errors[-1]["error"] == f"RuntimeError: attempt {attempt} of 9"
    assert [e["attempt"] for e in errors] == list(
        range(attempt - len(errors) + 1, attempt + 1)
    )
    # From the fourth attempt on it is the cap's delay, four times the first one.
    assert timedelta(seconds=0.19) <= delay <= timedelta(seconds=0.2 + 0.01)


def test_a_snooze_burns_no_attempt_and_a_discard_lets_the_group_go_on(
    app, admin, connect, wait_for
):
    seen: list[tuple[str, int]] = []

    @app.job(group="group")
    def work(job: Job, name: str, group: str) -> None:
        seen.append((name, job.attempt))
        if name == "sleepy" and len(seen) < 3:
            raise Snooze(0.01)
        if name == "hopeless":
            raise Discard("no such customer")

    with connect() as connection:
        for name in ("sleepy", "hopeless", "last"):
            work.enqueue(connection, name=name, group="g")
    with executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 3, what="all ended")
    assert seen == [
        ("sleepy", 1), ("sleepy", 1), ("sleepy", 1), ("hopeless", 1), ("last", 1)
    ]  # fmt: skip
    kept = admin.execute("select type, errors->-1->>'error' from jobs_lib.discarded")
    assert kept.fetchall() == [("work", "Discard: no such customer")]


def test_a_job_with_too_many_attempts_is_discarded(app, admin, connect, wait_for):
    @app.job(retry=exponential(first=0.01, cap=0.01, max_attempts=3))
    def work(job: Job) -> None:
        raise RuntimeError("never")

    with connect() as connection:
        work.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "discarded") == 1, what="it is given up")
    attempt, errors = admin.execute(
        "select attempt, errors from jobs_lib.discarded"
    ).fetchone()
    assert (attempt, [e["attempt"] for e in errors]) == (3, [1, 2, 3])


def test_a_row_that_commits_late_with_a_lower_id_is_found(
    app, admin, connect, wait_for
):
    @app.job()
    def work(job: Job) -> None: ...

    late = connect()
    work.options(origin="local/0").enqueue(late)
    with executing(app, HOME):
        with connect() as connection:
            work.options(origin="local/0").enqueue(connection)
        wait_for(lambda: count(admin, "history") == 1, what="the cursor has passed")
        late.commit()
        wait_for(lambda: count(admin, "history") == 2, what="the late one is swept up")


def test_the_jobs_transaction_commits_with_its_completion(
    app, admin, connect, wait_for
):
    admin.execute("create table effects (n int)")

    @app.job(retry=exponential(first=0.01, cap=0.01))
    def work(job: Job, n: int) -> None:
        with job.transaction() as connection:
            connection.execute("insert into effects values (%s)", (n,))
            if job.attempt == 1:
                raise RuntimeError("inside the transaction")

    with connect() as connection:
        work.enqueue_many(connection, [{"n": n} for n in range(20)])
    with executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 20, what="all committed")
    effects = admin.execute("select n from effects order by n").fetchall()
    assert effects == [(n,) for n in range(20)]


@dataclass
class Inside:
    """A job of `local/0` whose first run waits inside its transaction."""

    job_id: int
    begun: threading.Event
    may_end: threading.Event
    refused: list[FencedError]
    """The errors that refused its commits."""


@pytest.fixture
def inside(app, admin, connect) -> Inside:
    """The job, and its table `effects`."""
    admin.execute("create table effects (job bigint)")
    begun, may_end = threading.Event(), threading.Event()
    refused: list[FencedError] = []

    @app.job()
    def work(job: Job) -> None:
        try:
            with job.transaction() as connection:
                connection.execute("insert into effects values (%s)", (job.id,))
                if not begun.is_set():
                    begun.set()
                    assert may_end.wait(60)
        except FencedError as error:
            refused.append(error)
            raise

    with connect() as connection:
        job_id = work.options(origin="local/0").enqueue(connection)
    return Inside(job_id, begun, may_end, refused)


@pytest.mark.expects("origins.lost")
def test_a_stale_owner_can_neither_commit_nor_complete(
    app, admin, inside, wait_for, caplog
):
    with executing(app, ["local/0"]):
        assert inside.begun.wait(30)
        # Another pod takes over while the handler is inside its transaction. The pod
        # need not wait for the handler, and the handler's commit is refused.
        with heard("jobs.fenced") as fenced, executing(app, ["local/0"]):
            wait_for(lambda: count(admin, "history") == 1, what="the new owner ran it")
            inside.may_end.set()
            wait_for(lambda: inside.refused, what="the old owner is refused")
            wait_for(lambda: fenced, what="that is reported")
            assert [fields["ids"] for _, fields in fenced] == [[inside.job_id]]
            # Listeners get the event before it is logged.
            logged = f"jobs.fenced ids=[{inside.job_id}]"
            wait_for(lambda: logged in caplog.text, what="that is logged")
    assert "no longer" in str(inside.refused[0])
    assert admin.execute("select job from effects").fetchall() == [(inside.job_id,)]


def test_earlier_jobs_of_the_group_are_complete_when_an_effect_commits(
    app, admin, connect, wait_for
):
    unfinished: list[int] = []

    @app.job(group="group")
    def plain(job: Job, group: str) -> None: ...

    @app.job(group="group")
    def effect(job: Job, group: str) -> None:
        with job.transaction():
            pass
        row = admin.execute(
            "select count(*) from jobs_lib.jobs where id < %s", (job.id,)
        )
        unfinished.append(row.fetchone()[0])

    with connect() as connection:
        for _ in range(20):
            plain.enqueue(connection, group="g")
            effect.enqueue(connection, group="g")
    with heard("jobs.fenced") as fenced, executing(app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="all finished")
    assert unfinished == [0] * 20
    assert fenced == []


@pytest.mark.guarantee("S12", "S8")
def test_an_executor_claims_from_its_own_origins_only(app, admin, connect, wait_for):
    ran: dict[str, set[str]] = defaultdict(set)

    @app.job()
    def work(job: Job) -> None:
        ran[job.origin].add(threading.current_thread().name)

    with connect() as connection:
        for n in range(12):
            for _ in range(20):
                work.options(origin=f"local/{n}").enqueue(connection)
    with executing(app, ["local/1", "local/2"]):
        wait_for(lambda: count(admin, "history") == 40, what="the owned ones ran")
    assert set(ran) == {"local/1", "local/2"}
    # An empty assignment claims nothing, while its neighbour finishes its own share.
    with executing(app, []), executing(app, ["local/3"]):
        wait_for(lambda: count(admin, "history") == 60, what="one more origin ran")
    assert set(ran) == {"local/1", "local/2", "local/3"}


def test_jobs_survive_a_database_that_restarts(
    app, admin, connect, postgres_server, wait_for
):
    release = threading.Event()

    @app.job()
    def work(job: Job, n: int) -> None:
        release.wait(60)

    with connect() as connection:
        work.enqueue_many(connection, [{"n": n} for n in range(200)])
    # A loop may fail while the executor ends, so the test listens longer.
    with heard("loop.failed"), executing(app, HOME, workers=2):
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'jobs_lib %' and datname = current_database()"
        )
        release.set()
        wait_for(lambda: count(admin, "jobs") == 0, timeout=30, what="all finished")
    attempts = admin.execute("select distinct attempt from jobs_lib.history").fetchall()
    assert attempts == [(1,)]


@pytest.mark.expects("jobs.fenced", "origins.lost")
def test_the_epoch_alone_refuses_a_stale_owner(app, admin, inside, wait_for):
    # No other executor has run the job meanwhile: only the fence can refuse it.
    with executing(app, ["local/0"]):
        assert inside.begun.wait(30)
        admin.execute(
            "update jobs_lib.origins set epoch = epoch + 1, owner = gen_random_uuid()"
        )
        inside.may_end.set()
        wait_for(lambda: inside.refused, what="the commit at the old epoch is refused")
        # The new owner never lived, so the origin comes back, and the job with it.
        wait_for(lambda: count(admin, "history") == 1, what="it ran again")
    assert admin.execute("select job from effects").fetchall() == [(inside.job_id,)]


def test_a_group_waits_for_the_handler_and_not_only_for_its_commit(
    app, admin, connect, wait_for
):
    committed, leave = threading.Event(), threading.Event()
    order: list[str] = []

    @app.job(group="group")
    def work(job: Job, name: str, group: str) -> None:
        with job.transaction():
            pass
        if name == "first":
            committed.set()
            assert leave.wait(60)
        order.append(name)

    with connect() as connection:
        work.enqueue(connection, name="first", group="g")
    with executing(app, HOME):
        assert committed.wait(30)
        # Its row is gone, so the next job is the lowest of the group.
        with connect() as connection:
            work.enqueue(connection, name="second", group="g")
        for n in range(3):
            with connect() as connection:
                work.options(origin=f"local/{n}").enqueue(
                    connection, name="other", group=f"other {n}"
                )
            wait_for(lambda n=n: order.count("other") == n + 1, what="others run")
        assert "second" not in order
        leave.set()
        wait_for(lambda: count(admin, "jobs") == 0, what="all ran")
    assert order == ["other", "other", "other", "first", "second"]


def test_async_handlers_run_together_and_commit_with_their_jobs(
    app, admin, connect, wait_for
):
    admin.execute("create table effects (n int)")
    together = 0
    most = 0

    @app.job()
    async def work(job: Job, n: int) -> None:
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0.01)
        async with job.transaction() as connection:
            await connection.execute("insert into effects values (%s)", (n,))
        together -= 1

    with connect() as connection:
        work.enqueue_many(connection, [{"n": n} for n in range(50)])
    with executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 50, what="all ran")
    assert most > 10
    effects = admin.execute("select n from effects order by n").fetchall()
    assert effects == [(n,) for n in range(50)]


def test_a_group_goes_through_async_and_plain_handlers_in_order(
    app, admin, connect, wait_for
):
    ran: list[int] = []

    @app.job(group="group")
    def plain(job: Job, n: int, group: str) -> None:
        ran.append(n)

    @app.job(group="group")
    async def waiting(job: Job, n: int, group: str) -> None:
        await asyncio.sleep(0)
        ran.append(n)

    with connect() as connection:
        for n in range(40):
            job_type = plain if n % 3 else waiting
            job_type.enqueue(connection, n=n, group="g")
    with executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 40, what="all ran")
    assert ran == list(range(40))


@pytest.mark.guarantee("S11")
def test_of_what_runs_last_only_one_runs_with_the_newest_payload(
    app, admin, connect, wait_for
):
    ran: list[int] = []

    @app.job(group="group", last_only=True)
    def work(job: Job, n: int, group: str) -> None:
        ran.append(n)

    with connect() as connection:
        for n in range(5):
            work.enqueue(connection, n=n, group="g")
    with executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 5, what="all ended")
    assert ran == [4]
    ends = admin.execute(
        "select outcome, count(*) from jobs_lib.history group by outcome order by 1"
    )
    assert ends.fetchall() == [("completed", 1), ("superseded", 4)]


@pytest.mark.expects("jobs.fenced")
def test_the_attempt_of_a_job_out_of_time_commits_nothing_and_another_runs(
    app, admin, connect, wait_for
):
    admin.execute("create table effects (attempt int)")
    over, refused = threading.Event(), threading.Event()

    # The limit gives a busy machine time to open the transaction.
    @app.job(time_limit=1, retry=exponential(first=0.01, cap=0.01))
    def work(job: Job) -> None:
        try:
            with job.transaction() as connection:
                if job.attempt == 1:
                    assert over.wait(60)
                connection.execute("insert into effects values (%s)", (job.attempt,))
        except FencedError:
            refused.set()
            raise

    with connect() as connection:
        work.enqueue(connection)
    with heard("job.stuck") as stuck, executing(app, HOME, workers=1):
        wait_for(lambda: count(admin, "history") == 1, what="the second attempt ran")
        over.set()
        wait_for(refused.is_set, what="the first one is refused")
    assert "over.wait" in stuck[0][1]["stack"]
    assert admin.execute("select attempt from effects").fetchall() == [(2,)]


def test_an_async_handler_out_of_time_is_cancelled_and_retried(
    app, admin, connect, wait_for
):
    attempts: list[int] = []

    # The limit gives a busy machine time to end the second attempt.
    @app.job(time_limit=1, retry=exponential(first=0.01, cap=0.01))
    async def work(job: Job) -> None:
        attempts.append(job.attempt)
        if job.attempt == 1:
            await asyncio.sleep(60)

    with connect() as connection:
        work.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 1, what="the second attempt ran")
    assert attempts == [1, 2]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_connection_that_a_handler_has_changed_is_as_new_for_what_follows(
    app, admin, connect, wait_for, kind
):
    found: list[Any] = []
    as_dicts: Any = dict_row
    once, often = exponential(max_attempts=1), Rate(100)

    if kind == "plain":

        @app.job(retry=once)
        def work(job: Job, text: str = "") -> None:
            with job.transaction() as connection:
                found.append(connection.execute("select 1 as n").fetchone())
                connection.row_factory = as_dicts

        @app.job(retry=once, rate=often)
        def seldom(job: Job) -> None: ...

    else:

        @app.job(retry=once)
        async def work(job: Job, text: str = "") -> None:
            async with job.transaction() as connection:
                answer = await connection.execute("select 1 as n")
                found.append(await answer.fetchone())
                connection.row_factory = as_dicts

        @app.job(retry=once, rate=often)
        async def seldom(job: Job) -> None: ...

    with executing(app, HOME, workers=1):
        # A large payload is read by itself, with the connection of the job before.
        for text in ("", "x" * 20_000, ""):
            before = count(admin, "history")
            with connect() as connection:
                work.enqueue(connection, text=text)
            wait_for(lambda n=before: count(admin, "history") > n, what="it ended")
        with connect() as connection:
            seldom.enqueue(connection)
        wait_for(lambda: count(admin, "history") == 4, what="all ended")
    ends = admin.execute("select distinct outcome, attempt from jobs_lib.history")
    assert ends.fetchall() == [("completed", 1)]
    assert found == [(1,)] * 3
