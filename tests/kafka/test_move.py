"""A new topic is filled while live changes go to both, until the switch."""

from __future__ import annotations

import itertools

import pytest

from jobs_lib import operating, reexport
from jobs_lib.errors import ReexportError, TopicError
from jobs_lib.outbox.copies import Copies
from jobs_lib.reexport.move import end_move, start_move
from jobs_lib.reexport.stale import remove_stale
from tests.support.apps import count, heard, running
from tests.support.beside import beside
from tests.support.records import read_topic
from tests.support.shop import COMPACTED, Item, Shop

pytestmark = pytest.mark.expects("fenced")


@pytest.fixture
def shop(admin, database_url, bootstrap_servers, topic):
    shop = Shop(admin, database_url, bootstrap_servers, topic(4, config=COMPACTED))
    shop.fill(1, 300)
    return shop


@pytest.fixture
def goal(shop, topic):
    """The new topic, which has other partitions."""
    return shop.app.topic(topic(3, config=COMPACTED), value=Item, compacted=True)


def move(shop, goal, rate=1_000_000):
    return start_move(shop.database, shop.app.settings, shop.entity, goal, rate=rate)


def send(shop, item, number):
    with shop.database.connect("test") as connection, connection.transaction():
        shop.change(connection, item, number)


def await_sent(shop, wait_for):
    wait_for(
        lambda: count(shop.admin, "outbox") == 0, timeout=60, what="all rows are sent"
    )


@pytest.mark.guarantee("W24")
def test_a_new_topic_is_complete_while_live_changes_go_to_both(
    shop, goal, connect, wait_for
):
    def write(stop) -> None:
        with connect() as connection:
            for number in itertools.count(1):
                if stop.wait(0.002):
                    break
                shop.change(connection, 1 + number * 7 % 320, number)
                connection.commit()

    with running(shop.app, "executor", "relay"):
        reexport.start(shop.database, shop.entity, rate=1_000_000)
        with beside(write):
            wait_for(
                lambda: reexport.status(shop.database, "items").ended,
                timeout=60,
                what="the former topic is filled",
            )
            move(shop, goal)
            wait_for(
                lambda: reexport.status(shop.database, "items").ended,
                timeout=60,
                what="the new topic is filled",
            )
            sent = len(read_topic(shop.servers, goal.name))
            wait_for(
                lambda: len(read_topic(shop.servers, goal.name)) > sent + 50,
                timeout=60,
                what="live changes go on",
            )
        await_sent(shop, wait_for)
        assert end_move(shop.database, shop.entity, goal) == shop.topic.name
        expected = shop.read_table()
        send(shop, 1, 9_991)
        await_sent(shop, wait_for)
    assert shop.read_newest(goal.name) == expected
    assert shop.read_newest() == shop.read_table() != expected
    versions: dict[str, int] = {}
    for one in read_topic(shop.servers, goal.name):
        version = int(one.headers["ce_version"])
        assert version >= versions.get(one.key, 0)
        versions[one.key] = version


@pytest.mark.guarantee("W24")
@pytest.mark.expects("fenced", "loop.failed")
@pytest.mark.parametrize("after", [False, True])
def test_a_relay_that_dies_before_its_rows_are_deleted_loses_no_change_of_either(
    shop, goal, monkeypatch, wait_for, after
):
    died: list[object] = []
    write = Copies.write

    def die_once(self, connection, block):
        if not died:
            died.append(block)
            if after:
                write(self, connection, block)
            raise RuntimeError("killed")
        write(self, connection, block)

    with running(shop.app, "executor", "relay"):
        move(shop, goal)
        shop.await_end()
        monkeypatch.setattr(Copies, "write", die_once)
        send(shop, 7, 1)
        wait_for(lambda: died, timeout=30, what="the relay has died")
        send(shop, 8, 5)
        await_sent(shop, wait_for)
    assert shop.read_newest(goal.name) == shop.read_table()
    assert shop.read_newest()["7"] == shop.read_table()["7"]


