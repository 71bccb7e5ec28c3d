"""States are merged, collected for a while, or read only when they leave."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka.admin import AdminClient
from psycopg import sql

from jobs_lib.devstack import KafkaBroker
from jobs_lib.errors import ConfigurationError
from jobs_lib.outbox import relay_thread
from jobs_lib.outbox.capture import capture_changes
from jobs_lib.partitioner import choose_shard
from tests.support.apps import count, heard, make_app, running
from tests.support.records import read_topic
from tests.support.topics import create_topic


@dataclass
class Aircraft:
    """A state that counts its changes."""

    tail: str
    seats: int
    version: int


@pytest.fixture
def app(database_url, bootstrap_servers):
    """An app with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)


@pytest.fixture
def aircraft(app, topic, admin):
    """A topic of states, with its entities in a table."""
    states = app.topic(topic(4), value=Aircraft, compacted=True, partitions=4)
    admin.execute(
        "create table aircraft (tail text primary key, seats int, version int)"
    )

    @app.entity(states, source="aircraft", key="tail")
    def load(connection, tails: list[str]) -> dict[str, Aircraft]:
        rows = connection.execute(
            "select * from aircraft where tail = any (%s)", (tails,)
        )
        return {row[0]: Aircraft(*row) for row in rows}

    return states


@pytest.fixture
def relay(app, admin, bootstrap_servers, wait_for):
    """A function that relays all rows, and returns the records of a topic."""

    def relay(states, by=app):
        with running(by, "relay"):
            wait_for(
                lambda: count(admin, "outbox") == 0, timeout=60, what="all is sent"
            )
        return read_topic(bootstrap_servers, states.name)

    return relay


class Feed:
    """The changes of the table of aircraft, by logical decoding."""

    def __init__(self, admin) -> None:
        self._admin = admin
        self._slot = f"feed_{uuid4().hex}"
        self._seen = None
        admin.execute(
            "select pg_create_logical_replication_slot(%s, 'test_decoding')",
            (self._slot,),
        )

    def peek(self) -> list[tuple[str, str]]:
        """Return the kind and the key of each change since the last `advance`."""
        changes = self._admin.execute(
            "select lsn, data from pg_logical_slot_peek_changes(%s, null, null)",
            (self._slot,),
        ).fetchall()
        self._seen = changes[-1][0]
        found = (
            re.search(r"aircraft: (\w+): tail\[text\]:'(\w+)'", c) for _, c in changes
        )
        return [(one[1], one[2]) for one in found if one]

    def advance(self) -> None:
        """Confirm all changes up to the last peek."""
        self._admin.execute(
            "select pg_replication_slot_advance(%s, %s)", (self._slot, self._seen)
        )

    def drop(self) -> None:
        """Drop the slot in the log."""
        self._admin.execute("select pg_drop_replication_slot(%s)", (self._slot,))


@pytest.fixture
def feed(admin):
    """A feed of the changes from now on."""
    feed = Feed(admin)
    yield feed
    feed.drop()


def change(connection, tail: str) -> None:
    connection.execute(
        "insert into aircraft values (%s, 1, 1) on conflict (tail) do update"
        " set seats = aircraft.seats + 1, version = aircraft.version + 1",
        (tail,),
    )


@pytest.mark.guarantee("W18", "W19", "W45")
def test_of_what_leaves_together_the_last_state_is_sent(aircraft, connect, relay):
    with connect() as connection:
        for n in range(1, 101):
            tail = f"N{n % 10}"
            state = Aircraft(tail, n, n)
            aircraft.send(connection, key=tail, value=state, version=n)
        aircraft.tombstone(connection, key="N0", version=101)
    records = relay(aircraft)
    # There is one record for each key, and not only the last of a hundred.
    assert sorted(r.key for r in records) == [f"N{n}" for n in range(10)]
    found = {r.key: (r.json, r.headers["ce_version"]) for r in records}
    assert found == {
        "N0": (None, "101"),
        **{
            f"N{n}": (
                {"tail": f"N{n}", "seats": 90 + n, "version": 90 + n},
                f"{90 + n}",
            )
            for n in range(1, 10)
        },
    }


