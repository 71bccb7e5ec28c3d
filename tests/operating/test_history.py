"""The history: its days are made ahead, dropped whole, and never delay completions."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import psycopg
import pytest

from jobs_lib import Cancel
from jobs_lib.errors import ConfigurationError, OperatingError
from jobs_lib.operating import cancel, maintain
from jobs_lib.operating.checks import Limits
from jobs_lib.service.maintenance import Maintenance
from tests.operating.helpers import add_claim, add_job, add_owner
from tests.support.apps import count, heard, make_app, running

if TYPE_CHECKING:
    from jobs_lib import Job

KEEP = (1, 30)

HISTORY = (
    "insert into jobs_lib.history (keep_until, id, origin, type, outcome, attempt,"
    " enqueued_at) select %s, g, 'local/3', 'work', 'completed', 1, now()"
    " from generate_series(1, %s) g"
)


def today(connection):
    (day,) = connection.execute("select (now() at time zone 'UTC')::date").fetchone()
    return day


def partitions(connection) -> dict[str, int]:
    """The partitions of the history, and the number of rows in each."""
    names = connection.execute(
        "select relname from pg_inherits join pg_class on oid = inhrelid"
        " where inhparent = 'jobs_lib.history'::regclass"
    ).fetchall()
    return {
        name.removeprefix("history_"): connection.execute(
            f"select count(*) from jobs_lib.{name}"
        ).fetchone()[0]
        for (name,) in names
    }


def backdate(connection, days: int) -> str:
    """Make a partition like one that was made some days ago; return its day."""
    day = today(connection) - timedelta(days=days)
    name = f"{day:%Y%m%d}"
    connection.execute(
        f"create table jobs_lib.history_{name} partition of jobs_lib.history"
        f" for values in ('{day}')"
    )
    return name


def test_the_next_days_are_made_and_a_second_call_changes_nothing(database, connect):
    admin = connect(autocommit=True)
    done = maintain(database, KEEP)
    assert (done.made, done.dropped, done.skipped) == (4, 0, False)
    days = [today(admin) + timedelta(days=n) for n in (1, 2, 30, 31)]
    assert partitions(admin) == {"default": 0} | {f"{d:%Y%m%d}": 0 for d in days}
    admin.execute(HISTORY, (days[0], 5))
    assert partitions(admin)[f"{days[0]:%Y%m%d}"] == 5
    again = maintain(database, KEEP)
    assert (again.made, again.dropped, again.deleted, again.left) == (0, 0, 0, 0)
    with pytest.raises(OperatingError, match="1 to 3,660 days"):
        maintain(database, [4_000])


@pytest.mark.guarantee("J17")
def test_a_day_goes_whole_once_its_time_has_passed_and_not_before(database, connect):
    admin = connect(autocommit=True)
    over, last = backdate(admin, 1), backdate(admin, 0)
    for days in (0, 1):
        admin.execute(HISTORY, (today(admin) - timedelta(days=days), 10))
    assert maintain(database).dropped == 1
    left = partitions(admin)
    assert over not in left
    assert left[last] == 10


def test_rows_without_a_day_of_their_own_are_moved_or_deleted(database, connect):
    admin = connect(autocommit=True)
    tomorrow = today(admin) + timedelta(days=1)
    week = today(admin) + timedelta(days=7)
    for day, rows in (
        (tomorrow, 20),
        (week, 7),
        (today(admin) - timedelta(days=1), 25_000),
    ):
        admin.execute(HISTORY, (day, rows))
    done = maintain(database)
    assert done.deleted == 25_000
    assert partitions(admin) == {
        "default": 0,
        f"{tomorrow:%Y%m%d}": 20,
        f"{tomorrow + timedelta(days=1):%Y%m%d}": 0,
        f"{week:%Y%m%d}": 7,
    }


def test_very_many_rows_stay_where_they_are_until_their_time_has_passed(
    database, connect
):
    admin = connect(autocommit=True)
    tomorrow = today(admin) + timedelta(days=1)
    admin.execute(HISTORY, (tomorrow, 10_001))
    assert maintain(database).made == 1
    assert partitions(admin)["default"] == 10_001


def test_a_second_process_leaves_the_maintenance_to_the_first(database, connect):
    holder = connect()
    holder.execute(
        "select pg_advisory_xact_lock(hashtextextended(%s, 7603))", (database.schema,)
    )
    assert maintain(database).skipped
    holder.rollback()
    results: list[object] = []
    pods = [
        threading.Thread(target=lambda: results.append(maintain(database, KEEP)))
        for _ in range(4)
    ]
    for pod in pods:
        pod.start()
    for pod in pods:
        pod.join()
    assert len(results) == 4
    assert maintain(database, KEEP).made + len(partitions(connect())) == 5


def test_completions_go_on_while_a_reader_of_the_history_blocks_the_drop(
    database, connect
):
    admin = connect(autocommit=True)
    maintain(database)
    over = backdate(admin, 1)
    tomorrow = today(admin) + timedelta(days=1)
    reader = connect()
    reader.execute("lock table only jobs_lib.history in access share mode")
    stop = threading.Event()
    waited: list[Exception] = []

    def complete() -> None:
        with psycopg.connect(database.url, autocommit=True) as connection:
            # The server measures the wait for a lock alone, on a busy machine, too.
            connection.execute("set lock_timeout = '500ms'")
            while not stop.is_set():
                try:
                    connection.execute(HISTORY, (tomorrow, 1))
                except psycopg.errors.LockNotAvailable as error:
                    waited.append(error)

    writer = threading.Thread(target=complete)
    writer.start()
    done = maintain(database, ())
    stop.set()
    writer.join()
    assert (done.dropped, done.left) == (0, 1)
    assert partitions(admin)[over] == 0
    assert waited == []
    reader.rollback()
    assert maintain(database, ()).dropped == 1


@pytest.mark.parametrize(("table", "made"), [("jobs", 0), ("claims", 2)])
def test_what_a_locked_table_holds_up_is_left_for_the_next_call(
    database, connect, table, made
):
    """A migration locks the tables that it changes."""
    holder = connect()
    holder.execute(f"lock table jobs_lib.{table}")
    done = maintain(database)
    assert (done.made, done.left) == (made, 1)
    holder.rollback()
    done = maintain(database)
    assert (done.made, done.left) == (2 - made, 0)


def test_requests_to_cancel_go_once_their_jobs_have_ended(database, connect):
    admin = connect(autocommit=True)
    admin.execute(
        "insert into jobs_lib.cancellations values"
        " (1, 'local/3', now() - interval '2 h'), (2, 'local/3', now()),"
        " (%s, 'local/3', now() - interval '2 h')",
        (unfinished := add_job(admin, id=7),),
    )
    maintain(database)
    left = admin.execute("select id from jobs_lib.cancellations order by 1").fetchall()
    assert left == [(2,), (unfinished,)]


def test_old_claims_of_unknown_processes_are_deleted(database, connect):
    admin = connect(autocommit=True)
    known = add_owner(admin)
    add_claim(admin, known, 1)
    add_claim(admin, uuid4(), 2)
    admin.execute("update jobs_lib.claims set claimed_at = now() - interval '2 h'")
    # The process of this claim may be about to start.
    add_claim(admin, uuid4(), 3)
    maintain(database)
    left = admin.execute("select ids from jobs_lib.claims order by ids").fetchall()
    assert left == [([1],), ([3],)]


@pytest.mark.guarantee("J17")
def test_the_drop_of_a_day_costs_the_same_for_any_number_of_rows(database, connect):
    admin = connect(autocommit=True)
    written = []
    for rows in (10, 100_000):
        backdate(admin, 1)
        admin.execute(HISTORY, (today(admin) - timedelta(days=1), rows))
        before = admin.execute("select pg_current_wal_insert_lsn()").fetchone()[0]
        assert maintain(database, ()).dropped == 1
        written.append(
            admin.execute(
                "select pg_current_wal_insert_lsn() - %s::pg_lsn", (before,)
            ).fetchone()[0]
        )
    # Deleting the rows would write more than 50 bytes for each.
    assert written[1] < written[0] + 1_000_000, written


def test_a_role_without_tables_can_maintain_history_but_not_drop_kept_days(
    database, connect
):
    admin = connect(autocommit=True)
    kept = backdate(admin, 0)
    backdate(admin, 1)
    admin.execute("drop role if exists maintainer")
    admin.execute("create role maintainer")
    try:
        admin.execute("grant usage on schema jobs_lib to maintainer")
        admin.execute(
            "grant select, insert, update, delete on all tables in schema jobs_lib"
            " to maintainer"
        )
        admin.execute("grant execute on all functions in schema jobs_lib to maintainer")
        user = psycopg.conninfo.make_conninfo(
            database.url, options="-c role=maintainer"
        )
        narrow = type(database)(user, database.schema)
        done = maintain(narrow, (2,))
        assert (done.made, done.dropped) == (2, 1)
        with (
            psycopg.connect(user) as connection,
            pytest.raises(psycopg.errors.RaiseException, match="still to be kept"),
        ):
            connection.execute("select jobs_lib.empty_history(%s)", (kept,))
    finally:
        admin.execute("drop owned by maintainer")
        admin.execute("drop role maintainer")


@pytest.mark.guarantee("J17")
def test_a_running_service_keeps_the_days_of_all_its_types(
    database_url, connect, wait_for
):
    app = make_app(database_url)

    @app.job(history=timedelta(days=30))
    def work(job: Job) -> None: ...

    admin = connect(autocommit=True)
    with psycopg.connect(database_url) as connection:
        work.enqueue(connection)
    with running(app, "executor"):
        wait_for(
            lambda: (
                set(partitions(admin)) - {"default"}
                == {
                    f"{today(admin) + timedelta(days=n):%Y%m%d}" for n in (1, 2, 30, 31)
                }
            ),
            what="the days are there",
        )
        wait_for(lambda: sum(partitions(admin).values()) == 1, what="it ran")


@pytest.mark.guarantee("J17")
def test_a_finished_job_is_kept_for_the_days_of_its_type_however_it_ended(
    database_url, connect, wait_for
):
    app = make_app(database_url, history_days=5)

    @app.job(history=timedelta(days=1))
    def day(job: Job) -> None: ...

    @app.job(history=timedelta(days=30))
    def month(job: Job, ends: str) -> None:
        if ends == "cancelled":
            raise Cancel("no need")

    @app.job(history=False)
    def never(job: Job) -> None: ...

    @app.job()
    def default(job: Job) -> None: ...

    admin = connect(autocommit=True)
    before = today(admin)
    with psycopg.connect(database_url) as connection:
        for kind in (day, never, default):
            kind.enqueue(connection)
        for ends in ("completed", "cancelled"):
            month.enqueue(connection, ends=ends)
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        waiting = month.options(run_at=tomorrow)
        by_command = waiting.enqueue(connection, ends="by a command")
    cancel(app.database(), [by_command], keep=7)
    with running(app, "executor"):
        wait_for(lambda: count(admin, "jobs") == 0, what="all have ended")
    kept = admin.execute(
        "select type, outcome, keep_until from jobs_lib.history order by 1, 2, 3"
    ).fetchall()
    # At midnight the day of the end may be the next one.
    days = {before: kept, today(admin): kept}
    assert any(
        rows
        == [
            ("day", "completed", ended + timedelta(days=1)),
            ("default", "completed", ended + timedelta(days=5)),
            ("month", "cancelled", ended + timedelta(days=7)),
            ("month", "cancelled", ended + timedelta(days=30)),
            ("month", "completed", ended + timedelta(days=30)),
        ]
        for ended, rows in days.items()
    ), kept


@pytest.mark.guarantee("J17")
def test_jobs_that_end_with_an_own_transaction_are_kept_for_the_days_of_their_types(
    database_url, connect, wait_for
):
    app = make_app(database_url)

    @app.job(group="group", history=timedelta(days=3))
    def plain(job: Job, group: str) -> None: ...

    @app.job(group="group", history=timedelta(days=30))
    def own(job: Job, group: str) -> None:
        # It also completes the jobs of its group that ran before it.
        with job.transaction():
            pass

    admin = connect(autocommit=True)
    before = today(admin)
    with psycopg.connect(database_url) as connection:
        for kind in (plain, own):
            kind.enqueue(connection, group="g")
    with running(app, "executor"):
        wait_for(lambda: count(admin, "jobs") == 0, what="both have ended")
    kept = admin.execute(
        "select type, keep_until from jobs_lib.history order by 1"
    ).fetchall()
    # At midnight the day of the end may be the next one.
    assert any(
        kept == [("own", day + timedelta(30)), ("plain", day + timedelta(3))]
        for day in (before, today(admin))
    ), kept


def test_maintenance_goes_on_after_a_failure(database, connect, wait_for, monkeypatch):
    from jobs_lib.backoff import Retry

    monkeypatch.setattr(
        "jobs_lib.service.maintenance._AFTER_FAILURE", Retry(first=0.01, cap=0.02)
    )
    admin = connect(autocommit=True)
    admin.execute("alter function jobs_lib.make_history(date, int) rename to mislaid")
    with heard("loop.failed") as failures:
        maintenance = Maintenance(database, KEEP)
        maintenance.start()
        wait_for(lambda: len(failures) > 2, what="it has failed")
        admin.execute(
            "alter function jobs_lib.mislaid(date, int) rename to make_history"
        )
        wait_for(lambda: len(partitions(admin)) == 5, what="the days are there")
        maintenance.stop()


def test_a_step_of_the_maintenance_that_always_fails_keeps_no_other_one(
    database, connect, wait_for
):
    class Broken:
        def forget_reached(self, connection):
            raise ConfigurationError("the table lacks the column of its key")

    admin = connect(autocommit=True)
    admin.execute(
        "insert into jobs_lib.holds (topic, key, error, retry_at)"
        " values ('idle', 'k', 'too large', now())"
    )
    maintenance = Maintenance(database, KEEP, models=[cast("Any", Broken())])
    with heard("loop.failed") as failures:
        maintenance.start()
        wait_for(lambda: count(admin, "holds") == 0, what="the idle hold is lifted")
        wait_for(lambda: failures, what="the failure is told")
        maintenance.stop()
    assert "lacks the column" in failures[0][1]["error"]
    # The round is not complete, so all is done again soon.
    assert 0 < maintenance._maintain_at < time.monotonic() + 600


def test_an_hourly_step_that_always_fails_slows_no_other_upkeep(
    database, monkeypatch, wait_for
):
    class Broken:
        def forget_reached(self, connection):
            raise ConfigurationError("the table lacks the column of its key")

    rounds: list[float] = []
    monkeypatch.setattr(
        "jobs_lib.service.maintenance.finish_open",
        lambda database: rounds.append(time.monotonic()),
    )
    models = [cast("Any", Broken())]
    maintenance = Maintenance(database, KEEP, interval=0.01, models=models)
    with heard("loop.failed") as failures:
        maintenance.start()
        wait_for(lambda: failures, what="the failure is told")
        wait_for(lambda: len(rounds) > 100, what="the steps of each minute go on")
        assert len(failures) < 50
        maintenance.stop()


@pytest.mark.guarantee("FP13")
def test_a_transaction_that_stays_open_is_reported_by_its_pid(
    database, connect, wait_for, caplog
):
    holder = connect()
    pid = str(holder.execute("select pg_backend_pid()").fetchone()[0])
    maintenance = Maintenance(database, KEEP, interval=0.05, limits=Limits(0.3))
    with heard("transaction.old") as told:
        maintenance.start()
        wait_for(lambda: told, what="it has been reported")
        wait_for(lambda: "transaction.old" in caplog.text, what="and logged")
        maintenance.stop()
    assert {fields["who"] for _, fields in told} == {pid}
    assert all(fields["seconds"] >= 0.3 for _, fields in told)
    assert f"who={pid}" in caplog.text


def test_a_row_written_while_its_day_is_made_lands_in_that_day(
    database, connect, wait_for
):
    admin, maker, writer = connect(autocommit=True), connect(), connect(autocommit=True)
    tomorrow = today(admin) + timedelta(days=1)
    maker.execute("select jobs_lib.make_history(%s, 100)", (tomorrow,))
    failures: list[psycopg.Error] = []

    def write() -> None:
        try:
            writer.execute(HISTORY, (tomorrow, 1))
        except psycopg.Error as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    wait_for(
        lambda: (
            admin.execute(
                "select from pg_locks where pid = %s and not granted",
                (writer.info.backend_pid,),
            ).rowcount
        ),
        what="the writer waits",
    )
    maker.commit()
    thread.join()
    assert failures == []
    assert partitions(admin) == {"default": 0, f"{tomorrow:%Y%m%d}": 1}
