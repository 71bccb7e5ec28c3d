"""Handlers get the records that they declare: by type, with their key."""

from __future__ import annotations

import uuid
from typing import Any
from uuid import UUID

import pytest
from psycopg import ClientCursor
from psycopg.rows import dict_row

from jobs_lib import Exact, migrate
from jobs_lib.consuming.consumer import Consumer
from jobs_lib.operating.schemas import register_schemas
from tests.support.apps import heard, running
from tests.support.canary import VALUE
from tests.support.records import key_of, make_producer, produce

# Which handler a record finds


@pytest.mark.guarantee("S7")
@pytest.mark.parametrize("place", [{"type_header": "event"}, {"type_field": "kind"}])
def test_the_type_stands_in_a_header_or_field_of_any_name(
    make, bootstrap_servers, topic, wait_for, place
):
    name = topic(1)
    app = make()
    found: list[tuple[str, int]] = []

    @app.consumer(name, group=f"{name}-g", type="placed", **place)
    def place_order(record, conn) -> None:
        found.append(("placed", record.value["n"]))

    @app.consumer(name, group=f"{name}-g", type="sent", value=dict, **place)
    def send(record, conn) -> None:
        found.append(("sent", record.value["n"]))

    for n, kind in enumerate(["placed", "sent", "placed"]):
        produce(
            bootstrap_servers,
            name,
            [("k", {"kind": kind, "n": n})],
            headers={"event": kind, "ce_type": "neither"},
        )
    with running(app, "consumers"):
        wait_for(lambda: len(found) == 3, timeout=30, what="all are handled")
    assert found == [("placed", 0), ("sent", 1), ("placed", 2)]


@pytest.mark.guarantee("S7")
@pytest.mark.parametrize(
    ("place", "headers", "value", "says"),
    [
        (
            {"type_header": "event"},
            {"event": "lost"},
            {},
            "type 'lost' in its header e",
        ),
        ({"type_header": "event"}, {}, {}, "has no type in its header event"),
        ({"type_field": "kind"}, {}, {"kind": VALUE}, "another type in its field kind"),
        ({"type_field": "kind"}, {}, {"kind": 7}, "has no type in its field kind"),
        ({"type_field": "kind"}, {}, [], "has no type in its field kind"),
        ({"type_field": "kind"}, {}, None, "has no type in its field kind"),
        ({"type_field": "kind"}, {}, b"{", "cannot be read"),
    ],
    ids=["unknown", "none", "unknown field", "number", "list", "tombstone", "no JSON"],
)
def test_a_record_of_an_unknown_type_stops_its_partition_and_is_reported(
    make, bootstrap_servers, topic, read_offsets, wait_for, place, headers, value, says
):
    name = topic(2)
    app = make()

    @app.consumer(name, group=f"{name}-g", type="placed", **place)
    def place_order(record, conn) -> None: ...

    good = {"kind": "placed"}
    known = {"event": "placed"}
    produce(bootstrap_servers, name, [(key_of(0, 2), good)], headers=known)
    produce(bootstrap_servers, name, [(key_of(0, 2), value)], headers=headers)
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: failed, timeout=30, what="it is reported")
        produce(bootstrap_servers, name, [(key_of(1, 2), good)] * 3, headers=known)
        wait_for(
            lambda: read_offsets(name) == {0: 1, 1: 3},
            timeout=30,
            what="the other partition goes on",
        )
    assert {fields["offset"] for _, fields in failed} == {1}
    assert says in failed[0][1]["error"]
    assert VALUE not in failed[0][1]["error"]
    if "has" in says:
        assert "handles 'placed': declare a consumer for it" in failed[0][1]["error"]


@pytest.mark.guarantee("S7")
def test_a_record_of_an_unknown_type_goes_to_the_handler_of_all_others(
    make, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    app = make()
    found: list[tuple[str, int | None]] = []

    @app.consumer(name, group=f"{name}-g", type="placed", type_field="kind")
    def place_order(record, conn) -> None:
        found.append(("placed", record.value["n"]))

    @app.consumer(name, group=f"{name}-g", type_field="kind")
    def take_others(record, conn) -> None:
        found.append(("other", record.value and record.value["n"]))

    values = [{"kind": "placed", "n": 0}, {"kind": "sent", "n": 1}, {"n": 2}, None]
    produce(bootstrap_servers, name, [("k", value) for value in values])
    with running(app, "consumers"):
        wait_for(lambda: len(found) == 4, timeout=30, what="all are handled")
    assert found == [("placed", 0), ("other", 1), ("other", 2), ("other", None)]


@pytest.mark.guarantee("S7")
def test_the_type_may_stand_in_a_field_of_an_avro_value(
    make, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    app = make(schema_registry_url=f"mock://{uuid.uuid4()}")
    schema = {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "kind", "type": "string"}, {"name": "n", "type": "int"}],
    }
    found: list[tuple[str, int]] = []

    def declare(kind: str) -> None:
        @app.consumer(
            name, group=f"{name}-g", type=kind, type_field="kind", schema="registered"
        )
        def handle(record, conn) -> None:
            found.append((kind, record.value["n"]))

    declare("placed")
    declare("sent")
    states = app.topic(name, value=dict[str, Any], schema=schema)
    register_schemas(app)
    values = [{"kind": "sent", "n": 1}, {"kind": "placed", "n": 2}]
    produce(bootstrap_servers, name, [("k", states.encode(one)) for one in values])
    with running(app, "consumers"):
        wait_for(lambda: len(found) == 2, timeout=30, what="all are handled")
    assert found == [("sent", 1), ("placed", 2)]