@pytest.mark.guarantee("W19")
def test_a_key_whose_rows_leave_in_two_blocks_ends_with_its_last_state(
    database_url, bootstrap_servers, topic, connect, relay
):
    app = make_app(
        database_url, kafka_bootstrap_servers=bootstrap_servers, relay_block=7
    )
    states = app.topic(topic(4), value=int, compacted=True, partitions=4)
    with connect() as connection:
        for n in range(100):
            states.send(connection, key=f"N{n % 10}", value=n, version=n)
        states.tombstone(connection, key="N0", version=100)
    records = relay(states, by=app)
    # No block has all ten rows of a key.
    assert len(records) >= 20
    found = {r.key: (r.json, r.headers["ce_version"]) for r in records}
    assert found == {
        "N0": (None, "100"),
        **{f"N{n}": (90 + n, f"{90 + n}") for n in range(1, 10)},
    }


@pytest.mark.guarantee("W37")
def test_a_column_that_gets_another_name_changes_no_byte(
    database_url, bootstrap_servers, topic, admin, connect, relay
):
    name = topic(1)
    admin.execute("create table planes (tail text, seats int, wing text, version int)")
    admin.execute("insert into planes values ('N1', 4, 'low', 1), ('N2', 9, 'high', 7)")

    def send_all(query: str) -> list[tuple[Any, ...]]:
        """Send all by an app that maps the table's rows with this query."""
        app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
        states = app.topic(name, value=Aircraft, compacted=True, partitions=1)

        @app.entity(states, source="planes", key="tail")
        def load(connection, tails: list[str]) -> dict[str, Aircraft]:
            rows = connection.execute(query, (tails,))
            return {row[0]: Aircraft(*row) for row in rows}

        with connect() as connection:
            for tail in ("N1", "N2"):
                states.send_current(connection, key=tail)
        before = len(read_topic(bootstrap_servers, name))
        own = ("ce_type", "ce_source", "ce_version", "content-type")
        return sorted(
            (r.key, r.value, [r.headers.get(header) for header in own])
            for r in relay(states, by=app)[before:]
        )

    first = send_all("select tail, seats, version from planes where tail = any (%s)")
    admin.execute("alter table planes rename seats to seat_count")
    admin.execute("alter table planes drop wing")
    again = send_all(
        "select tail, seat_count as seats, version from planes where tail = any (%s)"
    )
    assert [key for key, *_ in first] == ["N1", "N2"]
    assert again == first


@pytest.mark.slow
@pytest.mark.guarantee("W16")
def test_a_deleted_key_is_a_tombstone_and_disappears_after_compaction(
    database_url, admin, connect, wait_for
):
    quick = {"log.cleaner.backoff.ms": "100"}
    with KafkaBroker.ephemeral(properties=quick) as broker:
        servers = broker.bootstrap_servers
        create_topic(
            AdminClient({"bootstrap.servers": servers}),
            "aircraft",
            1,
            {
                "cleanup.policy": "compact",
                "delete.retention.ms": "0",
                "min.cleanable.dirty.ratio": "0",
                "segment.ms": "100",
            },
        )
        app = make_app(database_url, kafka_bootstrap_servers=servers)
        states = app.topic("aircraft", value=Aircraft, compacted=True, partitions=1)

        def send(key: str, version: int) -> None:
            with connect() as connection:
                value = Aircraft(key, 1, version)
                states.send(connection, key=key, value=value, version=version)

        with running(app, "relay"):
            send("gone", 1)
            send("kept", 1)
            wait_for(lambda: count(admin, "outbox") == 0, what="both are sent")
            with connect() as connection:
                states.tombstone(connection, key="gone", version=2)
            wait_for(lambda: count(admin, "outbox") == 0, what="the end is sent")
            last = {r.key: r.value for r in read_topic(servers, "aircraft")}
            assert last["gone"] is None
            assert last["kept"] is not None
            versions = iter(range(1, 1_000))

            def compacted() -> bool:
                # Only segments before the newest one are compacted.
                send("other", next(versions))
                keys = {record.key for record in read_topic(servers, "aircraft")}
                return "gone" not in keys and "kept" in keys

            wait_for(compacted, timeout=60, what="the key has gone from the topic")


@pytest.mark.guarantee("W21")
def test_each_event_of_a_key_is_sent_in_order(app, topic, connect, relay):
    events = app.topic(topic(4), value=int)
    with connect() as connection:
        for n in range(100):
            events.send(connection, key=f"k{n % 10}", value=n)
    found: dict[str, list[int]] = {}
    for record in relay(events):
        found.setdefault(record.key, []).append(record.json)
    assert found == {f"k{n}": list(range(n, 100, 10)) for n in range(10)}


