"""Staged states reach the topic, and never after a newer version of their key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
import pytest

from jobs_lib import reexport
from jobs_lib.errors import ReexportError
from jobs_lib.reexport.plan import Range
from jobs_lib.reexport.staging import (
    State,
    begin_staged,
    drop_ended,
    stage_range,
)
from tests.support.apps import count, make_app, running
from tests.support.records import read_topic

if TYPE_CHECKING:
    from jobs_lib.reexport import Begun
    from tests.support.records import Seen

pytestmark = pytest.mark.expects("fenced")
WHOLE = (Range(None, None, 0),)


@dataclass
class Item:
    """The state of an item."""

    id: int
    name: str
    version: int


@pytest.fixture
def shop(database_url, bootstrap_servers, topic):
    """An app with an entity; nothing loads its states by itself."""
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    name = topic(4, config={"cleanup.policy": "compact"})
    items = app.topic(name, value=Item, compacted=True, partitions=4)

    @app.entity(items, source="nothing", key="id", name="items")
    def load_items(_, keys) -> dict[str, Item]:
        raise AssertionError(f"the table was asked for {keys}")

    return app


def make_states(keys, version=5) -> list[State]:
    return [
        State(
            str(key),
            version,
            b'{"id":%d,"name":"staged","version":%d}' % (key, version),
            None,
        )
        for key in keys
    ]


def begin(database, shop, ranges=WHOLE) -> Begun:
    return begin_staged(
        database, shop.entities["items"], ranges, rate=1_000_000, chunk=10
    )


def stage(database, begun: Begun, states, number=0, left_out=0) -> int | None:
    with database.connect("test") as connection:
        return stage_range(
            connection, database.queries, begun.loading, number, states, left_out
        )


def await_end(database, admin, wait_for) -> reexport.Progress:
    wait_for(
        lambda: (
            reexport.status(database, "items").ended
            and not count(admin, "outbox")
            and not count(admin, "jobs")
        ),
        timeout=60,
        what=lambda: f"all is sent: {reexport.status(database, 'items')}",
    )
    return reexport.status(database, "items")


def send(connection, shop, key: int, version: int | None, *, gone=False) -> None:
    (items,) = shop.topics.values()
    if gone:
        items.tombstone(connection, key=str(key), version=version)
    elif version is None:
        # SQL may leave the version out.
        connection.execute(
            "select jobs_lib.send(%s, %s, %s::jsonb)",
            (items.name, str(key), f'{{"id":{key},"name":"live","version":1}}'),
        )
    else:
        value = Item(key, "live", version)
        items.send(connection, key=str(key), value=value, version=version)
    connection.commit()


def versions_of(records: list[Seen]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for record in records:
        version = int(record.headers["ce_version"])
        found.setdefault(record.key, []).append(version)
    return found


@pytest.mark.guarantee("X4")
def test_staged_states_are_sent_with_their_versions_and_then_dropped(
    shop, database, admin, bootstrap_servers, wait_for
):
    begun = begin(database, shop)
    assert stage(database, begun, make_states(range(250)), left_out=3) == 253
    # A second task changes nothing.
    assert stage(database, begun, make_states(range(999))) is None
    assert drop_ended(database) == []
    with running(shop, "executor", "relay"):
        progress = await_end(database, admin, wait_for)
    assert (progress.sent, progress.superseded, progress.total) == (250, 3, 253)
    (items,) = shop.topics.values()
    records = read_topic(bootstrap_servers, items.name)
    assert {one.key: one.json for one in records} == {
        str(key): {"id": key, "name": "staged", "version": 5} for key in range(250)
    }
    assert {
        (one.headers["ce_cause"], one.headers["ce_reexport"], one.headers["ce_version"])
        for one in records
    } == {("reexport", str(begun.id), "5")}
    # The service's upkeep drops them at its next look; here it is made to.
    drop_ended(database)
    partitions = (
        "select count(*) from pg_class where relname ~ '^reexport_states_[0-9]+$'"
    )
    assert admin.execute(partitions).fetchone() == (0,)
    assert drop_ended(database) == []


@pytest.mark.guarantee("X4", "I34", "X11")
def test_a_state_that_is_older_than_what_has_left_live_is_not_sent(
    shop, database, admin, connect, bootstrap_servers, wait_for
):
    begun = begin(database, shop)
    with connect() as connection, running(shop, "relay"):
        # All of these leave before the re-export's rows are there.
        send(connection, shop, 1, 7)
        send(connection, shop, 2, 5)
        send(connection, shop, 3, 4)
        send(connection, shop, 4, None)
        send(connection, shop, 5, 6, gone=True)
        send(connection, shop, 6, 8)
        send(connection, shop, 6, 9)
        wait_for(lambda: not count(admin, "outbox"), what="the live rows are sent")
    noted = admin.execute(
        "select key, version from jobs_lib.reexport_versions order by key"
    ).fetchall()
    newest = 2**63 - 1
    assert noted == [
        ("1", 7), ("2", 5), ("3", 4), ("4", newest), ("5", 6), ("6", 9),
    ]  # fmt: skip
    stage(database, begun, make_states(range(1, 9)))
    with running(shop, "executor", "relay"):
        progress = await_end(database, admin, wait_for)
    assert (progress.sent, progress.superseded) == (3, 5)
    (items,) = shop.topics.values()
    records = read_topic(bootstrap_servers, items.name)
    exported = [one for one in records if one.headers["ce_cause"] == "reexport"]
    assert sorted(one.key for one in exported) == ["3", "7", "8"]
    for key, versions in versions_of(
        [one for one in records if one.key != "4"]
    ).items():
        assert versions == sorted(versions), key


def test_nothing_is_noted_without_a_re_export_that_needs_it(
    shop, database, admin, connect, wait_for
):
    with connect() as connection, running(shop, "relay"):
        send(connection, shop, 1, 7)
        wait_for(lambda: not count(admin, "outbox"), what="the live row is sent")
        begin(database, shop)
        send(connection, shop, 2, 7)
        wait_for(lambda: not count(admin, "outbox"), what="the live row is sent")
        noted = "select key from jobs_lib.reexport_versions"
        assert admin.execute(noted).fetchall() == [("2",)]
        reexport.cancel(database, "items")
        send(connection, shop, 3, 7)
        wait_for(lambda: not count(admin, "outbox"), what="the live row is sent")
    # The service's own upkeep may have forgotten it by now.
    assert {*admin.execute(noted).fetchall()} <= {("2",)}
    admin.execute(database.queries["forget_versions"], {"rows": 10})
    assert not count(admin, "reexport_versions")
    assert len(drop_ended(database)) == 1


def test_rows_of_a_cancelled_re_export_are_dropped_without_their_states(
    shop, database, admin, bootstrap_servers, wait_for
):
    begun = begin(database, shop)
    stage(database, begun, make_states(range(30)))
    with running(shop, "executor"):
        wait_for(lambda: not count(admin, "jobs"), what="the rows are written")
    reexport.cancel(database, "items")
    assert drop_ended(database) == [begun.id]
    with running(shop, "relay"):
        wait_for(lambda: not count(admin, "outbox"), what="the rows are dropped")
    (items,) = shop.topics.values()
    assert read_topic(bootstrap_servers, items.name) == []
    # A late loader finds it cancelled.
    assert stage(database, begun, make_states(range(30))) is None


def test_states_that_are_still_to_be_sent_cannot_be_dropped(shop, database, admin):
    begun = begin(database, shop)
    for function in ("empty_reexport_states", "drop_reexport_states"):
        with pytest.raises(psycopg.errors.RaiseException, match="still to be sent"):
            admin.execute(f"select jobs_lib.{function}(%s)", (begun.id,))
        admin.rollback()


@pytest.mark.guarantee("X6")
def test_a_loader_that_dies_after_its_copy_leaves_nothing(shop, database, admin):
    begun = begin(database, shop, (Range(None, "5", 5), Range("5", None, 5)))
    stage(database, begun, make_states(range(5)), 0)
    admin.execute("""
        create function fail() returns trigger language plpgsql as
        $$ begin raise 'killed'; end $$;
        create constraint trigger killed after update on jobs_lib.reexport_ranges
        deferrable initially deferred for each row execute function fail();
    """)
    admin.commit()
    with pytest.raises(psycopg.errors.RaiseException, match="killed"):
        stage(database, begun, make_states(range(5, 10)), 1)
    admin.execute("drop trigger killed on jobs_lib.reexport_ranges")
    admin.commit()
    assert count(admin, "reexport_states") == 5
    assert reexport.status(database, "items").loaded == 5
    stage(database, begun, make_states(range(5, 10)), 1)
    assert count(admin, "reexport_states") == 10
    assert reexport.status(database, "items").state == "running"


def test_another_kind_of_source_is_refused(shop, database, admin):
    begun = begin(database, shop)
    with pytest.raises(ReexportError, match=r"from a DataFrame: give it again"):
        reexport.start(database, shop.entities["items"], rate=60)
    with (
        database.connect("test") as connection,
        pytest.raises(ReexportError, match="come from a DataFrame"),
    ):
        reexport.load_range(connection, database.queries, begun.loading, 0)
    again = begin(database, shop)
    assert (again.id, again.resumed) == (begun.id, True)
    reexport.cancel(database, "items")
    admin.execute("create table nothing (id int primary key)")
    admin.execute("insert into nothing values (1)")
    admin.commit()
    table = reexport.begin(database, shop.entities["items"], rate=60)
    with pytest.raises(ReexportError, match=r"from the entity's table: start it with"):
        begin(database, shop)
    assert table.id != begun.id
