"""A re-export on the real servers: from the table to the topic, at the rate."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition

from jobs_lib import reexport
from tests.support.apps import count, heard, make_app, running
from tests.support.beside import beside
from tests.support.records import read_topic
from tests.support.shop import Item, declare_items
from tests.support.topics import create_topic, delete_topics, grow_topic

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from jobs_lib.outbox.topic import Topic
    from tests.support.records import Seen

pytestmark = pytest.mark.expects("fenced")


@pytest.fixture
def shop(database_url, bootstrap_servers, topic, admin):
    """An app with an entity, its table, and a topic that shows the append time."""
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    name = topic(
        4,
        config={
            "cleanup.policy": "compact",
            "message.timestamp.type": "LogAppendTime",
            "min.compaction.lag.ms": "3600000",
        },
    )
    items = app.topic(name, value=Item, compacted=True, partitions=4)
    admin.execute(
        "create table items (id int primary key, name text, version bigint not null)"
    )

    declare_items(app, items, Item)
    return app


def fill(admin, count: int) -> None:
    admin.execute(
        "insert into items select g, 'item ' || g, 1 from generate_series(1, %s) g",
        (count,),
    )


def newest(records) -> dict[str, object]:
    """The topic after compaction: the last record of each key."""
    last = {record.key: record.json for record in records}
    return {key: value for key, value in last.items() if value is not None}


def table(admin) -> dict[str, object]:
    rows = admin.execute("select id, name, version from items").fetchall()
    return {str(i): {"id": i, "name": n, "version": v} for i, n, v in rows}


def rename(connection, items: Topic[Item], item: int, name: str) -> None:
    """Rename an item that is there, and send its state."""
    (version,) = connection.execute(
        "update items set name = %s, version = version + 1 where id = %s"
        " returning version",
        (name, item),
    ).fetchone() or (None,)
    if version is not None:
        value = Item(item, name, version)
        items.send(connection, key=str(item), value=value, version=version)


def delete(connection, items: Topic[Item], item: int) -> None:
    """Delete an item that is there, and send its tombstone."""
    gone = connection.execute(
        "delete from items where id = %s returning version", (item,)
    ).fetchone()
    if gone:
        items.tombstone(connection, key=str(item), version=gone[0] + 1)


@contextlib.contextmanager
def live_writes(connect, items: Topic[Item], count: int) -> Iterator[None]:
    """Write items meanwhile; each tenth write is a deletion."""

    def write(stop: threading.Event) -> None:
        with connect() as connection:
            for n in itertools.count(1):
                if stop.wait(0.002):
                    break
                item = 1 + n * 7 % count
                if n % 10:
                    rename(connection, items, item, f"renamed {n}")
                else:
                    delete(connection, items, item)
                connection.commit()

    with beside(write):
        yield


def check_versions(records: list[Seen]) -> None:
    """Check that no record takes its key back to an older state."""
    versions: dict[str, int] = {}
    for record in records:
        if record.value is not None:
            version = record.json["version"]
            assert record.headers["ce_version"] == str(version)
            assert version >= versions.get(record.key, 0)
            versions[record.key] = version


@pytest.mark.guarantee("W1", "W45", "W49")
def test_an_empty_topic_an_export_and_live_writes_make_the_topic_equal_the_table(
    shop, database, admin, connect, bootstrap_servers, wait_for
):
    fill(admin, 2_000)
    items = next(iter(shop.topics.values()))
    with running(shop, "executor", "relay"):
        with live_writes(connect, items, 2_000):
            reexport.start(database, shop.entities["items"], rate=100_000)
            wait_for(
                lambda: reexport.status(database, "items").state == "finished",
                timeout=60,
                what=lambda: f"all is sent: {reexport.status(database, 'items')}",
            )
        wait_for(
            lambda: count(admin, "outbox") == 0,
            timeout=60,
            what="the live rows are sent too",
        )
    records = read_topic(bootstrap_servers, items.name)
    assert newest(records) == table(admin)
    causes = [record.headers["ce_cause"] for record in records]
    assert set(causes) == {"live", "reexport"}
    check_versions(records)


def test_a_state_that_changes_while_it_is_read_never_goes_back(
    shop, database, admin, connect, bootstrap_servers, wait_for
):
    fill(admin, 1)
    items = next(iter(shop.topics.values()))
    entity = shop.entities["items"]

    def load_late(connection, keys):
        # The relay has read the live rows. Two more come, and then it reads the state.
        for version in (2, 3):
            with connect() as other:
                item = Item(1, f"item {version}", version)
                other.execute(
                    "update items set name = %s, version = %s", (item.name, version)
                )
                items.send(other, key="1", value=item, version=version)
        shop.entities["items"] = entity
        return entity.load(connection, keys)

    shop.entities["items"] = replace(entity, load=load_late)
    reexport.start(database, entity, rate=60_000)
    with running(shop, "executor", "relay"):
        wait_for(
            lambda: (
                reexport.status(database, "items").state == "finished"
                and admin.execute("select count(*) from jobs_lib.outbox").fetchone()[0]
                == 0
            ),
            timeout=30,
            what="all is sent",
        )
    records = read_topic(bootstrap_servers, items.name)
    # The two later ones may have become one.
    assert [record.json["version"] for record in records] in ([1, 2, 3], [1, 3])


@pytest.mark.slow
@pytest.mark.guarantee("W3")
def test_a_re_export_fills_a_deleted_topic_with_the_same_content(
    shop, database, admin, kafka_admin, bootstrap_servers, wait_for
):
    fill(admin, 300)
    (items,) = shop.topics.values()

    def export() -> dict[str, object]:
        with running(shop, "executor", "relay"):
            reexport.start(database, shop.entities["items"], rate=1_000_000)
            wait_for(
                lambda: (
                    reexport.status(database, "items").state == "finished"
                    and not count(admin, "outbox")
                ),
                timeout=60,
                what=lambda: f"all is sent: {reexport.status(database, 'items')}",
            )
        return newest(read_topic(bootstrap_servers, items.name))

    before = export()
    assert before == table(admin)
    delete_topics(kafka_admin, [items.name])
    wait_for(
        lambda: items.name not in kafka_admin.list_topics(timeout=10).topics,
        timeout=30,
        what="the topic is gone",
    )
    create_topic(kafka_admin, items.name, 4, {"cleanup.policy": "compact"})
    assert read_topic(bootstrap_servers, items.name) == []
    assert export() == before


@pytest.mark.slow
@pytest.mark.guarantee("I27", "FK20", "W50")
@pytest.mark.timeout(600)
@pytest.mark.expects("loop.failed")
def test_a_read_model_is_equal_after_its_topic_was_made_anew_grown_and_cut(
    shop, database, admin, connect, kafka_admin, wait_for
):
    fill(admin, 500)
    (items,) = shop.topics.values()
    admin.execute(
        "create table item_rm (id int primary key, version bigint, name text)"
    )

    @shop.read_model(
        items.name, group=f"{items.name}-g", table="item_rm", key="id", value=Item
    )
    def item_rm(record):
        return {"name": record.value.name}

    def find_differences() -> list[Any]:
        return admin.execute(
            "(table items except select id, name, version from item_rm) union all"
            " (select id, name, version from item_rm except table items)"
        ).fetchall()

    def await_equal(since: str) -> None:
        wait_for(
            lambda: not count(admin, "outbox") and not find_differences(),
            timeout=120,
            what=lambda: f"they are equal {since}: {find_differences()[:5]}",
        )

    def export() -> None:
        reexport.start(database, shop.entities["items"], rate=1_000_000)
        wait_for(
            lambda: reexport.status(database, "items").state == "finished",
            timeout=120,
            what=lambda: f"all is sent: {reexport.status(database, 'items')}",
        )

    with running(shop, "consumers", "executor", "relay"):
        export()
        await_equal("at the beginning")
        delete_topics(kafka_admin, [items.name])
        with live_writes(connect, items, 500):
            wait_for(
                lambda: items.name not in kafka_admin.list_topics(timeout=10).topics,
                timeout=60,
                what="the topic is gone",
            )
            # Kafka cuts only the logs of topics that may delete.
            policy = {"cleanup.policy": "compact,delete", "retention.ms": "-1"}
            create_topic(kafka_admin, items.name, 4, policy)
            export()
        await_equal("in a topic made anew")
        with live_writes(connect, items, 500):
            grow_topic(kafka_admin, items.name, 8)
            wait_for(
                lambda: count(admin, "offsets") == 8,
                timeout=120,
                what="the new partitions are read",
            )
        await_equal("in eight partitions")
        with live_writes(connect, items, 500):
            # Nobody could know what a record says that is gone before it was read.
            read = admin.execute(
                "select partition, next_offset from jobs_lib.offsets"
                " where next_offset is not null"
            ).fetchall()
            ends = [TopicPartition(items.name, *place) for place in read]
            for deleted in kafka_admin.delete_records(ends).values():
                deleted.result()
        await_equal("after the log was cut")
    # It begins where nothing is left.
    admin.execute("update jobs_lib.offsets set next_offset = 0")
    with (
        heard("offset.moved") as moved,
        running(shop, "consumers", "executor", "relay"),
    ):
        with live_writes(connect, items, 500):
            wait_for(lambda: moved, timeout=60, what="what has gone is passed over")
        await_equal("behind what was cut")


STILL = 0.3
"""Seconds without a record, where one or two come in each tenth of a second: something
stood still. Of a grant that is as old nothing leaves."""
SETTLED = 1.0
"""Seconds after which what has piled up meanwhile has left. No more is kept."""


def measure_calm(times: list[float]) -> tuple[int, float]:
    """Count the records, and the seconds, of the time in which nothing stood still.

    The limiter never catches up, so that no window has more than the rate. What is
    missed while the machine stands still is missed for good, and is no fault of it.
    """
    count, seconds, begins = 0, 0.0, times[0]
    for before, at in itertools.pairwise(times):
        if at - before > STILL:
            begins = at + SETTLED
        elif before >= begins:
            count += 1
            seconds += at - before
    return count, seconds


@pytest.mark.guarantee("W28", "I35")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "minutes", [1.15, pytest.param(2.1, marks=pytest.mark.slow)], ids=str
)
def test_the_rate_holds_in_every_window_at_the_topic(
    shop, database, admin, bootstrap_servers, wait_for, minutes
):
    rate = 1_200
    fill(admin, 3_600)
    items = next(iter(shop.topics.values()))
    with running(shop, "executor", "relay"):
        reexport.start(database, shop.entities["items"], rate=rate)
        wait_for(
            lambda: reexport.status(database, "items").sent >= minutes * rate,
            timeout=200,
            what="more than a window's worth is sent",
            # It lasts for a minute, and each look makes a connection.
            every=0.5,
        )
        reexport.cancel(database, "items")
    times = sorted(record.at for record in read_topic(bootstrap_servers, items.name))

    def most(seconds: float) -> int:
        first = best = 0
        for last, at in enumerate(times):
            while at - times[first] >= seconds:
                first += 1
            best = max(best, last - first + 1)
        return best

    assert most(60) <= rate
    assert most(1) <= max(rate / 60 * 2, 100)
    assert (times[-1] - times[0]) / 60 >= minutes - 0.1
    came, seconds = measure_calm(times)
    # Records that always come in longer steps would not be measured at all.
    assert seconds >= (times[-1] - times[0]) / 4
    assert came >= 0.97 * rate * seconds / 60


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.guarantee("W32", "I35")
def test_killed_pods_cost_a_few_repeats_and_no_key(
    shop, database, admin, bootstrap_servers, database_url, start_process, wait_for
):
    # A kill repeats one block of each sender at most, 12,000 records in all.
    count = 250_000
    fill(admin, count)
    (items,) = shop.topics.values()

    def start():
        return start_process(
            "reexport",
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            topic=items.name,
        )

    reexport.start(database, shop.entities["items"], rate=10_000_000)
    for enough in (20_000, 80_000, 150_000):
        worker = start()
        wait_for(
            lambda enough=enough: reexport.status(database, "items").sent > enough,
            timeout=120,
            what=lambda worker=worker: f"some are sent\n{worker.output}",
        )
        worker.kill()
    worker = start()
    wait_for(
        lambda: reexport.status(database, "items").state == "finished",
        timeout=120,
        what=lambda: f"all are sent\n{worker.output}",
    )
    records = read_topic(bootstrap_servers, items.name)
    assert {record.key for record in records} == {str(n + 1) for n in range(count)}
    assert len(records) < 1.05 * count
    assert newest(records) == table(admin)


@pytest.mark.guarantee("I36")
def test_a_key_that_is_gone_becomes_a_tombstone(
    shop, database, topic, admin, bootstrap_servers, wait_for
):
    fill(admin, 10)
    # These states have no version. For others an end would need one, which nothing
    # knows now.
    names = shop.topic(topic(1), value=dict[str, str], compacted=True)

    @shop.entity(names, source="items", key="id", name="names")
    def load_names(connection, keys: list[str]) -> dict[str, dict[str, str]]:
        rows = connection.execute(
            "select id::text, name from items where id::text = any (%s)", (keys,)
        )
        return {key: {"name": name} for key, name in rows}

    reexport.start(database, shop.entities["names"], rate=60_000)
    admin.execute("delete from items where id = 3")
    with running(shop, "executor", "relay"):
        wait_for(
            lambda: reexport.status(database, "names").state == "finished",
            timeout=30,
            what="all is sent",
        )
    records = read_topic(bootstrap_servers, names.name)
    assert [r.key for r in records if r.value is None] == ["3"]
    number = str(reexport.status(database, "names").id)
    marks = {(r.headers["ce_cause"], r.headers["ce_reexport"]) for r in records}
    assert marks == {("reexport", number)}
    assert newest(records) == {
        str(n): {"name": f"item {n}"} for n in range(1, 11) if n != 3
    }
