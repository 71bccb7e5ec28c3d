"""What transactions give to a re-export leaves at its rate, behind live records."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from psycopg.rows import dict_row

from jobs_lib import operating, reexport
from jobs_lib.outbox.block import Refusal
from jobs_lib.outbox.capture import capture_changes
from jobs_lib.outbox.producers import ShardProducers
from jobs_lib.service.maintenance import Maintenance
from tests.support.apps import count, count_unsent, make_app, running
from tests.support.records import read_topic

if TYPE_CHECKING:
    from typing import Any

pytestmark = [pytest.mark.expects("fenced"), pytest.mark.timeout(300)]

ROWS = 400


@pytest.fixture
def shop(database_url, bootstrap_servers, topic, admin):
    """An app with an entity whose table is captured, and a topic of one partition."""
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    policy = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}
    name = topic(1, config=policy | {"min.compaction.lag.ms": "3600000"})
    items = app.topic(name, value=dict[str, int], compacted=True)
    admin.execute("create table items (id int primary key, size int, version bigint)")
    admin.execute(
        "insert into items select n, 0, 1 from generate_series(1, %s) n", [ROWS]
    )
    capture_changes(admin, "items", topic=name, key="id")

    @app.entity(items, source="items", key="id")
    def load_items(connection, keys: list[str]) -> dict[str, dict[str, int]]:
        with connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(
                "select * from items where id = any (%s::int[])", ([*map(int, keys)],)
            )
            return {str(one["id"]): one for one in cursor}

    return app


@pytest.fixture(params=["touch", "query", "call"])
def give(request, shop, connect):
    """A function that gives all items to a re-export, in one way."""
    (items,) = shop.topics.values()

    def give(rate: int) -> int:
        with connect() as connection:
            number: int = shop.reexport_changes(connection, "items", rate=rate)
            if request.param == "touch":
                connection.execute("update items set size = size")
            elif request.param == "query":
                connection.execute(
                    "select jobs_lib.send_current(%s, id::text, 'items') from items",
                    [items.declared],
                )
            else:
                for (key,) in connection.execute(
                    "select id::text from items"
                ).fetchall():
                    items.send_current(connection, key=key)
        return number

    return give


def name_topic(app: Any) -> str:
    return next(iter(app.topics.values())).name


def check_rate(at: list[float], rate: int) -> None:
    """By the clock of Kafka no burst is larger than what a full bucket holds."""
    for (n, first), (m, last) in itertools.combinations(enumerate(at), 2):
        assert m - n <= rate * (0.0149 + (last - first + 0.6) / 60) + 2, (n, m)


@pytest.mark.guarantee("W33", "W28", "X7")
def test_rows_that_are_given_leave_at_the_rate_and_are_tried_again(
    shop, give, database, admin, bootstrap_servers, wait_for
):
    load = shop.entities["items"].load
    failed: list[list[str]] = []

    def fail_once(connection, keys):
        if len(failed) < 3 and "7" in keys:
            failed.append(keys)
            raise RuntimeError("not now")
        return load(connection, keys)

    object.__setattr__(shop.entities["items"], "load", fail_once)
    rate = 2_400
    number = give(rate)
    assert reexport.status(database, "items").total == ROWS
    with running(shop, "relay"):
        # A live change does not wait for them.
        admin.execute("insert into items values (1000, 0, 1)")
        wait_for(
            lambda: reexport.status(database, "items").state == "finished",
            timeout=120,
            what=lambda: f"it ends: {reexport.status(database, 'items')}",
        )
    records = read_topic(bootstrap_servers, name_topic(shop))
    of_it = [one for one in records if one.key != "1000"]
    assert sorted(int(one.key) for one in of_it) == [*range(1, ROWS + 1)]
    assert {one.headers["ce_cause"] for one in of_it} == {"reexport"}
    assert {one.headers["ce_reexport"] for one in of_it} == {str(number)}
    assert failed
    check_rate(sorted(one.at for one in of_it), rate)
    place = [one.key for one in records].index("1000")
    assert place < ROWS / 2


@pytest.mark.guarantee("W28", "X7")
def test_rows_that_were_held_leave_at_the_rate(
    shop, connect, database, admin, bootstrap_servers, wait_for
):
    load, broken = shop.entities["items"].load, {"all"}

    def load_or_fail(connection, keys):
        if broken:
            raise RuntimeError("not now")
        return load(connection, keys)

    object.__setattr__(shop.entities["items"], "load", load_or_fail)
    rate, rows = 1_200, 60
    with connect() as connection:
        shop.reexport_changes(connection, "items", rate=rate)
        connection.execute("update items set size = 1 where id <= %s", [rows])
    with running(shop, "relay"):
        wait_for(lambda: count_unsent(admin) == (0, rows), timeout=60, what="all wait")
        broken.clear()
        operating.retry_holds(database)
        wait_for(lambda: count_unsent(admin) == (0, 0), timeout=60, what="all is sent")
    assert not count(admin, "holds")
    at = sorted(one.at for one in read_topic(bootstrap_servers, name_topic(shop)))
    assert len(at) == rows
    check_rate(at, rate)


@pytest.mark.guarantee("W33", "X8")
def test_what_is_given_to_a_paused_re_export_waits_and_a_cancelled_one_drops_it(
    shop, give, database, admin, bootstrap_servers, wait_for
):
    (items,) = shop.topics.values()
    give(60_000)
    reexport.pause(database, "items")
    give(1)
    progress = reexport.status(database, "items")
    assert (progress.total, progress.state) == (2 * ROWS, "paused")
    with running(shop, "relay"):
        admin.execute("insert into items values (1000, 0, 1)")
        wait_for(
            lambda: count(admin, "outbox where class = 0") == 0,
            timeout=60,
            what="the live one is sent",
        )
        assert count(admin, "outbox") == 2 * ROWS
        reexport.cancel(database, "items")
        wait_for(
            lambda: count(admin, "outbox") == 0, timeout=60, what="the rows are dropped"
        )
    records = read_topic(bootstrap_servers, items.name)
    assert [one.key for one in records] == ["1000"]


@pytest.mark.guarantee("W36", "W33", "X11")
def test_ids_given_in_any_order_carry_the_newest_state_once(
    shop, connect, database, admin, bootstrap_servers, wait_for
):
    (items,) = shop.topics.values()
    with connect() as connection:
        shop.reexport_changes(connection, "items", rate=600_000)
        for key in ("3", "1", "2", "3", "1", "3"):
            items.send_current(connection, key=key)
            # It is a change of this transaction, too.
            connection.execute(
                "update items set size = size + 1, version = version + 1 where id = %s",
                (key,),
            )
        connection.commit()
        # Later ones are live: a delete, and a change.
        connection.execute("update items set size = 99, version = 99 where id = 1")
        connection.execute("delete from items where id = 2")
    # Nobody captures this one.
    with connect() as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute("update items set size = 50, version = 50 where id = 3")
    with running(shop, "relay"):
        wait_for(lambda: count(admin, "outbox") == 0, timeout=60, what="all is sent")
    progress = reexport.status(database, "items")
    assert (progress.state, progress.total) == ("finished", 12)
    assert (progress.sent, progress.superseded) == (1, 11)
    records = read_topic(bootstrap_servers, items.name)
    assert {(one.key, one.value and one.json["size"]) for one in records} == {
        ("1", 99), ("2", None), ("3", 50),
    }  # fmt: skip
    assert len(records) == 3


@pytest.mark.guarantee("X11")
def test_a_row_that_is_gone_when_it_leaves_becomes_a_tombstone_with_its_version(
    shop, connect, database, admin, bootstrap_servers, wait_for
):
    items = shop.topics[next(iter(shop.topics))]
    items.versioned = True
    with connect() as connection:
        shop.reexport_changes(connection, "items", rate=600_000)
        connection.execute("update items set size = 1, version = 5 where id = 1")
        connection.execute("delete from items where id = 2")
        items.send_current(connection, key="9999")
        connection.commit()
        # Hidden from what the application loads, as a row marked as deleted would be.
        connection.execute("set session_replication_role = replica")
        connection.execute("delete from items where id = 1")
    with running(shop, "relay"):
        wait_for(lambda: count(admin, "outbox") == 0, timeout=60, what="all is sent")
    records = read_topic(bootstrap_servers, items.name)
    assert {(one.key, one.value, one.headers.get("ce_version")) for one in records} == {
        ("1", None, "5"), ("2", None, "2"), ("9999", None, None),
    }  # fmt: skip


@pytest.mark.guarantee("W45", "X11")
@pytest.mark.parametrize("fails", ["the loader", "the topic"])
def test_an_end_that_is_refused_with_a_row_of_the_table_keeps_its_version(
    shop, connect, database, admin, bootstrap_servers, wait_for, monkeypatch, fails
):
    items = shop.topics[next(iter(shop.topics))]
    items.versioned = True
    load, broken = shop.entities["items"].load, [fails]

    def load_or_fail(connection, keys):
        if "the loader" in broken:
            raise RuntimeError("not now")
        return load(connection, keys)

    send = ShardProducers.send

    def send_or_fail(self, shard, records, confirm):
        if "the topic" in broken and records:
            return [], [Refusal(records[0], "not now", whole_topic=True)]
        return send(self, shard, records, confirm)

    object.__setattr__(shop.entities["items"], "load", load_or_fail)
    monkeypatch.setattr(ShardProducers, "send", send_or_fail)
    with connect() as connection:
        number = shop.reexport_changes(connection, "items", rate=600_000)
        connection.execute("delete from items where id = 1")
        # As a job that has read the chunk before.
        connection.execute(
            "insert into jobs_lib.outbox (shard, class, topic, key, entity, cause,"
            " reexport_id) select shard, 1, topic, key, entity, 'reexport', %s"
            " from jobs_lib.outbox",
            [number],
        )
    with running(shop, "relay"):
        wait_for(lambda: count(admin, "outbox") == 0, timeout=60, what="it is held")
        broken.clear()
        operating.retry_holds(database)
        wait_for(lambda: count_unsent(admin) == (0, 0), timeout=60, what="all is sent")
    (end,) = read_topic(bootstrap_servers, items.name)
    assert (end.key, end.value, end.headers["ce_version"]) == ("1", None, "2")


@pytest.mark.guarantee("W33", "X11")
def test_a_change_that_waits_follows_no_newer_one_and_is_not_lost(
    shop, connect, database, admin, bootstrap_servers, wait_for
):
    def give(statement: str) -> None:
        with connect() as connection:
            shop.reexport_changes(connection, "items", rate=60_000)
            connection.execute(statement)

    def await_rows(table: str, rows: int) -> None:
        wait_for(
            lambda: count(admin, table) == rows, timeout=60, what=f"{table} {rows}"
        )

    give("delete from items where id = 1")
    reexport.pause(database, "items")
    with running(shop, "relay"):
        # It comes back and goes again; that is sent at once.
        admin.execute("insert into items values (1, 0, 7)")
        await_rows("outbox where class = 0", 0)
        admin.execute("delete from items where id = 1")
        # A change of this one leaves before it goes.
        admin.execute("update items set version = 3 where id = 2")
        await_rows("outbox where class = 0", 0)
        give("delete from items where id = 2")
        await_rows("outbox", 2)
        reexport.resume(database, "items")
        await_rows("outbox", 0)
    found: dict[str, list[str]] = {}
    for one in read_topic(bootstrap_servers, name_topic(shop)):
        found.setdefault(one.key, []).append(one.headers["ce_version"])
    assert found == {"1": ["7", "8"], "2": ["3", "4"]}
    assert reexport.status(database, "items").superseded == 1


def read_state(admin: Any) -> str:
    """The state of the only re-export; not by `status`, which would end it."""
    state: str = admin.execute("select state from jobs_lib.reexports").fetchone()[0]
    return state


@pytest.mark.guarantee("W33")
def test_it_ends_although_newer_live_rows_wait_for_all_that_was_given(
    shop, connect, database, admin, wait_for
):
    with connect() as connection:
        shop.reexport_changes(connection, "items", rate=60_000)
        connection.execute("update items set size = 1 where id = 1")
    # Live, and before a relay has seen the first row.
    admin.execute("update items set size = 2, version = 2 where id = 1")
    with running(shop, "relay"):
        wait_for(
            lambda: read_state(admin) == "finished", timeout=60, what="it has ended"
        )
    progress = reexport.status(database, "items")
    assert (progress.total, progress.sent, progress.superseded) == (1, 0, 1)
    reexport.start(database, shop.entities["items"], rate=60)


@pytest.mark.guarantee("W33")
def test_it_ends_although_an_operator_drops_all_that_was_given(
    shop, connect, database, admin, wait_for
):
    (items,) = shop.topics.values()
    with connect() as connection:
        items.send(connection, key="1", value={"id": 1}, headers={"a": "b"})
        # Kafka takes no record with such a header, and what follows waits behind it.
        connection.execute("update jobs_lib.outbox set headers = '{\"a\": 1}'")
    with running(shop, "relay"):
        wait_for(lambda: count(admin, "held_rows") == 1, timeout=60, what="it is held")
        with connect() as connection:
            shop.reexport_changes(connection, "items", rate=60_000)
            connection.execute("update items set size = 1 where id = 1")
        wait_for(lambda: count(admin, "held_rows") == 2, timeout=60, what="both are")
    (row,) = admin.execute(
        "select id from jobs_lib.held_rows where reexport_id is not null"
    ).fetchone()
    operating.drop_row(database, row)
    assert read_state(admin) == "finished"
    progress = reexport.status(database, "items")
    assert (progress.total, progress.sent, progress.superseded) == (1, 0, 1)


@pytest.mark.guarantee("W33")
def test_it_ends_by_itself_after_its_last_transaction_has_rolled_back(
    shop, connect, database, admin, wait_for
):
    first, late = connect(), connect()
    for connection, item in ((first, 1), (late, 2)):
        shop.reexport_changes(connection, "items", rate=60_000)
        connection.execute("update items set size = 1 where id = %s", (item,))
        if connection is first:
            connection.commit()
    with running(shop, "relay"):
        wait_for(lambda: count(admin, "outbox") == 0, timeout=60, what="all is sent")
    assert read_state(admin) == "running"
    late.rollback()
    maintenance = Maintenance(database, {1}, interval=0.05)
    maintenance.start()
    try:
        wait_for(
            lambda: read_state(admin) == "finished", timeout=60, what="it has ended"
        )
    finally:
        maintenance.stop()
