"""Changes of a transaction that are given to a re-export."""

from __future__ import annotations

import asyncio
import threading

import psycopg
import pytest
from psycopg import IsolationLevel

from jobs_lib import reexport
from jobs_lib.errors import ConfigurationError, NoTransactionError, ReexportError
from jobs_lib.outbox.capture import capture_changes
from tests.support.apps import count, make_app

TAILS = ["N1", "N2", "N3"]


@pytest.fixture
def app(database_url, admin):
    """An app with an entity whose table is captured, and three rows of it."""
    app = make_app(database_url)
    states = app.topic("aircraft-state", compacted=True)
    app.entity(states, source="aircraft", key="tail")(lambda _, keys: {})
    app.entity(states, source="aircraft", key="tail", name="other")(lambda _, keys: {})
    admin.execute("create table aircraft (tail text primary key, version bigint)")
    admin.execute("insert into aircraft select unnest(%s::text[]), 1", (TAILS,))
    capture_changes(admin, "aircraft", topic="aircraft-state", key="tail")
    return app


def touch(connection, tail="%"):
    connection.execute(
        "update aircraft set version = version where tail like %s", (tail,)
    )


def rows(admin):
    """The key, class, re-export, version and cause of each row."""
    return admin.execute(
        "select key, class, reexport_id, version, cause from jobs_lib.outbox"
        " order by id"
    ).fetchall()


@pytest.mark.guarantee("W33")
def test_touched_rows_are_rows_of_the_re_export(app, admin, connect, database):
    states = app.topics["aircraft-state"]
    with connect() as connection:
        touch(connection, "N1")
        number = app.reexport_changes(connection, "aircraft", rate=600)
        for tail in TAILS:
            touch(connection, tail)
        states.send_current(connection, key="N4", version=7)
        connection.execute("delete from aircraft where tail = 'N3'")
        connection.execute(
            "select jobs_lib.send_current('aircraft-state', 'N5', 'other')"
        )
        assert count(admin, "reexports") == 0
        connection.commit()
        # The transaction is over, and so is what it said.
        touch(connection, "N2")
        connection.commit()
    of_it = [("N1", 2), ("N2", 2), ("N3", 2), ("N4", 7), ("N3", 2)]
    assert rows(admin) == [
        ("N1", 0, None, 2, "live"),
        *((key, 1, number, version, "live") for key, version in of_it),
        ("N5", 0, None, None, "live"),
        ("N2", 0, None, 2, "live"),
    ]
    progress = reexport.status(database, "aircraft")
    assert (progress.id, progress.state) == (number, "running")
    assert (progress.total, progress.loaded, progress.rate) == (5, 5, 600)
    assert progress.ranges == 0


def test_a_savepoint_takes_its_rows_back(app, admin, connect, database):
    with connect() as connection, connection.transaction():
        with connection.transaction(force_rollback=True):
            app.reexport_changes(connection, "aircraft", rate=600)
            touch(connection)
        touch(connection, "N1")
        app.reexport_changes(connection, "aircraft", rate=600)
        touch(connection, "N2")
        with connection.transaction(force_rollback=True):
            touch(connection)
        app.reexport_changes(connection, "aircraft", rate=600)
        touch(connection, "N3")
    assert [(key, one) for key, one, *_ in rows(admin)] == [
        ("N1", 0),
        ("N2", 1),
        ("N3", 1),
    ]
    assert reexport.status(database, "aircraft").total == 2


@pytest.mark.parametrize("level", [*IsolationLevel][1:], ids=lambda one: one.name)
def test_a_transaction_joins_the_open_re_export(app, admin, connect, database, level):
    first, second = connect(), connect()
    second.isolation_level = level
    number = app.reexport_changes(first, "aircraft", rate=600)
    touch(first, "N1")
    first.commit()
    assert app.reexport_changes(second, "aircraft", rate=1) == number
    touch(second, "N2")
    # A relay takes records and notes what is sent while the second goes on.
    with database.connect("test") as relay:
        relay.execute("set lock_timeout = '10s'")
        relay.execute("select jobs_lib.take_records(%s, 1)", (number,))
        relay.execute("update jobs_lib.reexports set sent = 1, rate = 700")
        # All that is committed is sent, and there will be more.
        assert not reexport.finish_if_done(relay, database.queries, number)
        assert reexport.status(database, "aircraft").total == 1
        second.commit()
        progress = reexport.status(database, "aircraft")
        assert (progress.total, progress.left, progress.rate) == (2, 1, 700)
        assert progress.state == "running"
        relay.execute("select jobs_lib.take_records(%s, 1)", (number,))
        assert count(admin, "reexport_additions") == 0
        relay.execute("update jobs_lib.reexports set sent = 2")
        assert reexport.status(database, "aircraft").state == "finished"


