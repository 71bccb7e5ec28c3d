"""A transaction touches very many groups or keys, one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.apps import make_app

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[Any]

MANY = 3_000
ENOUGH = 700
"""Locks: 500 are taken one by one, and then one for each origin or shard."""
ENQUEUE = (
    "select jobs_lib.enqueue('work', '{}', \"group\" => 'g' || n, notify => false)"
    " from generate_series(1, %s) n"
)
SEND = (
    "select jobs_lib.send('t', 'g' || n, '1', notify => false)"
    " from generate_series(1, %s) n"
)


@pytest.fixture
def in_thread():
    """A function that runs another one in a thread, and returns its future."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def locks(connection: Connection) -> int:
    row = connection.execute(
        "select count(*) from pg_locks"
        " where pid = pg_backend_pid() and locktype = 'advisory'"
    ).fetchone()
    assert row is not None
    return int(row[0])


def is_waiting(admin: Connection, connection: Connection) -> bool:
    row = admin.execute(
        "select wait_event = 'advisory' from pg_stat_activity where pid = %s",
        (connection.info.backend_pid,),
    ).fetchone()
    return row == (True,)


@pytest.mark.guarantee("FP24", "J2")
@pytest.mark.parametrize("statement", [ENQUEUE, SEND], ids=["enqueue", "send"])
def test_a_trigger_for_each_row_takes_a_bounded_number_of_locks(connect, statement):
    with connect() as connection:
        connection.execute(statement, (MANY,))
        assert 500 <= locks(connection) < ENOUGH


@pytest.mark.guarantee("FP24", "S9")
@pytest.mark.parametrize("how", ["enqueue", "enqueue_many", "send"])
def test_python_takes_a_bounded_number_of_locks(connect, database_url, how):
    app = make_app(database_url)
    topic = app.topic("t", value=int)

    @app.job(group="g")
    def work(job, g: str) -> None: ...

    with connect() as connection:
        for n in range(0, 1_200, 50):
            names = [f"g{n + more}" for more in range(50)]
            if how == "enqueue_many":
                work.enqueue_many(connection, [{"g": name} for name in names])
                continue
            for name in names:
                if how == "enqueue":
                    work.enqueue(connection, g=name)
                else:
                    topic.send(connection, key=name, value=1)
        assert 500 <= locks(connection) < ENOUGH


@pytest.mark.guarantee("FP24")
def test_groups_that_come_again_are_counted_once(connect):
    with connect() as connection, connect() as other:
        for _ in range(30):
            connection.execute(ENQUEUE, (100,))
        # No origin is taken alone, so another transaction's groups do not wait.
        other.execute("set lock_timeout = '2s'")
        other.execute(ENQUEUE.replace("'g'", "'other'"), (100,))


@pytest.mark.guarantee("FP24")
def test_a_savepoint_gives_its_locks_back(connect):
    with connect() as connection:
        for _ in range(5):
            with connection.transaction(force_rollback=True):
                connection.execute(ENQUEUE, (400,))
        assert locks(connection) == 0
        connection.execute(ENQUEUE, (10,))
        assert locks(connection) > 10


@pytest.mark.guarantee("FP24", "S9")
def test_a_group_behind_coarse_locks_keeps_its_order(
    connect, admin, wait_for, in_thread
):
    large, small = connect(), connect()
    large.execute(ENQUEUE, (MANY,))
    # It has no lock of its own: the lock of its origin keeps the order.
    waiting = in_thread(
        lambda: small.execute(
            "select jobs_lib.enqueue('work', '{}', \"group\" => %s)", (f"g{MANY}",)
        )
    )
    wait_for(lambda: is_waiting(admin, small), what="the small transaction waits")
    # Meanwhile the small transaction blocks nothing of the large one.
    large.execute(ENQUEUE, (MANY,))
    large.commit()
    waiting.result(timeout=30)
    small.commit()
    ids = admin.execute(
        'select id from jobs_lib.jobs where "group" = %s order by id', (f"g{MANY}",)
    ).fetchall()
    assert len(ids) == 3
    newest = admin.execute("select max(id) from jobs_lib.jobs").fetchone()
    assert ids[-1] == newest


@pytest.mark.guarantee("FP24", "S9")
@pytest.mark.parametrize("many", [10, 100])
def test_a_bulk_call_goes_on_with_its_groups_while_another_waits(
    connect, admin, database_url, wait_for, in_thread, many
):
    app = make_app(database_url)

    @app.job(group="g")
    def work(job, g: str) -> None: ...

    large, small = connect(), connect()
    work.enqueue_many(large, [{"g": f"g{n}"} for n in range(many)])
    waiting = in_thread(work.enqueue, small, g="g0")
    wait_for(lambda: is_waiting(admin, small), what="the small transaction waits")
    work.enqueue(large, g="g0")
    large.commit()
    newest = waiting.result(timeout=30)
    small.commit()
    assert admin.execute("select max(id) from jobs_lib.jobs").fetchone() == (newest,)


@pytest.mark.guarantee("FP24", "S9")
def test_a_large_transaction_takes_bounded_locks_beside_one_that_holds_a_group(
    connect, admin, wait_for, in_thread
):
    large, small = connect(), connect()
    small.execute(ENQUEUE, (1,))
    large.execute(ENQUEUE.replace("'g'", "'other'"), (1_500,))
    held = locks(large)
    assert 500 < held < 500 + 16 + 200
    # The number of its locks is limited, too: in the end the large transaction waits.
    going_on = in_thread(
        lambda: large.execute(ENQUEUE.replace("'g'", "'more'"), (40_000,))
    )
    wait_for(lambda: is_waiting(admin, large), what="the large transaction waits")
    small.commit()
    going_on.result(timeout=60)
    assert locks(large) < 2_100


@pytest.mark.guarantee("FP24", "S9")
@pytest.mark.parametrize("how", ["enqueue_many", "send_many"])
def test_a_bulk_call_that_waits_for_one_group_does_not_stop_a_large_transaction(
    connect, admin, database_url, wait_for, in_thread, how
):
    app = make_app(database_url)
    topic = app.topic("t", value=int)

    @app.job(group="g")
    def work(job, g: str) -> None: ...

    def write(connection: Connection) -> None:
        if how == "enqueue_many":
            work.enqueue_many(connection, [{"g": "g1"}])
        else:
            topic.send_many(connection, [("g1", 1, None)])

    statement = ENQUEUE if how == "enqueue_many" else SEND
    large, small, third = connect(), connect(), connect()
    large.execute(statement, (1,))
    # The third one has a group in each origin, so the large one continues one by one.
    third.execute(statement.replace("'g'", "'third'"), (100,))
    waiting = in_thread(write, small)
    wait_for(lambda: is_waiting(admin, small), what="the small transaction waits")
    going_on = in_thread(
        lambda: large.execute(statement.replace("'g'", "'more'"), (MANY,))
    )
    wait_for(lambda: is_waiting(admin, large), what="the large transaction waits")
    third.commit()
    going_on.result(timeout=30)
    large.commit()
    waiting.result(timeout=30)
    small.commit()
