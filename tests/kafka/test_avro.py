"""Avro from the caller's transaction to a consumer's, over versions of a schema."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pytest

from jobs_lib.operating.schemas import check_schemas, register_schemas
from tests.support.apps import count, count_unsent, heard, make_app, running
from tests.support.records import produce, read_topic
from tests.support.registry import serving

SYMBOLS = ["UNKNOWN", "PARKED", "TAXIING", "CLIMBING", "CRUISING", "LOST"]


def make_schema(version: int) -> dict[str, Any]:
    """Make a version: each has one more symbol and one more field, with a default."""
    status = {
        "type": "enum",
        "name": "Status",
        "symbols": SYMBOLS[: version + 1],
        "default": "UNKNOWN",
    }
    fields: list[dict[str, Any]] = [
        {"name": "tail", "type": "string"},
        {"name": "status", "type": status},
    ]
    fields += [
        {"name": f"since{n}", "type": "int", "default": 0}
        for n in range(2, version + 1)
    ]
    return {"type": "record", "name": "Aircraft", "fields": fields}


class Status(enum.Enum):
    """The values that version 1 knows."""

    UNKNOWN = "UNKNOWN"
    PARKED = "PARKED"


@dataclass
class Aircraft:
    """The class of version 1."""

    tail: str
    status: Status


@pytest.fixture
def registry():
    """A registry that compares nothing."""
    with serving() as registry:
        yield registry


@pytest.fixture
def release(database_url, bootstrap_servers, registry):
    """A function that makes the app of one more release, on the same database."""

    def release():
        return make_app(
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            schema_registry_url=registry.url,
        )

    return release


@pytest.fixture
def relay(admin, wait_for):
    """A function that sends all rows of the outbox."""

    def relay(app):
        with running(app, "relay"):
            wait_for(
                lambda: count(admin, "outbox") == 0, timeout=60, what="all is sent"
            )

    return relay


@pytest.fixture
def five_versions(release, relay, connect, topic):
    """A topic with one record of each of five versions; returns its name."""
    name = topic(1)
    for version in range(1, 6):
        app = release()
        states = app.topic(name, value=dict[str, Any], schema=make_schema(version))
        findings, _ = register_schemas(app)
        assert findings == []
        value: dict[str, Any] = {"tail": f"N{version}", "status": SYMBOLS[version]}
        value |= {f"since{n}": version for n in range(2, version + 1)}
        with connect() as connection:
            states.send(connection, key=f"N{version}", value=value)
    relay(app)
    return name


@pytest.mark.guarantee("W38", "W41")
def test_a_reader_of_version_1_reads_all_later_versions(
    release, five_versions, wait_for
):
    app, name = release(), five_versions
    seen: dict[str, Any] = {}

    @app.consumer(name, group=f"{name}-old", value=Aircraft, schema=make_schema(1))
    def handle(record, connection) -> None:
        seen[record.key] = record.value

    with running(app, "consumers"):
        wait_for(lambda: len(seen) == 5, timeout=30, what="all are read")
    assert seen == {
        "N1": Aircraft("N1", Status.PARKED),
        **{f"N{n}": Aircraft(f"N{n}", Status.UNKNOWN) for n in range(2, 6)},
    }


@pytest.mark.guarantee("W40")
def test_a_consumer_needs_the_registered_schema_alone(
    release, five_versions, admin, wait_for
):
    app, name = release(), five_versions
    seen: dict[str, Any] = {}
    admin.execute("create table rm (tail text primary key, version bigint, state text)")

    @app.consumer(name, group=f"{name}-any", schema="registered")
    def handle(record, connection) -> None:
        seen[record.key] = record.value

    @app.read_model(
        name, table="rm", key="tail", group=f"{name}-rm", schema="registered"
    )
    def row_of(record):
        return {"state": record.value["status"]}

    with running(app, "consumers"):
        wait_for(
            lambda: (
                len(seen) == 5
                and admin.execute("select count(*) from rm").fetchone() == (5,)
            ),
            timeout=30,
            what="all are read",
        )
    assert [seen[f"N{n}"]["status"] for n in range(1, 6)] == SYMBOLS[1:]
    assert seen["N5"] == {
        "tail": "N5",
        "status": "LOST",
        **{f"since{n}": 5 for n in range(2, 6)},
    }
    rows = admin.execute("select state from rm order by tail").fetchall()
    assert [state for (state,) in rows] == SYMBOLS[1:]


def test_a_state_sent_by_its_id_is_avro(
    release, relay, connect, topic, bootstrap_servers
):
    app = release()
    states = app.topic(
        topic(1), value=Aircraft, schema=make_schema(1), compacted=True, partitions=1
    )

    @app.entity(states, source="aircraft", key="tail")
    def load(connection, tails: list[str]) -> dict[str, Aircraft]:
        known = {tail: Aircraft(tail, Status.PARKED) for tail in tails}
        return {tail: one for tail, one in known.items() if tail != "gone"}

    register_schemas(app)
    with connect() as connection:
        for tail in ("N1", "gone"):
            states.send_current(connection, key=tail)
    relay(app)
    found = {r.key: r for r in read_topic(bootstrap_servers, states.name)}
    assert found["N1"].value == states.encode(Aircraft("N1", Status.PARKED))
    assert found["N1"].headers["content-type"] == "application/avro"
    assert found["gone"].value is None


@pytest.mark.guarantee("W39")
def test_a_transaction_feeds_both_topics_until_the_old_one_is_closed(
    release, relay, connect, topic, bootstrap_servers
):
    first, second = topic(1), topic(1)
    registration = {"name": "registration", "type": "string"}
    whole = {"type": "record", "name": "Aircraft", "fields": [registration]}

    def declare(app, *names):
        schemas = {first: make_schema(1), second: whole}
        return [
            app.topic(name, value=dict[str, Any], schema=schemas[name])
            for name in names
        ]

    def send(connection, tail, *topics) -> None:
        values = {first: {"tail": tail, "status": "PARKED"}}
        values[second] = {"registration": tail}
        for one in topics:
            one.send(connection, key=tail, value=values[one.name])

    both = release()
    old, new = declare(both, first, second)
    register_schemas(both)
    with connect() as connection:
        send(connection, "N1", old, new)
        connection.commit()
        send(connection, "N2", old, new)
        connection.rollback()
        send(connection, "N3", old, new)
    # The next release declares only the new topic; rows of the old one still wait.
    closed = release()
    (new_alone,) = declare(closed, second)
    with connect() as connection:
        send(connection, "N4", new_alone)
    assert check_schemas(closed) == []
    relay(closed)
    for one, keys in ((old, ["N1", "N3"]), (new, ["N1", "N3", "N4"])):
        found = read_topic(bootstrap_servers, one.name)
        assert sorted(record.key for record in found) == keys
        for record in found:
            assert record.headers["content-type"] == "application/avro"
            assert record.value is not None
            assert record.key.encode() in record.value


def test_a_row_that_is_no_avro_is_held_and_never_sent(
    release, topic, admin, connect, bootstrap_servers, wait_for
):
    name = topic(1)
    app = release()
    states = app.topic(name, value=dict[str, Any], schema=make_schema(1))
    register_schemas(app)
    value = {"tail": "N1", "status": "PARKED"}
    with connect() as connection:
        states.send(connection, key="before", value=value)
        states.send(connection, key="N1", value=value)
        # SQL writes JSON, even for a topic with a schema.
        connection.execute("select jobs_lib.send(%s, 'N1', '{}')", (name,))
        connection.execute("select jobs_lib.send(%s, null, '{}')", (name,))
        states.send(connection, key="N1", value=value)
        states.tombstone(connection, key="gone")
    with running(app, "relay"):
        wait_for(
            lambda: count_unsent(admin) == (0, 3),
            timeout=60,
            what=lambda: f"three rows are held: {count(admin, 'held_rows')}",
        )
    errors = [error for (error,) in admin.execute("select error from jobs_lib.holds")]
    assert len(errors) == 2
    assert all("is not application/avro" in error for error in errors), errors
    records = read_topic(bootstrap_servers, name)
    assert sorted(record.key for record in records) == ["N1", "before", "gone"]
    assert all(record.value is None or record.value[0] == 0 for record in records)


def test_bytes_that_are_no_avro_stop_their_partition_alone(
    release, admin, topic, connect, relay, bootstrap_servers, wait_for
):
    app, seen = release(), []
    states = app.topic(topic(1), value=Aircraft, schema=make_schema(1))
    register_schemas(app)

    @app.consumer(
        states.name, group=f"{states.name}-g", value=Aircraft, schema="registered"
    )
    def handle(record, connection) -> None:
        seen.append(record.value.tail)

    good = states.encode(Aircraft("N1", Status.PARKED))
    unknown = b"\0\0\0\0\x63" + good[5:]
    records = [("k", good), ("k", unknown), ("k", good)]
    produce(bootstrap_servers, states.name, records)
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=30, what="the record is reported")
        assert seen == ["N1"]
        ((_, fields), *_) = failed
        assert fields["offset"] == 1
        assert "no schema 99" in fields["error"]


@pytest.mark.parametrize(
    ("on_error", "status"), [("stop", 503), ("skip", 503), ("skip", 404)]
)
def test_a_registry_that_is_away_is_waited_for_and_no_record_blamed(
    release, registry, admin, topic, bootstrap_servers, wait_for, on_error, status
):
    app, seen = release(), []
    states = app.topic(topic(1), value=Aircraft, schema=make_schema(1))
    register_schemas(app)
    value = states.encode(Aircraft("N1", Status.PARKED))
    produce(bootstrap_servers, states.name, [("k", value)])
    reader = release()

    @reader.consumer(
        states.name,
        group=f"{states.name}-g",
        value=Aircraft,
        schema="registered",
        on_error=on_error,
    )
    def handle(record, connection) -> None:
        seen.append(record.value.tail)

    with heard("record.failed", "loop.failed") as failed:
        registry.status = status
        with running(reader, "consumers"):
            wait_for(lambda: failed, timeout=30, what="the outage is reported")
            assert seen == []
            noted = "select failure from jobs_lib.offsets where failed_offset = 0"
            (why,) = wait_for(
                lambda: admin.execute(noted).fetchone(),
                timeout=30,
                what="it is written down",
            )
            assert why.startswith("UnavailableError: ")
            registry.status = 0
            wait_for(lambda: seen == ["N1"], timeout=30, what="it goes on")
    assert {event for event, _ in failed} == {"loop.failed"}
    assert {fields["loop"] for _, fields in failed} == {f"consume {states.name}-g"}