def test_two_that_begin_at_once_have_one_re_export(app, admin, connect, wait_for):
    first, second = connect(), connect()
    numbers = [app.reexport_changes(first, "aircraft", rate=600)]
    touch(first, "N1")

    def join():
        numbers.append(app.reexport_changes(second, "aircraft", rate=600))
        touch(second, "N2")
        second.commit()

    thread = threading.Thread(target=join)
    thread.start()
    waiting = "select from pg_stat_activity where wait_event_type = 'Lock'"
    wait_for(lambda: admin.execute(waiting).rowcount, what="the second waits")
    first.commit()
    thread.join()
    assert numbers[0] == numbers[1]
    assert [number for _, _, number, *_ in rows(admin)] == numbers


def test_what_is_rolled_back_leaves_nothing(app, admin, connect):
    with connect() as connection:
        app.reexport_changes(connection, "aircraft", rate=600)
        touch(connection)
        connection.rollback()
        touch(connection, "N1")
        connection.commit()
    assert rows(admin) == [("N1", 0, None, 2, "live")]
    assert count(admin, "reexports") == count(admin, "reexport_additions") == 0


def test_it_joins_a_re_export_of_the_table(app, admin, connect, database):
    entity = app.entities["aircraft"]
    started = reexport.start(database, entity, rate=600)
    with connect() as connection:
        number = app.reexport_changes(connection, "aircraft", rate=1)
        touch(connection)
        connection.commit()
    progress = reexport.status(database, "aircraft")
    assert (number, progress.id) == (started.id, started.id)
    assert (progress.total, progress.loaded, progress.rate) == (6, 6, 600)


def test_no_table_is_re_exported_before_the_changes_have_left(
    app, admin, connect, database
):
    with connect() as connection:
        number = app.reexport_changes(connection, "aircraft", rate=600)
        touch(connection)
        connection.commit()
    entity = app.entities["aircraft"]
    with pytest.raises(ReexportError, match=f"re-export {number} of 'aircraft' sends"):
        reexport.start(database, entity, rate=600)
    admin.execute("delete from jobs_lib.outbox")
    admin.execute("select jobs_lib.take_records(%s, 1)", (number,))
    admin.execute("update jobs_lib.reexports set sent = total")
    assert reexport.start(database, entity, rate=600).id > number


def test_a_transaction_whose_re_export_is_cancelled_fails_as_a_whole(
    app, admin, connect, database
):
    with connect() as connection:
        app.reexport_changes(connection, "aircraft", rate=600)
        touch(connection, "N1")
        connection.commit()
        app.reexport_changes(connection, "aircraft", rate=600)
        touch(connection, "N2")
        reexport.cancel(database, "aircraft")
        with pytest.raises(psycopg.Error, match="was cancelled while") as refused:
            connection.commit()
        assert "Run the transaction again" in str(refused.value)
        again = app.reexport_changes(connection, "aircraft", rate=600)
        touch(connection, "N3")
        connection.commit()
    assert [(key, number) for key, _, number, *_ in rows(admin)] == [
        ("N1", again - 1),
        ("N3", again),
    ]


@pytest.mark.guarantee("W33")
@pytest.mark.parametrize("calls", ["before", "after"])
@pytest.mark.parametrize("level", [*IsolationLevel][2:], ids=lambda one: one.name)
def test_a_cancel_that_an_older_snapshot_does_not_show_fails_the_transaction(
    app, admin, connect, database, level, calls
):
    with connect() as connection:
        number = app.reexport_changes(connection, "aircraft", rate=600)
        touch(connection, "N1")
        connection.commit()
    older = connect()
    older.isolation_level = level
    older.execute("select from aircraft")
    if calls == "before":
        app.reexport_changes(older, "aircraft", rate=600)
    reexport.cancel(database, "aircraft")
    app.reexport_changes(older, "aircraft", rate=600)
    touch(older, "N2")
    with pytest.raises(psycopg.errors.SerializationFailure):
        older.commit()
    # As after any such error, the transaction runs again.
    assert app.reexport_changes(older, "aircraft", rate=600) == number + 1
    touch(older, "N2")
    older.commit()
    assert [(key, found) for key, _, found, *_ in rows(admin)] == [
        ("N1", number),
        ("N2", number + 1),
    ]


