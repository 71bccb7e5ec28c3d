"""Enqueue decides a job's origin, order, priority, key and hint."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest
from psycopg import sql

from jobs_lib import ConfigurationError, Job
from jobs_lib.errors import TopicError
from jobs_lib.jobs.context import handling
from jobs_lib.partitioner import choose_partition
from jobs_lib.postgres.database import channel
from tests.support.apps import make_app


@pytest.fixture
def locked_out(connect, wait_for):
    """A function that waits until this many sessions wait for a lock."""
    watch = connect(autocommit=True)

    def wait(count: int) -> None:
        query = (
            "select count(*) from pg_stat_activity"
            " where wait_event_type = 'Lock' and datname = current_database()"
        )
        wait_for(
            lambda: watch.execute(query).fetchone() == (count,),
            timeout=60,
            what=f"{count} wait for a lock",
        )

    return wait


@pytest.mark.guarantee("S8")
def test_the_origin_is_the_groups_else_the_handled_records(connect, notify):
    with connect() as connection:
        notify.enqueue(connection, order=1, customer="c-7")
        with handling("local/3"):
            notify.enqueue(connection, order=2)
            notify.enqueue(connection, order=3, customer="c-7")
        notify.options(origin="local/5").enqueue(connection, order=4, customer="c-7")
        notify.enqueue_many(connection, [{"order": 5, "customer": "c-7"}])
        rows = connection.execute(
            "select (payload->>'order')::int, origin from jobs_lib.jobs order by id"
        ).fetchall()
        of_group = f"local/{choose_partition('c-7', 16)}"
        assert rows == [
            (1, of_group),
            (2, "local/3"),
            (3, of_group),
            (4, "local/5"),
            (5, of_group),
        ]
        with pytest.raises(TopicError, match="elsewhere"):
            notify.options(origin="elsewhere/1").enqueue(connection, order=6)


@pytest.mark.parametrize("number", ["007", "00", "-1", "7 ", "1234567890", "٣"])
def test_an_origin_that_no_partition_is_called_is_refused(connect, notify, number):
    with connect() as connection:
        with pytest.raises(TopicError, match="for the origin") as told:
            notify.options(origin=f"local/{number}").enqueue(connection, order=1)
        assert f"'local/{number}'" in str(told.value)
        notify.options(origin="local/0").enqueue(connection, order=1)


@pytest.mark.guarantee("S9", "I9", "J2")
@pytest.mark.parametrize("by_sql", [False, True], ids=["python", "sql"])
def test_ids_of_a_group_are_drawn_in_the_order_of_commit(
    connect, notify, locked_out, by_sql
):
    # The second enqueue starts while the first transaction is open, and must wait.
    first = connect()
    early = notify.enqueue(first, order=1, customer="c")
    late: list[int] = []

    def enqueue():
        with connect() as second:
            if by_sql:
                row = second.execute(
                    "select jobs_lib.enqueue('notify', \"group\" => 'c')"
                ).fetchone()
                late.append(row[0])
            else:
                late.append(notify.enqueue(second, order=2, customer="c"))

    thread = threading.Thread(target=enqueue)
    thread.start()
    locked_out(1)
    # This id is drawn while the other enqueue waits, and must still be the lower one.
    between = notify.enqueue(first, order=3, customer="c")
    first.commit()
    thread.join()
    assert early < between < late[0]


def test_an_unordered_enqueue_does_not_wait_for_its_group(connect, notify):
    first = connect()
    notify.enqueue(first, order=1, customer="c")
    with connect() as second:
        second.execute("set lock_timeout = '2s'")
        notify.options(ordered=False).enqueue(second, order=2, customer="c")
    first.rollback()


@pytest.mark.guarantee("J10", "FJ13")
def test_fifty_enqueues_of_one_unique_key_insert_one_job_and_return_its_id(
    connect, notify, locked_out
):
    unique = notify.options(unique="invoice-7")
    # Uncommitted jobs count, too: all enqueues wait for this one, which is rolled back.
    first = connect()
    swallowed = unique.enqueue(first, order=0)
    found: list[int] = []

    def enqueue(n):
        with connect() as connection:
            found.append(unique.enqueue(connection, order=n))

    threads = [threading.Thread(target=enqueue, args=(n,)) for n in range(50)]
    for thread in threads:
        thread.start()
    locked_out(50)
    first.rollback()
    for thread in threads:
        thread.join()
    with connect() as connection:
        rows = connection.execute("select id from jobs_lib.jobs").fetchall()
        assert rows == [(found[0],)]
        assert found == [found[0]] * 50
        assert found[0] != swallowed
        # Another type, another key, and no key do not have to wait.
        connection.execute(
            "select jobs_lib.enqueue('other', unique_key => 'invoice-7')"
        )
        notify.options(unique="invoice-8").enqueue(connection, order=1)
        notify.enqueue(connection, order=1)
        assert unique.enqueue(connection, order=1) == found[0]
        rows = connection.execute("select count(*) from jobs_lib.jobs").fetchone()
        assert rows == (4,)
        # Once the job has finished, its key is free.
        connection.execute("delete from jobs_lib.jobs where id = %s", (found[0],))
        assert unique.enqueue(connection, order=1) != found[0]


@pytest.mark.guarantee("J10", "FJ13")
def test_two_types_may_use_one_key_and_each_gets_its_own_job(
    connect, database_url, notify
):
    app = make_app(database_url)
    other = app.job(name="other")(lambda job: None).options(unique="invoice-7")
    unique = notify.options(unique="invoice-7")
    with connect() as connection:
        ids = [unique.enqueue(connection, order=1), other.enqueue(connection)]
        assert ids[0] != ids[1]
        for _ in range(2):
            # The call of Python or of SQL may come first.
            again = [unique.enqueue(connection, order=1), other.enqueue(connection)]
            assert again == ids
            by_sql = connection.execute(
                "select jobs_lib.enqueue('notify', unique_key => 'invoice-7'),"
                " jobs_lib.enqueue('other', unique_key => 'invoice-7')"
            ).fetchone()
            assert by_sql == (ids[0], ids[1])


@pytest.mark.guarantee("J3")
@pytest.mark.parametrize("way", ["one", "many", "sql"])
def test_transactions_that_enqueue_for_different_groups_do_not_wait_for_each_other(
    connect, notify, way
):
    def enqueue(connection, customer: str) -> None:
        if way == "one":
            notify.enqueue(connection, order=1, customer=customer)
        elif way == "many":
            rows = [{"order": n, "customer": f"{customer}{n}"} for n in range(3)]
            notify.enqueue_many(connection, rows)
        else:
            connection.execute(
                "select jobs_lib.enqueue('notify', \"group\" => %s)", (customer,)
            )

    # Both transactions are open at once, with twenty groups each. Some of the groups
    # share an origin.
    first, second = connect(), connect()
    second.execute("set lock_timeout = '5s'")
    for n in range(20):
        enqueue(first, f"a{n}-")
        enqueue(second, f"b{n}-")
    first.commit()
    second.commit()


def test_priority_and_headers_are_stored(database_url, connect):
    app = make_app(database_url)

    @app.job(priority="batch")
    def load(job: Job, n: int) -> None: ...

    with connect() as connection:
        load.enqueue(connection, n=1)
        load.options(priority="high", headers={"tenant": "ä"}).enqueue(connection, n=2)
        load.options(headers={"a": "b"}).options(priority="normal").enqueue_many(
            connection, [{"n": 3}]
        )
        rows = connection.execute(
            "select priority, headers from jobs_lib.jobs order by id"
        ).fetchall()
    assert rows == [(-1, None), (1, {"tenant": "ä"}), (0, {"a": "b"})]
    with pytest.raises(ConfigurationError, match="urgent"):
        app.job(name="other", priority="urgent")(  # type: ignore[arg-type]
            lambda job: None
        )


def heard_from(listener) -> list[str]:
    """Return the notifications so far."""
    listener.execute("select 1")
    return [notice.payload for notice in listener.notifies(timeout=0)]


def test_an_enqueue_notifies_executors_when_it_commits(connect, database_url, notify):
    listener = connect(autocommit=True)
    listener.execute('listen "jobs_lib.jobs"')
    with connect() as connection:
        notify.options(origin="local/3").enqueue(connection, order=1)
        assert heard_from(listener) == []
    assert heard_from(listener) == ["local/3"]
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    quiet = make_app(database_url, notify=False)
    quiet.job(name="quiet")(lambda job: None)
    with connect() as connection:
        # No hint is sent for later jobs, when hints are off, or for a job that exists
        # already.
        notify.options(run_at=tomorrow, unique="k").enqueue(connection, order=2)
        notify.options(run_at=tomorrow).enqueue_many(connection, [{"order": 2}])
        notify.options(unique="k").enqueue(connection, order=2)
        quiet.jobs["quiet"].enqueue(connection)
        quiet.jobs["quiet"].enqueue_many(connection, [{}])
        connection.execute("select jobs_lib.enqueue('notify', notify => false)")
    assert heard_from(listener) == []
    with connect() as connection:
        notify.enqueue_many(connection, [{"order": 3}, {"order": 4}])
    assert heard_from(listener) == [""]
    with connect() as connection:
        connection.execute("select jobs_lib.enqueue('notify', origin => 'local/5')")
    assert heard_from(listener) == ["local/5"]


@pytest.mark.parametrize("schema", ["jobs_lib", 'we"ird; Ünï', "ü" * 31])
def test_the_channel_is_the_same_in_python_and_sql(connect, schema):
    with connect() as connection:
        identifier = sql.Identifier(schema)
        if schema != "jobs_lib":
            connection.execute(sql.SQL("create schema {}").format(identifier))
        body = "select prosrc from pg_proc where proname = 'channel'"
        source = connection.execute(body).fetchone()[0]
        path = sql.SQL("set local search_path to {}, jobs_lib").format(identifier)
        connection.execute(path)
        assert connection.execute(source).fetchone() == (channel(schema),)
    assert len(channel(schema).encode()) <= 63