@pytest.mark.guarantee("W20")
def test_a_burst_is_collected_into_one_record(
    app, admin, topic, connect, bootstrap_servers, wait_for
):
    calm = app.topic(topic(1), value=int, compacted=True, settle=600.0)
    prompt = app.topic(topic(1), value=int, compacted=True)
    with running(app, "relay"):
        with connect() as connection:
            for n in range(50):
                calm.send(connection, key="a", value=n)
                connection.commit()
            prompt.send(connection, key="a", value=1)
            connection.commit()
            waiting = "outbox where topic = '{}'"
            # A row that still settles delays no other one.
            wait_for(
                lambda: count(admin, waiting.format(prompt.name)) == 0,
                timeout=60,
                what="the prompt one is sent",
            )
        assert count(admin, waiting.format(calm.name)) == 50
        # However long the burst took, it is as old now as it has to be.
        admin.execute(
            "update jobs_lib.outbox set created_at = created_at - interval '600 s'"
        )
        wait_for(lambda: count(admin, "outbox") == 0, timeout=60, what="all is sent")
    (record,) = read_topic(bootstrap_servers, calm.name)
    assert record.json == 49


@pytest.mark.guarantee("W20")
def test_a_row_leaves_with_the_first_poll_after_it_has_settled(
    database_url, topic, connect, bootstrap_servers, wait_for, monkeypatch
):
    # With hints and nothing to wait for, the relay would sleep for half an hour.
    monkeypatch.setattr(relay_thread, "_HINTED", 10_000)
    app = make_app(
        database_url,
        kafka_bootstrap_servers=bootstrap_servers,
        relay_poll_interval=0.2,
    )
    states = app.topic(topic(1), value=int, compacted=True, settle=1.0)
    with running(app, "relay") as service:
        relay: Any = next(one.worker for one in service._owners)
        wait_for(relay._receives_hints, timeout=60, what="hints come")
        with connect() as connection:
            states.send(connection, key="a", value=1)
        records = wait_for(
            lambda: read_topic(bootstrap_servers, states.name),
            timeout=30,
            what="it is sent",
        )
    (record,) = records
    written = datetime.fromisoformat(record.headers["ce_time"]).timestamp()
    # The record's time is in whole milliseconds.
    assert record.at > written + 1.0 - 0.001


def test_a_topic_that_settles_but_merges_nothing_is_refused(app):
    with pytest.raises(ConfigurationError, match="merges nothing"):
        app.topic("events", settle=1.0)


@pytest.mark.guarantee("W6", "W36")
def test_a_row_sent_by_its_id_carries_the_state_at_the_time_of_sending(
    aircraft, admin, connect, relay
):
    with connect() as connection:
        for _ in range(3):
            change(connection, "N1")
            aircraft.send_current(connection, key="N1")
            connection.commit()
        change(connection, "N2")
        aircraft.send_current(connection, key="N2")
        connection.commit()
    # The application does not see this change: there is no row, and yet it is sent.
    admin.execute("update aircraft set seats = 99 where tail = 'N1'")
    admin.execute("delete from aircraft where tail = 'N2'")
    found = {r.key: (r.json, r.headers.get("ce_version")) for r in relay(aircraft)}
    assert found == {
        "N1": ({"tail": "N1", "seats": 99, "version": 3}, "3"),
        "N2": (None, None),
    }


@pytest.mark.guarantee("W6", "I20", "W78")
def test_large_states_of_one_statement_leave_in_blocks_that_have_as_many_as_fit(
    app, topic, admin, bootstrap_servers, wait_for
):
    charts = app.topic(topic(1), value=dict[str, Any], compacted=True)
    admin.execute("create table charts (id text primary key, size int, version int)")
    capture_changes(admin, "charts", topic=charts.name, key="id")
    size = 100_000

    @app.entity(charts, source="charts", key="id")
    def load(connection, keys: list[str]) -> dict[str, dict[str, Any]]:
        rows = connection.execute(
            "select id, size, version from charts where id = any (%s)", (keys,)
        )
        return {
            key: {"version": version, "body": "x" * size} for key, size, version in rows
        }

    found = (f"c{n}" for n in range(100_000))
    keys = [key for key in found if choose_shard(charts.name, key, 16) == 0][:250]
    admin.execute("insert into charts select unnest(%s::text[]), %s, 1", (keys, size))
    with heard("block.produced") as produced, running(app, "relay"):
        wait_for(lambda: produced, timeout=60, what="a block has left")
        # Some of these rows wait behind the first ones of their keys.
        admin.execute("update charts set version = 2")
        admin.execute("delete from charts where id = any (%s)", (keys[::5],))
        wait_for(lambda: count(admin, "outbox") == 0, timeout=60, what="all is sent")
    versions: dict[str, list[int]] = {key: [] for key in keys}
    for record in read_topic(bootstrap_servers, charts.name):
        versions[record.key].append(int(record.headers["ce_version"]))
    assert all(sorted(one) == one for one in versions.values())
    gone = {*keys[::5]}
    assert {key for key, one in versions.items() if one[-1] == 3} == gone
    assert {one[-1] for key, one in versions.items() if key not in gone} == {2}
    assert len(produced) >= 250 * size // (8 * 2**20 + size)
    assert len(produced[0][1]["rows"]) == 8 * 2**20 // size + 1