@pytest.mark.parametrize(
    ("key_type", "keys"),
    [
        (int, [7, -3]),
        (bytes, [b"\xff\x00", b"k"]),
        (UUID, [UUID(int=7), UUID(int=8)]),
    ],
)
def test_a_handler_gets_keys_of_the_declared_type_and_a_misfit_stops_its_partition(
    make, bootstrap_servers, topic, read_offsets, wait_for, key_type, keys
):
    name = topic(1)
    app = make()
    found: list[Any] = []

    @app.consumer(name, group=f"{name}-g", key_type=key_type)
    def handle(record, conn) -> None:
        found.append(record.key)

    misfit = b"no such key \xff"
    producer = make_producer(bootstrap_servers)
    for key in [*keys, None, misfit]:
        text = key if isinstance(key, bytes | None) else str(key)
        producer.produce(name, key=text, value=b"1")
    assert producer.flush(30) == 0
    with heard("record.failed") as failed, running(app, "consumers"):
        if key_type is bytes:
            wait_for(lambda: len(found) == 4, timeout=30, what="all are handled")
            assert found == [*keys, None, misfit]
            assert not failed
            return
        wait_for(lambda: failed, timeout=30, what="the misfit is reported")
        wait_for(
            lambda: read_offsets(name) == {0: 3},
            timeout=30,
            what="those before it are in",
        )
    assert found[:3] == [*keys, None]
    assert failed[0][1]["offset"] == 3
    assert "cannot be read: its key is not" in failed[0][1]["error"]
    assert "no such key" not in failed[0][1]["error"]


@pytest.mark.parametrize(
    ("key_type", "column", "key", "expected"),
    [
        (int, "bigint", "7", 7),
        (UUID, "uuid", str(UUID(int=7)), UUID(int=7)),
        (bytes, "bytea", b"\xff", b"\xff"),
    ],
)
def test_a_read_model_has_keys_of_the_declared_type_and_removes_them(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for, key_type, column,
    key, expected,
):  # fmt: skip
    admin.execute(f"create table rows (id {column} primary key, version bigint, n int)")
    name = topic(1)
    app = make()

    @app.read_model(name, table="rows", key="id", group=f"{name}-g", key_type=key_type)
    def row(record) -> dict[str, int]:
        assert type(record.key) is key_type
        return {"n": record.value}

    def send(value: bytes | None, version: int) -> None:
        producer = make_producer(bootstrap_servers)
        headers: dict[str, str | bytes | None] = {"ce_version": str(version)}
        producer.produce(name, key=key, value=value, headers=headers)
        assert producer.flush(30) == 0

    send(b"1", 1)
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 1}, timeout=30, what="it is in")
        assert admin.execute("select id, n from rows").fetchall() == [(expected, 1)]
        send(None, 3)
        # Older than the end of the key.
        send(b"2", 2)
        wait_for(lambda: read_offsets(name) == {0: 3}, timeout=30, what="all is in")
    assert admin.execute("select id, n from rows").fetchall() == []


@pytest.mark.guarantee("W46")
def test_a_topic_and_group_of_another_system_are_called_as_they_are(
    make, admin, database_url, kafka_admin, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    app = make(environment="dev", environments=["dev", "prod"])
    migrate(database_url, settings=app.settings)
    found: list[tuple[str, int]] = []

    @app.consumer(Exact(name), group=Exact(f"{name}-theirs"))
    def handle(record, conn) -> None:
        found.append((record.topic, record.value))

    produce(bootstrap_servers, name, [("k", 1)])
    with running(app, "consumers"):
        wait_for(lambda: found == [(name, 1)], timeout=30, what="it is read")
        groups = kafka_admin.list_consumer_groups().result().valid
    named = {one.group_id for one in groups if name in one.group_id}
    assert named == {f"{name}-theirs"}


@pytest.mark.parametrize("kind", ["handler", "on_change"])
def test_a_connection_that_a_handler_has_changed_goes_on_as_it_was(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for, monkeypatch, kind
):
    # Another thread would go on with a connection of its own.
    monkeypatch.setitem(Consumer.__init__.__kwdefaults__, "threads", 1)
    name = topic(1)
    app = make(heartbeat_interval=0.2)
    rows: list[Any] = []

    def change(given, conn) -> None:
        conn.row_factory = dict_row
        conn.cursor_factory = ClientCursor
        rows.append(conn.execute("select 1 as n").fetchone())

    if kind == "handler":
        app.consumer(name, group=name)(change)
    else:
        admin.execute("create table state_rm (id text primary key, version bigint)")
        app.read_model(name, group=name, table="state_rm", key="id", on_change=change)(
            lambda record: {}
        )

    produce(bootstrap_servers, name, [("k", {})])
    with heard("offset.moved") as moved, running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 1}, timeout=30, what="it is handled")
        # The offset is read by the same connection.
        admin.execute("update jobs_lib.offsets set next_offset = 0")
        wait_for(lambda: moved, timeout=30, what="it is read again")
        wait_for(lambda: read_offsets(name) == {0: 1}, timeout=30, what="it goes on")
    assert rows[0] == {"n": 1}