@pytest.mark.guarantee("W33")
def test_a_cancel_waits_for_a_transaction_that_is_about_to_commit(
    app, admin, connect, database, wait_for
):
    with connect() as connection:
        app.reexport_changes(connection, "aircraft", rate=600)
        touch(connection, "N1")
        connection.commit()
        app.reexport_changes(connection, "aircraft", rate=600)
        touch(connection, "N2")
        # What it does at its commit, and then some time passes.
        connection.execute("set constraints all immediate")
        thread = threading.Thread(target=reexport.cancel, args=(database, "aircraft"))
        thread.start()
        waiting = "select from pg_stat_activity where wait_event_type = 'Lock'"
        wait_for(lambda: admin.execute(waiting).rowcount, what="the cancel waits")
        assert reexport.list_latest(database)[0].state == "running"
        connection.commit()
        thread.join()
    progress = reexport.status(database, "aircraft")
    assert (progress.state, progress.total) == ("cancelled", 2)


def test_rows_that_come_after_the_end_leave_all_the_same(app, admin, connect, database):
    with connect() as connection:
        number = app.reexport_changes(connection, "aircraft", rate=600_000)
        touch(connection)
        connection.commit()
    # A release that knows nothing of such rows has ended it.
    admin.execute("update jobs_lib.reexports set state = 'finished'")
    admin.execute("update jobs_lib.reexports set tokens = 100")
    assert admin.execute(
        "select jobs_lib.take_records(%s, 3)", (number,)
    ).fetchone() == (3,)
    progress = reexport.status(database, "aircraft")
    assert (progress.state, progress.total) == ("running", 3)
    # The next one has begun, so it cannot be open again.
    admin.execute("update jobs_lib.reexports set state = 'finished', tokens = 100")
    admin.execute(
        "insert into jobs_lib.reexports (entity, topic, rate)"
        " values ('aircraft', 'aircraft-state', 1)"
    )
    assert admin.execute(
        "select jobs_lib.take_records(%s, 3)", (number,)
    ).fetchone() == (3,)


def test_rows_are_counted_where_constraints_are_immediate(
    app, admin, connect, database
):
    with connect() as connection:
        app.reexport_changes(connection, "aircraft", rate=600)
        touch(connection, "N1")
        connection.execute("set constraints all immediate")
        touch(connection)
        connection.commit()
    assert reexport.status(database, "aircraft").total == 4


def test_an_asynchronous_caller_gives_its_changes(app, admin, database_url):
    async def give():
        connection = await psycopg.AsyncConnection.connect(database_url)
        async with connection:
            number = await app.reexport_changes(connection, "aircraft", rate=600)
            await connection.execute("update aircraft set version = version")
        return number

    number = asyncio.run(give())
    assert [found for _, _, found, *_ in rows(admin)] == [number] * 3


def test_what_cannot_be_given_is_refused(app, admin, connect):
    with connect() as connection:
        with pytest.raises(ConfigurationError, match="no entity 'aircrafts'"):
            app.reexport_changes(connection, "aircrafts", rate=600)
        for rate in (0, -1, 10_000_001):
            with pytest.raises(ReexportError, match="the rate must be"):
                app.reexport_changes(connection, "aircraft", rate=rate)
        connection.rollback()
        connection.autocommit = True
        with pytest.raises(NoTransactionError, match="autocommit"):
            app.reexport_changes(connection, "aircraft", rate=600)
    with pytest.raises(NoTransactionError, match="no change would follow"):
        app.reexport_changes(app, "aircraft", rate=600)
    for call in ("'aircraft', 'no topic', 1", "'', 't', 1", "'aircraft', 't', 0"):
        with pytest.raises(psycopg.Error) as refused:
            admin.execute(f"select jobs_lib.reexport_changes({call})")
        assert refused.value.diag.message_hint
    assert count(admin, "reexports") == 0