def test_the_switch_waits_for_what_is_on_its_way(shop, goal, wait_for):
    with pytest.raises(ReexportError, match=r"fed from no topic .* --topic"):
        end_move(shop.database, shop.entity, goal)
    begun = move(shop, goal, rate=60)
    with pytest.raises(ReexportError, match="has not finished"):
        end_move(shop.database, shop.entity, goal)
    with pytest.raises(ReexportError, match=f"re-export {begun.id} .* goes to"):
        reexport.start(shop.database, shop.entity, rate=60)
    assert move(shop, goal).id == begun.id
    with running(shop.app, "executor", "relay"):
        shop.await_end()
    send(shop, 7, 1)
    with pytest.raises(ReexportError, match=f"rows for '{shop.topic.name}' wait"):
        end_move(shop.database, shop.entity, goal)
    with heard("block.produced"), running(shop.app, "relay"):
        await_sent(shop, wait_for)
    end_move(shop.database, shop.entity, goal)
    assert count(shop.admin, "topic_copies") == 0
    assert shop.read_newest(goal.name) == shop.read_table()


@pytest.mark.guarantee("W24")
def test_only_a_re_export_of_the_whole_table_fills_a_new_topic(shop, goal):
    move(shop, goal, rate=60)
    reexport.cancel(shop.database, "items")
    # A service that writes to the new topic already gives a change to a re-export.
    with shop.database.connect("test") as connection, connection.transaction():
        connection.execute(
            "select jobs_lib.reexport_changes('items', %s, 60000)", [goal.declared]
        )
        connection.execute(
            "select jobs_lib.send_current(%s, '7', 'items')", [goal.declared]
        )
    with running(shop.app, "relay"):
        assert shop.await_end().state == "finished"
    assert shop.read_newest(goal.name).keys() == {"7"}
    with pytest.raises(ReexportError, match="has not finished"):
        end_move(shop.database, shop.entity, goal)
    # One that filled the topic before it was fed lacks what was sent in between.
    move(shop, goal)
    with running(shop.app, "executor", "relay"):
        shop.await_end()
    shop.admin.execute("update jobs_lib.topic_copies set began_at = clock_timestamp()")
    with pytest.raises(ReexportError, match="has not finished"):
        end_move(shop.database, shop.entity, goal)


@pytest.mark.guarantee("W24")
def test_a_move_that_is_begun_again_after_the_clock_was_set_back_can_end(shop, goal):
    move(shop, goal, rate=60)
    reexport.cancel(shop.database, "items")
    # The clock was an hour ahead.
    for table, name in (("reexports", "started_at"), ("topic_copies", "began_at")):
        shop.admin.execute(f"update jobs_lib.{table} set {name} = {name} + '1 h'")
    with pytest.raises(ReexportError, match="has not finished"):
        end_move(shop.database, shop.entity, goal)
    with running(shop.app, "executor", "relay"):
        move(shop, goal)
        shop.await_end()
    end_move(shop.database, shop.entity, goal)
    assert shop.read_newest(goal.name) == shop.read_table()


@pytest.mark.guarantee("W24")
def test_the_switch_is_refused_after_a_re_export_to_the_former_topic_alone(
    shop, goal, admin
):
    with running(shop.app, "executor", "relay"):
        move(shop, goal)
        filled = shop.await_end().id
        # Behind the application: nothing leaves of it.
        admin.execute("update items set name = 'fixed', version = 12 where id = 7")
        alone = reexport.start(shop.database, shop.entity, rate=1_000_000).id
        shop.await_end()
        assert shop.read_newest() == shop.read_table() != shop.read_newest(goal.name)
        refused = f"re-export {alone} .* alone after {filled} .* start items --topic"
        with pytest.raises(ReexportError, match=refused):
            end_move(shop.database, shop.entity, goal)
        move(shop, goal)
        shop.await_end()
        # Both topics still have the key of a row that is deleted, and lose it.
        admin.execute("delete from items where id = 8")
        remove_stale(shop.database, shop.app.settings, shop.entity, rate=1_000_000)
        shop.await_end()
    assert end_move(shop.database, shop.entity, goal) == shop.topic.name
    assert shop.read_newest(goal.name) == shop.read_newest() == shop.read_table()
    last = [one for one in read_topic(shop.servers, goal.name) if one.key == "8"][-1]
    assert (last.value, last.headers["ce_version"]) == (None, "2")


def test_a_refused_start_feeds_nothing(shop, goal):
    begun = reexport.start(shop.database, shop.entity, rate=60)
    with pytest.raises(ReexportError, match=f"re-export {begun.id} .* goes to"):
        move(shop, goal)
    assert count(shop.admin, "topic_copies") == 0
    reexport.cancel(shop.database, "items")
    shop.admin.execute("alter table items drop constraint items_pkey")
    shop.admin.execute("alter table items alter column id drop not null")
    shop.admin.execute("insert into items values (null, 'no key', 1)")
    with pytest.raises(ReexportError, match="have no 'id'"):
        move(shop, goal)
    assert count(shop.admin, "topic_copies") == 0


