"""A deployment with a real schema registry."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from confluent_kafka.schema_registry import (
    Schema,
    SchemaRegistryClient,
    SchemaRegistryError,
)

from tests.support.apicurio import Apicurio
from tests.support.apps import count, make_app, running
from tests.support.pages import ROOT

SERVICE = """
import os
from jobs_lib import App

app = App("fleet")
fields = {fields!r}
aircraft = app.topic(
    {topic!r},
    schema={{"type": "record", "name": "Aircraft", "fields": fields}},
    compacted=True,
)
"""
TAIL = {"name": "tail", "type": "string"}
SEATS = {"name": "seats", "type": "int"}
GATE = {"name": "gate", "type": ["null", "string"], "default": None}
NOTE = {"name": "note", "type": "string", "default": ""}


@pytest.fixture(scope="module")
def apicurio():
    """A registry that only these tests use; its data are deleted at the end."""
    with Apicurio() as registry:
        yield registry.address


@pytest.fixture
def deploy(apicurio, run_process, tmp_path):
    """A function that registers a release's schemas; returns exit code and output."""

    def deploy(topic: str, *fields: Any) -> tuple[int, str]:
        text = SERVICE.format(topic=topic, fields=[*fields])
        (tmp_path / "fleet.py").write_text(text)
        done = run_process(
            "-m", "jobs_lib.cli", "schemas", "register", "fleet:app",
            env={
                "JOBS_LIB_SCHEMA_REGISTRY_URL": apicurio,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
            },
        )  # fmt: skip
        return done.wait(timeout=60), done.output

    return deploy


@pytest.fixture
def client(apicurio):
    """A client of the registry that does not use the library."""
    with SchemaRegistryClient({"url": apicurio, "timeout": 30}) as client:
        yield client


@pytest.mark.slow
@pytest.mark.guarantee("W79", "W80")
def test_a_schema_that_does_not_go_with_every_version_fails_the_deployment(
    deploy, client
):
    topic = "aircraft-state"
    subject = f"{topic}-value"
    # All versions from 2 on would fit either of the two refused schemas.
    optional_seats = {**SEATS, "default": 0}
    assert deploy(topic, TAIL, SEATS)[0] == 0
    assert deploy(topic, TAIL, optional_seats)[0] == 0
    assert deploy(topic, TAIL, optional_seats, GATE)[0] == 0
    assert client.get_compatibility(subject) == "FULL_TRANSITIVE"
    assert client.get_versions(subject) == [1, 2, 3]
    added = {"name": "engines", "type": "int"}
    for fields, field, versions in (
        # Only version 1 requires `seats`.
        ([TAIL, GATE], "seats", {"1"}),
        ([TAIL, optional_seats, GATE, added], "engines", {"1", "2", "3"}),
    ):
        code, output = deploy(topic, *fields)
        assert code == 1, output
        rows = [line.split() for line in output.splitlines() if subject in line]
        assert {row[3] for row in rows} == versions, output
        assert all(field in row for row in rows), output
        # The registry itself refuses a registration that bypasses the command.
        text = json.dumps({"type": "record", "name": "Aircraft", "fields": fields})
        with pytest.raises(SchemaRegistryError) as refused:
            client.register_schema(subject, Schema(text, "AVRO"))
        assert refused.value.http_status_code == 409
    assert client.get_versions(subject) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.guarantee("W40")
def test_a_consumer_works_from_the_real_registry_alone(
    deploy,
    apicurio,
    admin,
    connect,
    topic,
    database_url,
    bootstrap_servers,
    wait_for,
):
    name = topic(1)
    assert deploy(name, TAIL, SEATS, NOTE)[0] == 0
    settings = {
        "kafka_bootstrap_servers": bootstrap_servers,
        "schema_registry_url": apicurio,
    }
    producer = make_app(database_url, **settings)
    fields = [TAIL, SEATS, NOTE]
    schema = {"type": "record", "name": "Aircraft", "fields": fields}
    states = producer.topic(name, schema=schema, compacted=True)
    producer.load_schemas()
    with connect() as connection:
        states.send(connection, key="N1", value={"tail": "N1", "seats": 180})
    with running(producer, "relay"):
        wait_for(lambda: count(admin, "outbox") == 0, timeout=30, what="it is sent")
    consumer, seen = make_app(database_url, **settings), []

    @consumer.consumer(name, group=f"{name}-g", schema="registered")
    def handle(record, connection) -> None:
        seen.append(record.value)

    with running(consumer, "consumers"):
        wait_for(lambda: seen, timeout=30, what="it is read")
    assert seen == [{"tail": "N1", "seats": 180, "note": ""}]
