"""A reader sees its own write before its record is in the read model, and after."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from psycopg.rows import dict_row

from jobs_lib import EntityState
from jobs_lib.consuming.answer_steps import ModelVersion
from tests.support.apps import count, make_app, running
from tests.support.records import make_producer, read_topic

PATIENCE = 30.0
"""Seconds: a wait for what comes."""
LARGEST: dict[Any, Any] = {
    str: "ü'\"\\ {}%s",
    int: 2**31,
    UUID: UUID("0123abcd-0000-0000-0000-00000000000f"),
    bytes: b"\0\\'\xff",
}
COLUMNS: dict[Any, str] = {str: "text", int: "bigint", UUID: "uuid", bytes: "bytea"}


def produce(bootstrap_servers, topic, key, version, value):
    """Produce a record; return its partition and offset."""
    producer, places = make_producer(bootstrap_servers), []
    producer.produce(
        topic,
        key=key if isinstance(key, bytes) else str(key),
        value=None if value is None else json.dumps(value),
        headers={"ce_version": str(version)},
        on_delivery=lambda error, sent: places.append(
            (sent.partition(), sent.offset())
        ),
    )
    assert producer.flush(30) == 0
    return places[0]


@pytest.mark.guarantee("W73", "W74")
def test_a_returned_entity_is_in_the_answers_of_all_pods_until_its_record_is(
    admin, connect, database_url, bootstrap_servers, topic, gate
):
    name = topic(1, config={"cleanup.policy": "compact"})
    admin.execute(
        "create table aircraft_rm (tail text primary key, version bigint, airport text)"
    )
    held = threading.Event()

    def make_pod():
        app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
        states = app.topic(name, value=dict, compacted=True)

        @app.read_model(name, table="aircraft_rm", key="tail", group="g")
        def aircraft_rm(record):
            if record.version == 2:
                held.set()
                gate.wait(4 * PATIENCE)
            return {"airport": record.value["airport"]}

        return app, states, app.answers(aircraft_rm)

    def update(tail: str, version: int, airport: str) -> dict[str, Any]:
        """What the API of the owner does and returns."""
        entity = {"airport": airport}
        with owner.transaction() as conn:
            states.send(conn, key=tail, value=entity, version=version)
        return {"key": tail, "version": version, "entity": entity}

    owner, states, _ = make_pod()
    writer, _, its_aircraft = make_pod()
    reader, _, aircraft = make_pod()
    conn = connect(autocommit=True, row_factory=dict_row)

    def search(airport):
        newer = aircraft.newer(reader)
        found = conn.execute(
            "select tail, version from aircraft_rm where airport = %s", (airport,)
        ).fetchall()
        merged = aircraft.merge(
            found, newer, belongs=lambda row: row.get("airport", airport) == airport
        )
        return [(row["tail"], row["version"]) for row in merged]

    with running(owner, "consumers", "relay"):
        before = datetime.now(UTC) - timedelta(seconds=1)
        update("N1", 1, "JFK")
        first = aircraft.wait_for(reader, key="N1", version=1, timeout=PATIENCE)
        assert first == ModelVersion(1, is_gone=False)
        assert search("JFK") == [("N1", 1)]
        # The consumer stands still at the next record.
        returned = update("N1", 2, "LAX")
        assert its_aircraft.put(writer, **returned)
        assert held.wait(PATIENCE)
        assert search("JFK") == []
        assert search("LAX") == [("N1", 2)]
        valid_since = aircraft.valid_since(reader, key="N1")
        written = [one.at for one in read_topic(bootstrap_servers, name)]
        assert valid_since.at.timestamp() == pytest.approx(written[0], abs=0.001)
        assert before < valid_since.at <= datetime.now(UTC)
        assert aircraft.wait_for(reader, key="N1", version=2, timeout=0.05) is None
        gate.set()
        second = aircraft.wait_for(reader, key="N1", version=2, timeout=PATIENCE)
        assert second == ModelVersion(2, is_gone=False)
        assert aircraft.newer(reader) == []
        assert (search("JFK"), search("LAX")) == ([], [("N1", 2)])
    assert its_aircraft.put(writer, key="N2", version=1, entity={})
    assert count(admin, "answers") == 1
    for app in (owner, writer, reader):
        app.close()


@pytest.mark.guarantee("W74")
@pytest.mark.parametrize("key_type", LARGEST, ids=lambda one: one.__name__)
def test_a_key_of_every_type_is_found_as_the_consumer_has_written_it(
    admin, database_url, bootstrap_servers, topic, key_type
):
    name = topic(2)
    key, column = LARGEST[key_type], COLUMNS[key_type]
    for table in ("row_rm", "side_rm", "head_rm", "line_rm"):
        unique = "" if table == "line_rm" else "primary key"
        admin.execute(
            f"create table {table} (id {column} {unique}, version bigint, n int)"
        )
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    models: list[dict[str, Any]] = [
        {"table": "row_rm", "key": "id"},
        {"table": "side_rm", "key": "id", "versions": "side"},
        {"tables": {"head_rm": "id", "line_rm": "id"}},
    ]
    for n, model in enumerate(models):

        @app.read_model(name, group=f"g{n}", key_type=key_type, **model)
        def rows(record, model=model):
            row = {"n": record.value}
            return {"head_rm": row, "line_rm": [row, row]} if "tables" in model else row

    asked = [app.answers(table) for table in ("row_rm", "side_rm", "head_rm")]
    with running(app, "consumers"):
        for answers in asked:
            assert answers.put(app, key=key, version=5, entity={"n": 5})
            assert answers.newer(app) == [EntityState(key, 5, {"n": 5})]
        partition, offset = produce(bootstrap_servers, name, key, 5, 5)
        for answers in asked:
            found = answers.wait_for(app, key=key, version=4, timeout=PATIENCE)
            assert found == ModelVersion(5, is_gone=False)
            assert answers.newer(app) == []
            assert answers.newer(app, given=[EntityState(key, 5, {})]) == []
            given = [EntityState(key, 6, None)]
            assert answers.newer(app, given=given) == given
            place = answers.valid_since(app, key=key).offsets
            assert place == {partition: offset + 1}
        produce(bootstrap_servers, name, key, 6, None)
        for answers in asked:
            found = answers.wait_for(app, key=key, version=6, timeout=PATIENCE)
            assert found == ModelVersion(6, is_gone=True)
    app.close()