def test_a_move_can_be_given_up_and_begun_again(shop, goal):
    move(shop, goal, rate=60)
    with pytest.raises(ReexportError, match=r"not ended: .* reexport cancel items"):
        end_move(shop.database, shop.entity, goal, give_up=True)
    reexport.cancel(shop.database, "items")
    assert end_move(shop.database, shop.entity, goal, give_up=True) == shop.topic.name
    assert count(shop.admin, "topic_copies") == 0
    with pytest.raises(ReexportError, match="fed from no topic"):
        end_move(shop.database, shop.entity, goal, give_up=True)
    move(shop, goal)
    assert count(shop.admin, "topic_copies") == 1
    with running(shop.app, "executor", "relay"):
        shop.await_end()
    assert end_move(shop.database, shop.entity, goal) == shop.topic.name


@pytest.mark.guarantee("W24")
@pytest.mark.parametrize("gone", [False, True])
def test_a_change_that_an_operator_drops_reaches_the_new_topic(
    shop, goal, admin, wait_for, gone
):
    with running(shop.app, "executor", "relay"):
        reexport.start(shop.database, shop.entity, rate=1_000_000)
        shop.await_end()
        move(shop, goal)
        shop.await_end()
        former = shop.read_newest()
        # Kafka takes no record with such a header, and the hold keeps what follows.
        with shop.database.connect("test") as connection, connection.transaction():
            shop.topic.send(
                connection, key="7", value=Item(7, "odd", 2), headers={"a": "b"}
            )
            connection.execute(
                "update jobs_lib.outbox set headers = '{\"a\": 1}' where key = '7'"
            )
            if gone:
                connection.execute("delete from items where id = 7")
            else:
                connection.execute("update items set name='new', version=2 where id=7")
        wait_for(lambda: count(admin, "held_rows") == 1, timeout=60, what="it is held")
        with pytest.raises(ReexportError, match="or are held"):
            end_move(shop.database, shop.entity, goal)
        (row,) = admin.execute("select id from jobs_lib.held_rows").fetchone()
        operating.drop_row(shop.database, row)
        await_sent(shop, wait_for)
        end_move(shop.database, shop.entity, goal)
    assert shop.read_newest() == former
    assert shop.read_newest(goal.name) == shop.read_table() != former
    newest = [r for r in read_topic(shop.servers, goal.name) if r.key == "7"][-1]
    assert newest.headers["ce_version"] == ("3" if gone else "2")


def test_a_re_export_ends_although_an_operator_drops_its_last_row(
    shop, admin, wait_for
):
    load = shop.entity.load

    def fail_for_one(connection, keys):
        if "7" in keys:
            raise RuntimeError("not this one")
        return load(connection, keys)

    object.__setattr__(shop.entity, "load", fail_for_one)
    with running(shop.app, "executor", "relay"):
        reexport.start(shop.database, shop.entity, rate=1_000_000)
        wait_for(
            lambda: count(admin, "held_rows") == 1 and not count(admin, "outbox"),
            timeout=60,
            what="one is held",
        )
    (row,) = admin.execute("select id from jobs_lib.held_rows").fetchone()
    operating.drop_row(shop.database, row)
    found = admin.execute("select state, superseded from jobs_lib.reexports").fetchone()
    assert found == ("finished", 1)


def test_topics_that_cannot_be_moved_to_are_refused_and_nothing_is_fed(shop, topic):
    app = shop.app
    other = app.topic(topic(1, config=COMPACTED), value=Item, compacted=True)
    with pytest.raises(ReexportError, match="already: leave the topic out"):
        move(shop, shop.topic)
    with pytest.raises(ReexportError, match="not compacted"):
        move(shop, app.topic(topic(1), value=Item, compacted=True))
    with pytest.raises(TopicError, match="no-such-topic"):
        move(shop, app.topic("no-such-topic", value=Item, compacted=True))
    # The keys of the other entity would become tombstones there.
    app.entity(shop.topic, source="item_rm", key="id", name="other")(shop.entity.load)
    with pytest.raises(ReexportError, match=r"several entities .*item_rm, items"):
        move(shop, other)
    del app.entities["other"]
    assert count(shop.admin, "topic_copies") == count(shop.admin, "reexports") == 0
    # Two topics would feed each other for ever.
    shop.admin.execute(
        "insert into jobs_lib.topic_copies values ('first', %s, 'items')",
        (shop.topic.name,),
    )
    with pytest.raises(ReexportError, match="is fed from one"):
        move(shop, other)
