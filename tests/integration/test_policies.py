"""Policies, rules and time limits decide the outcome of a failed job."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs_lib import Cancel, Discard, Job, RetryAfter, Snooze, exponential
from jobs_lib.errors import (
    AccessError,
    FencedError,
    UnavailableError,
    UnknownPublishError,
)
from tests.support.apps import HOME, count, executing, heard, make_app

DRAWN = 1_000


@pytest.mark.expects("jobs.fenced", "origins.lost")
@pytest.mark.guarantee("J7")
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_every_attempt_of_a_job_carries_the_same_key(
    app, admin, connect, wait_for, kind
):
    sink: dict[int, list[str]] = {}
    inside, taken = threading.Event(), threading.Event()

    def call(job: Job) -> None:
        keys = sink.setdefault(job.id, [])
        keys.append(job.idempotency_key)
        if len(keys) == 1:
            raise RuntimeError("the sink has it, and its answer was lost")
        if len(keys) == 2:
            raise Snooze(0.01)

    @app.job(name="plain", retry=exponential(first=0.01, cap=0.01))
    def plain(job: Job) -> None:
        call(job)
        if len(sink[job.id]) == 3 and not inside.is_set():
            inside.set()
            assert taken.wait(60)

    @app.job(name="async", retry=exponential(first=0.01, cap=0.01))
    async def waiting(job: Job) -> None:
        call(job)
        if len(sink[job.id]) == 3 and not inside.is_set():
            inside.set()
            await asyncio.to_thread(taken.wait, 60)

    with connect() as connection:
        for _ in range(3):
            app.jobs[kind].options(origin="local/1").enqueue(connection)
    with executing(app, HOME):
        assert inside.wait(30)
        wait_for(lambda: count(admin, "history") == 2, what="the others ended")
        # A take-over cuts off the third attempt of this one.
        with executing(app, HOME):
            wait_for(lambda: count(admin, "jobs") == 0, what="all ended")
            taken.set()
    assert sorted(len(keys) for keys in sink.values()) == [3, 3, 4]
    assert all(len(set(keys)) == 1 for keys in sink.values())
    assert len({keys[0] for keys in sink.values()}) == 3


class Broken(Exception):
    """An error that is retried by a policy of its own."""


class Worse(Broken):
    """An error that is closer to another rule."""


class Withdrawn(Exception):
    """An error that ends a job without a trace of failure."""


@pytest.mark.guarantee("J8")
def test_gaps_follow_the_formula(app, admin, connect, wait_for):
    # The delay is so long that none of a thousand comes back while the test waits.
    @app.job(retry=exponential(first=1e9, factor=2, cap=2.5e9))
    def fail(job: Job) -> None:
        raise RuntimeError("always")

    def gaps(attempt: int) -> list[float]:
        rows = admin.execute(
            "select extract(epoch from run_at - (errors->-1->>'at')::timestamptz)"
            "::float8 from jobs_lib.jobs where attempt = %s",
            (attempt,),
        )
        return [gap for (gap,) in rows.fetchall()]

    with connect() as connection:
        fail.enqueue_many(connection, [{}] * DRAWN)
    with executing(app, HOME):
        for attempt in (1, 2, 3):
            wait_for(
                lambda n=attempt: len(gaps(n)) == DRAWN,
                timeout=60,
                what=f"{attempt} failures each",
            )
            bound = [1e9, 2e9, 2.5e9][attempt - 1]
            assert distance_from_even(gaps(attempt), bound) < 0.09
            admin.execute("update jobs_lib.jobs set run_at = now()")


@pytest.mark.guarantee("J8")
def test_an_error_of_a_server_that_a_handler_raises_has_its_policy_and_rules(
    app, admin, connect, wait_for
):
    @app.job(retry=exponential(first=0.01, cap=0.01, max_attempts=3))
    def denied(job: Job) -> None:
        raise AccessError("Kafka denies WRITE")

    @app.job(rules={UnavailableError: Discard})
    def ruled(job: Job) -> None:
        raise UnavailableError("the partner is away")

    with connect() as connection:
        denied.enqueue(connection)
        ruled.enqueue(connection)
    with heard("job.failed") as failed, executing(app, HOME):
        wait_for(lambda: count(admin, "discarded") == 2, what="both are discarded")
        wait_for(lambda: len(failed) == 4, what="each attempt is told")
    told = sorted((one["type"], one["attempt"], one["kind"]) for _, one in failed)
    assert told == [
        ("denied", 1, "AccessError"),
        ("denied", 2, "AccessError"),
        ("denied", 3, "AccessError"),
        ("ruled", 1, "UnavailableError"),
    ]


@pytest.mark.guarantee("J8")
@pytest.mark.parametrize("rule", [None, Exception, UnavailableError])
def test_a_server_that_the_library_finds_away_costs_an_attempt_only_by_a_rule(
    app, admin, connect, wait_for, monkeypatch, rule
):
    monkeypatch.setattr(random, "random", lambda: 0.01)

    @app.job(retry=1, rules={rule: Discard} if rule else {})
    def publish(job: Job) -> None:
        away = UnknownPublishError("Kafka does not answer")
        away.is_passing = True
        raise away

    with connect() as connection:
        publish.enqueue(connection)
    with heard("job.failed") as failed, executing(app, HOME):
        wait_for(
            lambda: len(failed) == 7 or count(admin, "discarded"),
            what="it has waited, or was discarded",
        )
    if rule is UnavailableError:
        assert [fields["outcome"] for _, fields in failed] == ["discarded"]
        return
    # It is told each time, and the pauses grow to five seconds.
    assert [(one["attempt"], one["outcome"]) for _, one in failed[:7]] == [
        (1, "snoozed")
    ] * 7
    pauses = [one["retry_in"] for _, one in failed[:7]]
    assert pauses == [0.004, 0.008, 0.016, 0.032, 0.05, 0.05, 0.05]


@pytest.mark.guarantee("J8")
def test_each_outcome_does_what_it_says(app, admin, connect, wait_for):
    @app.job(
        retry=exponential(first=1e6, cap=1e6),
        rules={
            Broken: exponential(first=7_000, cap=7_000, max_attempts=2),
            Worse: Discard,
            Withdrawn: Cancel,
        },
    )
    def choose(job: Job, what: str) -> None:
        if what == "done":
            return
        raise {
            "ruled": Broken("by a policy of its own"),
            "worse": Worse("by the closest rule"),
            "withdrawn": Withdrawn("by a rule"),
            "snooze": Snooze(5_000),
            "after": RetryAfter(3_000),
            "cancel": Cancel("said so"),
            "discard": Discard("said so"),
        }[what]

    whats = ["ruled", "worse", "withdrawn", "snooze", "after", "cancel", "discard"]
    with connect() as connection:
        choose.enqueue_many(connection, [{"what": what} for what in [*whats, "done"]])
    ended = "select count(*) from jobs_lib.history"
    waiting = "select count(*) from jobs_lib.jobs where state = 'scheduled'"
    with executing(app, HOME):
        wait_for(
            lambda: (
                admin.execute(ended).fetchone() == (5,)
                and admin.execute(waiting).fetchone() == (3,)
            ),
            what="five have ended, and three wait",
        )
    kept = admin.execute(
        "select payload->>'what', attempt, crashes, extract(epoch from run_at - now())"
        " from jobs_lib.jobs"
    ).fetchall()
    left = {what: (attempt, float(seconds)) for what, attempt, _, seconds in kept}
    assert left.keys() == {"ruled", "snooze", "after"}
    assert left["ruled"][0] == left["after"][0] == 1
    assert left["snooze"][0] == 0, "a snooze is no attempt"
    assert 0 <= left["ruled"][1] <= 7_000
    assert 4_900 < left["snooze"][1] <= 5_000
    assert 2_900 < left["after"][1] <= 3_000
    given_up = admin.execute(
        "select payload->>'what', errors->-1->>'error' from jobs_lib.discarded"
        " order by 1"
    ).fetchall()
    assert given_up == [
        ("discard", "Discard: said so"),
        ("worse", "Worse: by the closest rule"),
    ]
    ends = admin.execute(
        "select outcome, count(*) from jobs_lib.history group by 1 order by 1"
    ).fetchall()
    assert ends == [("cancelled", 2), ("completed", 1), ("discarded", 2)]


def distance_from_even(values: list[float], bound: float) -> float:
    """How far the values are from an even spread over zero to the bound.

    This is the largest difference of the two distribution functions. With 1,000 even
    draws it exceeds 0.09 in one of ten million cases.
    """
    assert all(-0.1 <= value <= bound for value in values)
    n = len(values)
    places = enumerate(sorted(values))
    return max(max((i + 1) / n - v / bound, v / bound - i / n) for i, v in places)


@given(
    first=st.floats(0.001, 1e4),
    factor=st.floats(1, 100),
    times=st.floats(1, 1e6),
    attempt=st.integers(1, 2**31),
)
def test_a_delay_never_leaves_its_bounds(first, factor, times, attempt):
    policy = exponential(first=first, factor=factor, cap=first * times)
    bound = policy.bound(attempt)
    assert 0 <= policy.delay(attempt) <= bound <= policy.cap
    assert bound >= min(first, policy.cap)
    assert policy.bound(attempt + 1) >= bound
    if attempt < 20 and (exact := first * factor ** (attempt - 1)) < policy.cap:
        assert bound == pytest.approx(exact)


@pytest.mark.guarantee("J9")
@pytest.mark.expects("jobs.fenced")
def test_a_handler_that_overruns_its_limit_is_cancelled_or_fenced_and_reported(
    app, admin, connect, wait_for
):
    admin.execute("create table effects (name text, attempt int)")
    over = threading.Event()
    refused: list[int] = []
    cancelled: list[int] = []
    retry = exponential(first=0.01, cap=0.01)

    # The limits give a busy machine time to end the second attempts.
    @app.job(time_limit=1, retry=retry)
    def plain(job: Job) -> None:
        try:
            with job.transaction() as connection:
                if job.attempt == 1:
                    assert over.wait(60)
                connection.execute(
                    "insert into effects values ('plain', %s)", (job.attempt,)
                )
        except FencedError:
            refused.append(job.attempt)
            raise

    @app.job(time_limit=1, retry=retry)
    async def waiting(job: Job) -> None:
        try:
            async with job.transaction() as connection:
                await connection.execute(
                    "insert into effects values ('async', %s)", (job.attempt,)
                )
                if job.attempt == 1:
                    await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(job.attempt)
            raise

    with connect() as connection:
        plain.enqueue(connection)
        waiting.enqueue(connection)
    with heard("job.stuck") as stuck, executing(app, HOME, workers=1):
        wait_for(lambda: count(admin, "history") == 2, what="second attempts ran")
        assert cancelled == [1]
        over.set()
        wait_for(lambda: refused, what="the first attempt may not commit")
    assert refused == [1]
    ((_, fields),) = stuck
    assert fields["job"].type == "plain"
    assert "over.wait" in fields["stack"]
    rows = admin.execute("select name, attempt from effects order by 1").fetchall()
    assert rows == [("async", 2), ("plain", 2)]
    attempts = admin.execute("select type, attempt from jobs_lib.history order by 1")
    assert attempts.fetchall() == [("plain", 2), ("waiting", 2)]


@pytest.mark.guarantee("J9", "S24")
@pytest.mark.expects("jobs.fenced")
@pytest.mark.parametrize("kind", ["plain", "async", "statement"])
def test_a_handler_that_hangs_in_its_transaction_keeps_no_lock_and_no_connection(
    database_url, admin, connect, wait_for, kind
):
    # As many attempts hang as there are connections for one worker.
    app = make_app(database_url, async_workers=2)
    admin.execute("create table effects (n int); insert into effects values (0)")
    over = threading.Event()
    ended: list[type] = []
    retry = exponential(first=0.01, cap=0.01)
    change = "update effects set n = n + 1"

    def note(error: BaseException) -> None:
        if over.is_set():
            ended.append(type(error))

    @app.job(name="plain", time_limit=1.5, retry=retry)
    def plain(job: Job) -> None:
        try:
            with job.transaction() as connection:
                connection.execute(change)
                if job.attempt <= 2:
                    assert over.wait(60)
        except BaseException as error:
            note(error)
            raise

    @app.job(name="async", time_limit=1.5, retry=retry)
    async def stubborn(job: Job) -> None:
        try:
            async with job.transaction() as connection:
                await connection.execute(change)
                while job.attempt <= 2 and not over.is_set():
                    with suppress(asyncio.CancelledError):
                        await asyncio.sleep(0.02)
        except BaseException as error:
            note(error)
            raise

    @app.job(name="statement", time_limit=1.5, retry=retry)
    def statement(job: Job) -> None:
        with job.transaction() as connection:
            connection.execute(change)
            if job.attempt <= 2:
                connection.execute("select pg_sleep(600)")

    with connect() as connection:
        app.jobs[kind].enqueue(connection)
    with heard("job.stuck") as stuck, executing(app, HOME, workers=1):
        wait_for(lambda: count(admin, "history") == 1, what="an attempt ends well")
        over.set()
        expected = [] if kind == "statement" else [FencedError] * 2
        wait_for(lambda: ended == expected, what="the others are refused")
    assert len(stuck) >= 2
    assert admin.execute("select n from effects").fetchall() == [(1,)]