@pytest.mark.guarantee("W14")
def test_a_feed_of_changes_chooses_the_keys_to_send(
    aircraft, admin, connect, relay, feed
):
    for tail in ("N1", "N2", "N3"):
        change(admin, tail)
    change(admin, "N2")
    admin.execute("delete from aircraft where tail = 'N3'")
    with connect() as connection:
        change(connection, "N4")
        connection.rollback()

    def follow() -> list[str]:
        """Write a row for each change in the feed."""
        with connect() as connection:
            tails = [tail for _, tail in feed.peek()]
            for tail in tails:
                aircraft.send_current(connection, key=tail)
        return tails

    changed = ["N1", "N2", "N3", "N2", "N3"]
    assert follow() == changed
    # If it dies before it advances the feed, all changes come again.
    assert follow() == changed
    feed.advance()
    change(admin, "N1")
    assert follow() == ["N1"]
    found = {r.key: (r.json, r.headers.get("ce_version")) for r in relay(aircraft)}
    assert found == {
        "N1": ({"tail": "N1", "seats": 2, "version": 2}, "2"),
        "N2": ({"tail": "N2", "seats": 2, "version": 2}, "2"),
        "N3": (None, None),
    }


def test_an_id_after_a_value_and_a_value_after_an_id_both_end_with_the_newest(
    aircraft, connect, relay
):
    with connect() as connection:
        change(connection, "N1")
        aircraft.send(connection, key="N1", value=Aircraft("N1", 0, 0))
        aircraft.send_current(connection, key="N1")
        change(connection, "N2")
        aircraft.send_current(connection, key="N2")
        aircraft.send(connection, key="N2", value=Aircraft("N2", 7, 7))
    assert {r.key: r.json["seats"] for r in relay(aircraft)} == {"N1": 1, "N2": 7}


def test_ids_that_are_not_merged_are_no_tombstones(app, topic, connect, relay):
    states = app.topic(topic(1), value=int, compacted=True, merge=False)

    @app.entity(states, source="things", key="id")
    def load(connection, keys: list[str]) -> dict[str, int]:
        return {key: 7 for key in keys if key != "gone"}

    with connect() as connection:
        for key in ("a", "gone", "a"):
            states.send_current(connection, key=key)
    # The keys may lie in different shards, which are sent independently.
    found = sorted((r.key, r.json) for r in relay(states))
    assert found == [("a", 7), ("a", 7), ("gone", None)]


def test_send_current_is_refused_for_a_topic_without_an_entity(app, connect):
    states = app.topic("states", compacted=True)
    with (
        connect() as connection,
        pytest.raises(ConfigurationError, match="no entity of the topic"),
    ):
        states.send_current(connection, key="a")


@pytest.mark.guarantee("W49")
def test_headers_name_the_type_source_time_and_version_of_a_record(
    app, topic, admin, connect, relay
):
    # The time is written in UTC, whatever the session's zone is.
    here = sql.Identifier(admin.info.dbname)
    admin.execute(
        sql.SQL("alter database {} set timezone = 'Europe/Berlin'").format(here)
    )
    events = app.topic(topic(1), value=int)
    before = datetime.now(UTC)
    with connect() as connection:
        first = events.send(connection, key="a", value=1, version=7)
        events.send(
            connection, key="a", value=2, headers={"ce_type": "landed", "who": "me"}
        )
    plain, special = relay(events)
    time = plain.headers.pop("ce_time")
    at = datetime.fromisoformat(time)
    assert before <= at <= datetime.now(UTC)
    assert plain.headers == {
        "ce_id": f"{first}-{time.removesuffix('Z')}",
        "ce_specversion": "1.0",
        "ce_type": events.name,
        "ce_source": "test",
        "ce_cause": "live",
        "ce_version": "7",
        "content-type": "application/json",
    }
    assert special.headers["ce_type"] == "landed"
    assert special.headers["who"] == "me"
