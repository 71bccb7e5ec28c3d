"""Periodic jobs: several schedulers on one database, on a clock that the test sets."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import psycopg
import pytest

from jobs_lib.service.scheduler import Scheduler
from jobs_lib.service.service import Service
from tests.support.apps import heard, make_app
from tests.support.clock import NEEDS_FAKETIME, FakeClock, faketime

if TYPE_CHECKING:
    from jobs_lib import Job

pytestmark = pytest.mark.expects("fenced")

ZURICH = ZoneInfo("Europe/Zurich")
MIDDAY = datetime(2025, 6, 2, 12, tzinfo=UTC)
EACH = "* * * * * *"


def periodic_app(url: str, cron: str, **options):
    """An app with one schedule, as each pod of a service has it."""
    app = make_app(url)

    @app.periodic(cron, **options)
    @app.job()
    def work(job: Job, tick: datetime) -> None: ...

    return app


@contextlib.contextmanager
def scheduling(clock, *apps):
    """Run a scheduler for each app, and wait until each has looked once."""
    pods = [
        Scheduler(app.database(), app.schedules.values(), clock=clock) for app in apps
    ]
    for pod in pods:
        pod.start()
    try:
        clock.settle(len(pods))
        yield pods
    finally:
        for pod in pods:
            pod.stop()


def enqueued(admin) -> list[datetime]:
    rows = admin.execute("select payload->>'tick' from jobs_lib.jobs order by id")
    return [datetime.fromisoformat(tick) for (tick,) in rows]


@pytest.mark.guarantee("J13")
def test_three_pods_enqueue_each_tick_once_through_both_changes_of_the_clock(
    database_url, admin
):
    pods = [
        periodic_app(database_url, "*/5 * * * *", tz="Europe/Zurich") for _ in range(3)
    ]
    for app in pods:
        app.periodic("30 2 * * *", tz="Europe/Zurich", name="nightly")(app.jobs["work"])
    begin = datetime(2025, 3, 30, 1, 4, 59, tzinfo=ZURICH)
    clock = FakeClock(begin)
    expected: Counter[str] = Counter()
    with scheduling(clock, *pods):
        # The clock passes the minutes in steps that do not meet the ticks.
        for seconds in (0.5, 0.6, 299, 1):
            clock.set(clock.time + timedelta(seconds=seconds))
            clock.settle(3)
        expected.update(["01:05+0100", "01:10+0100"])
        assert Counter(f"{t:%H:%M%z}" for t in enqueued(admin)) == expected
        # 2:00 to 3:00 does not exist: a tick with a time of day within it comes at its
        # end.
        for hour, minute in [(1, 59), (3, 0), (3, 4), (3, 7)]:
            clock.set(datetime(2025, 3, 30, hour, minute, tzinfo=ZURICH))
            clock.settle(3)
        expected.update(["01:55+0100", "03:00+0200", "03:00+0200", "03:05+0200"])
        assert Counter(f"{t:%H:%M%z}" for t in enqueued(admin)) == expected
        # 2:00 to 3:00 comes twice: a time of day counts the first time.
        admin.execute("delete from jobs_lib.jobs")
        admin.execute("update jobs_lib.schedules set ticked_at = '2025-10-26 01:55+02'")
        for fold in (0, 1):
            for minute in range(0, 60, 4):
                clock.set(
                    datetime(2025, 10, 26, 2, minute, 1, tzinfo=ZURICH, fold=fold)
                )
                clock.settle(3)
    assert Counter(f"{t:%H:%M%z}" for t in enqueued(admin)) == Counter(
        [f"02:{minute:02}{zone}" for zone in ("+0200", "+0100")
         for minute in range(0, 60, 5)] + ["02:30+0200"]
    )  # fmt: skip


def test_a_new_schedule_and_a_changed_one_start_from_now(database_url, admin):
    clock = FakeClock(MIDDAY + timedelta(seconds=30))
    with scheduling(clock, periodic_app(database_url, "0 3 * * *", missed="all")):
        pass
    assert enqueued(admin) == []
    # A week later the next release has a tick each minute, but none of that week's.
    week = MIDDAY + timedelta(days=7, seconds=30)
    clock.set(week)
    newer = periodic_app(database_url, "* * * * *", missed="all")
    with scheduling(clock, newer):
        assert enqueued(admin) == []
        clock.set(week + timedelta(minutes=1))
        clock.settle(1)
        assert enqueued(admin) == [MIDDAY + timedelta(days=7, minutes=1)]
    # The same expression in another zone is another schedule, too.
    clock.set(week + timedelta(days=1))
    moved = periodic_app(database_url, "* * * * *", tz="Asia/Tokyo", missed="all")
    with scheduling(clock, moved):
        assert len(enqueued(admin)) == 1


def test_old_and_new_pods_of_one_release_share_the_ticks(database_url, admin):
    clock = FakeClock(MIDDAY)
    old = periodic_app(database_url, "0 * * * *")
    new = periodic_app(database_url, "*/30 * * * *")
    with scheduling(clock, old, new):
        for minutes in (30, 60, 90, 120):
            clock.set(MIDDAY + timedelta(minutes=minutes))
            clock.settle(2)
    assert enqueued(admin) == [MIDDAY + timedelta(minutes=30 * n) for n in (1, 2, 3, 4)]


def test_missed_ticks_are_caught_up_to_a_limit_and_the_dropped_ones_reported(
    database_url, admin
):
    clock = FakeClock(MIDDAY)
    app = periodic_app(database_url, "* * * * *", missed="all")
    with scheduling(clock, app):
        pass
    clock.set(MIDDAY + timedelta(minutes=2_000))
    with heard("ticks.dropped") as dropped, scheduling(clock, app, app):
        pass
    assert enqueued(admin) == [
        MIDDAY + timedelta(minutes=n) for n in range(1_001, 2_001)
    ]
    ((_, fields),) = dropped
    assert fields == {
        "schedule": "work",
        "since": MIDDAY + timedelta(minutes=1),
        "before": MIDDAY + timedelta(minutes=1_001),
    }


def test_a_schedule_that_fails_to_enqueue_is_retried_and_holds_up_no_other(
    database_url, admin
):
    groups: list[object] = [7.5, "mended"]
    app = make_app(database_url)

    @app.periodic("* * * * *")
    @app.job(group=lambda: groups[0])  # type: ignore[arg-type,return-value]
    def broken(job: Job) -> None: ...

    @app.periodic("* * * * *")
    @app.job()
    def sound(job: Job) -> None: ...

    clock = FakeClock(MIDDAY)
    with heard("loop.failed") as failed, scheduling(clock, app):
        clock.set(MIDDAY + timedelta(minutes=1))
        clock.settle(1)
        types = admin.execute("select type from jobs_lib.jobs").fetchall()
        assert types == [("sound",)]
        assert failed[0][1]["loop"] == "schedule broken"
        del groups[0]
        clock.set(MIDDAY + timedelta(minutes=1, seconds=10))
        clock.settle(1)
    types = admin.execute("select type from jobs_lib.jobs order by id").fetchall()
    assert types == [("sound",), ("broken",)]


def two_schedules(url: str):
    """An app with the schedules `first`, of a group, and `second`, in this order."""
    app = make_app(url)

    @app.periodic("* * * * *")
    @app.job(group=lambda: "g")
    def first(job: Job) -> None: ...

    @app.periodic("* * * * *", missed="skip")
    @app.job()
    def second(job: Job) -> None: ...

    return app


@pytest.mark.expects("loop.failed")
def test_a_schedule_whose_group_is_locked_for_long_holds_up_no_other(
    database_url, admin, connect, wait_for
):
    app = two_schedules(database_url)
    clock = FakeClock(MIDDAY)
    with heard("ticks.enqueued") as ticked, connect() as holder, scheduling(clock, app):
        # A producer's transaction stays open, and with it its group's lock.
        app.jobs["first"].enqueue(holder)
        clock.set(MIDDAY + timedelta(minutes=1))
        wait_for(lambda: ticked, timeout=60, what="the second schedule ticks")
        assert [fields["schedule"] for _, fields in ticked] == ["second"]
        holder.rollback()
        clock.settle(1)
        clock.set(MIDDAY + timedelta(minutes=1, seconds=10))
        wait_for(lambda: len(ticked) == 2, what="the first one ticks, too")
    types = admin.execute("select type from jobs_lib.jobs order by id").fetchall()
    assert types == [("second",), ("first",)]


@pytest.mark.expects("loop.failed")
def test_many_schedules_whose_groups_are_locked_wait_no_longer_than_one(
    database_url, connect, wait_for
):
    app = make_app(database_url)

    @app.periodic("* * * * *", name="s0", payload={"n": 0})
    @app.periodic("* * * * *", name="s1", payload={"n": 1})
    @app.periodic("* * * * *", name="s2", payload={"n": 2})
    @app.periodic("* * * * *", name="s3", payload={"n": 3})
    @app.job(group=lambda n: f"g{n}")
    def locked(job: Job, n: int) -> None: ...

    clock = FakeClock(MIDDAY)
    with connect() as holder, scheduling(clock, app), heard("loop.failed") as failed:
        locked.enqueue_many(holder, [{"n": n} for n in range(4)])
        clock.set(MIDDAY + timedelta(minutes=1))
        wait_for(lambda: failed, timeout=60, what="one has waited for its lock")
        began_at = time.monotonic()
        wait_for(lambda: len(failed) == 4, timeout=60, what="all have waited")
        assert time.monotonic() - began_at < 3
        clock.settle(1)
        clock.set(MIDDAY + timedelta(minutes=1, seconds=10))
        wait_for(lambda: len(failed) == 8, timeout=60, what="all have tried again")
        holder.rollback()
    first, again = ([f["loop"] for _, f in some] for some in (failed[:4], failed[4:]))
    # Each gets its turn to wait for long.
    assert again == [*first[1:], first[0]]


@pytest.mark.expects("loop.failed")
def test_a_schedule_whose_middleware_meets_an_outage_holds_up_no_other(
    database_url, admin, wait_for
):
    app = two_schedules(database_url)

    @app.enqueue_middleware
    def look_elsewhere(draft, call_next):
        if draft.type == "first":
            raise psycopg.OperationalError("another database does not answer")
        return call_next(draft)

    clock = FakeClock(MIDDAY)
    with heard("ticks.enqueued") as ticked, scheduling(clock, app):
        clock.set(MIDDAY + timedelta(minutes=1))
        wait_for(lambda: ticked, what="the second schedule ticks")
    assert admin.execute("select type from jobs_lib.jobs").fetchall() == [("second",)]


def test_middleware_that_hangs_does_not_keep_a_scheduler_from_stopping(
    database_url, monkeypatch, wait_for
):
    monkeypatch.setattr("jobs_lib.service.scheduler._LAST_SECONDS", 0.1, raising=False)
    app = two_schedules(database_url)
    asked, go_on = threading.Event(), threading.Event()

    @app.enqueue_middleware
    def hang(draft, call_next):
        asked.set()
        go_on.wait(120)
        return call_next(draft)

    clock = FakeClock(MIDDAY)
    with scheduling(clock, app) as (pod,):
        try:
            clock.set(MIDDAY + timedelta(minutes=1))
            assert asked.wait(60)
            stopping = threading.Thread(target=pod.stop)
            stopping.start()
            wait_for(lambda: not stopping.is_alive(), timeout=30, what="it has stopped")
        finally:
            go_on.set()
        pulse = pod._loop.pulse
        wait_for(lambda: not pulse.is_alive(), what="its thread ends, too")


@pytest.mark.expects("loop.failed")
def test_a_schedule_that_costs_the_connection_lets_the_others_go_first(
    database_url, admin, wait_for
):
    admin.execute(
        "create function cut() returns trigger language plpgsql as $$ begin"
        " perform pg_terminate_backend(pg_backend_pid()); return new; end $$;"
        "create trigger cut before insert on jobs_lib.jobs for each row"
        " when (new.type = 'first') execute function cut()"
    )
    app = two_schedules(database_url)
    clock = FakeClock(MIDDAY)
    with heard("ticks.enqueued") as ticked, scheduling(clock, app):
        clock.set(MIDDAY + timedelta(minutes=1))
        wait_for(lambda: ticked, what="the second schedule ticks")
    assert admin.execute("select type from jobs_lib.jobs").fetchall() == [("second",)]


def test_a_pod_that_dies_inside_a_tick_neither_loses_nor_repeats_it(
    database_url, admin, start_process, wait_for
):
    (started,) = admin.execute(
        "insert into jobs_lib.schedules values ('work', %s, clock_timestamp())"
        " returning ticked_at",
        (f"{EACH} UTC",),
    ).fetchone()
    doomed = [
        start_process("scheduler", database_url, cron=EACH, ends="killed")
        for _ in range(3)
    ]
    for worker in doomed:
        assert worker.wait() == -signal.SIGKILL
    assert enqueued(admin) == []
    start_process("scheduler", database_url, cron=EACH)
    start_process("scheduler", database_url, cron=EACH)
    wait_for(lambda: len(enqueued(admin)) >= 5, timeout=60, what="five ticks are in")
    assert_each_second_once(enqueued(admin), started)


@pytest.mark.slow
@pytest.mark.expects("loop.failed")
def test_a_pod_that_is_stopped_inside_a_tick_does_not_keep_it_from_the_others(
    database_url, admin, start_process, wait_for
):
    stopped = start_process("scheduler", database_url, cron=EACH, ends="stopped")
    stopped.wait_for_line("inside")
    (started,) = admin.execute("select ticked_at from jobs_lib.schedules").fetchone()
    start_process("scheduler", database_url, cron=EACH)
    wait_for(lambda: enqueued(admin), timeout=30, what="the others tick")
    # The server has ended its transaction meanwhile; it continues.
    stopped.resume()
    wait_for(lambda: "loop.failed" in stopped.output, what="it finds out")
    seen = len(enqueued(admin))
    wait_for(lambda: len(enqueued(admin)) > seen + 2, what="three more ticks are in")
    assert_each_second_once(enqueued(admin), started)


@pytest.mark.guarantee("FP15", "J13")
@pytest.mark.parametrize("shift", ["1 hour", "-1 hour"])
def test_ticks_follow_the_clock_of_the_database_where_it_differs_from_the_pods(
    database_url, admin, wait_for, shift
):
    (name,) = admin.execute("select current_database()").fetchone()
    # This function comes before pg_catalog in the path, so it replaces the server's
    # own.
    admin.execute(
        "create schema clock;"
        " create function clock.clock_timestamp() returns timestamptz language sql"
        f" as 'select pg_catalog.clock_timestamp() + interval ''{shift}'' '"
    )
    admin.execute(f'alter database "{name}" set search_path to clock, pg_catalog')
    # A busy machine may look late.
    app = periodic_app(database_url, EACH, missed="all")
    scheduler = Scheduler(app.database(), app.schedules.values())
    scheduler.start()
    try:
        wait_for(lambda: len(enqueued(admin)) >= 3, what="three ticks are in")
    finally:
        scheduler.stop()
    ticks = enqueued(admin)
    (now,) = admin.execute("select clock.clock_timestamp()").fetchone()
    assert abs(ticks[-1] - now) < timedelta(seconds=60)
    assert_each_second_once(ticks, ticks[0] - timedelta(seconds=1))


@NEEDS_FAKETIME
def test_pods_with_wrong_clocks_tick_by_the_database(
    database_url, admin, start_process, wait_for
):
    for name, shift in (("ahead", 3600), ("behind", -3600)):
        started = start_process(
            "scheduler", database_url, cron=EACH, env=faketime(shift)
        ).wait_for_line(r"started at (\d+)")
        assert abs(int(started[1]) - time.time() - shift) < 60
        seen = len(enqueued(admin))
        wait_for(
            lambda n=seen: len(enqueued(admin)) > n,
            timeout=30,
            what=f"ticks with {name}",
        )
    (now,) = admin.execute("select clock_timestamp()").fetchone()
    ticks = enqueued(admin)
    assert abs(ticks[-1] - now) < timedelta(seconds=60)
    assert_each_second_once(ticks, ticks[0] - timedelta(seconds=1))


def test_a_service_runs_its_schedules_and_stops(database_url, admin, wait_for):
    app = make_app(database_url)
    ticks: list[datetime] = []

    @app.periodic("* * * * * *", tz="Europe/Zurich")
    @app.job()
    def work(job: Job, tick: datetime) -> None:
        ticks.append(tick)

    service = Service(app, ["executor"])
    service.start()
    try:
        wait_for(lambda: len(ticks) >= 2, what="two ticks have run")
    finally:
        service.stop()
    assert all(
        tick.utcoffset() == tick.astimezone(ZURICH).utcoffset() for tick in ticks
    )
    # A service without an executor could not run them, so it enqueues none.
    admin.execute("delete from jobs_lib.schedules")
    app.topic("events")
    idle = Service(app, ["relay"])
    with heard("loop.failed"):  # there is no Kafka here, and it does not wait for Kafka
        idle.start()
        idle.stop()
    assert admin.execute("select * from jobs_lib.schedules").fetchall() == []


def assert_each_second_once(ticks: list[datetime], after: datetime) -> None:
    first = after.replace(microsecond=0)
    assert ticks == [first + timedelta(seconds=n) for n in range(1, len(ticks) + 1)]
