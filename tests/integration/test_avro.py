"""Avro values sent in the caller's transaction."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass

import psycopg
import pytest

from jobs_lib import App, PayloadError
from jobs_lib.errors import ConfigurationError, UnavailableError
from jobs_lib.operating.schemas import register_schemas
from jobs_lib.schemas.avro import parse_schema
from jobs_lib.schemas.registry import Registry
from jobs_lib.service.service import Service
from tests.support.apps import heard, make_app, running
from tests.support.registry import serving

SCHEMA = {
    "type": "record",
    "name": "Aircraft",
    "fields": [{"name": "tail", "type": "string"}, {"name": "seats", "type": "int"}],
}


@dataclass
class Aircraft:
    tail: str
    seats: int


@pytest.fixture
def registry():
    """A registry that compares nothing."""
    with serving() as registry:
        yield registry


@pytest.fixture
def app(database_url, registry):
    """An app with a registry."""
    return make_app(
        database_url,
        schema_registry_url=registry.url,
        schema_registry={"max.retries": 0},
    )


@pytest.fixture
def states(app):
    """A topic of Avro values."""
    return app.topic("states", value=Aircraft, schema=SCHEMA, compacted=True)


def test_a_value_that_does_not_fit_leaves_the_transaction_as_it_was(
    app, states, admin, connect
):
    register_schemas(app)
    with connect() as connection:
        states.send(connection, key="a", value=Aircraft("a", 1))
        for value in (Aircraft("a", 2**31), {"tail": "a"}, None, b"\0\0\0\0\1\2a\2"):
            with pytest.raises(PayloadError, match="does not fit the topic 'states'"):
                states.send(connection, key="a", value=value)
        status = connection.info.transaction_status
        assert status == psycopg.pq.TransactionStatus.INTRANS
        states.send(connection, key="b", value=Aircraft("b", 2))
        states.tombstone(connection, key="c")
    rows = admin.execute(
        "select key, value, headers from jobs_lib.outbox order by id"
    ).fetchall()
    label = {"content-type": "application/avro"}
    assert rows == [
        ("a", b"\0\0\0\0\1\2a\2", label),
        ("b", b"\0\0\0\0\1\2b\4", label),
        ("c", None, None),
    ]


def test_send_asks_no_registry_for_a_schema_inside_a_transaction(
    app, states, registry, connect
):
    register_schemas(app)
    app.load_schemas()
    registry.asked.clear()
    registry.status = 503
    with connect() as connection:
        for n in range(3):
            states.send(connection, key="a", value=Aircraft("a", n))
    assert registry.asked == []


def test_a_registry_that_is_away_at_the_first_send_costs_nothing_but_that(
    app, states, registry, admin, connect
):
    register_schemas(app)
    registry.status = 503
    with connect() as connection:
        connection.execute("create table kept (n int)")
        with pytest.raises(UnavailableError, match="schema registry at"):
            states.send(connection, key="a", value=Aircraft("a", 1))
        registry.status = 0
        states.send(connection, key="a", value=Aircraft("a", 1))
    found = admin.execute("select count(*) from jobs_lib.outbox").fetchone()
    assert found == (1,)
    assert admin.execute("select count(*) from kept").fetchone() == (0,)


def test_a_service_whose_schema_is_not_registered_does_not_start(app, states):
    with pytest.raises(ConfigurationError, match="jobs-lib schemas register"):
        Service(app, ["executor"]).start()


def test_a_service_waits_for_a_registry_that_is_still_starting(
    app, states, registry, wait_for
):
    register_schemas(app)
    registry.status = 503
    app.job(name="work")(lambda job: None)
    with heard("loop.failed") as failed:

        def come_up() -> None:
            wait_for(lambda: failed, what="the service has noticed")
            registry.status = 0

        starter = threading.Thread(target=come_up)
        starter.start()
        with running(app, "executor") as service:
            starter.join()
            assert service.is_ready


@pytest.mark.parametrize(
    "ask",
    [
        lambda asked, schema: asked.read_schema(7),
        lambda asked, schema: asked.find_id("states-value", schema),
        lambda asked, schema: asked.read_versions("states-value"),
        lambda asked, schema: asked.register("others-value", schema),
        lambda asked, schema: asked.read_level("states-value"),
    ],
    ids=["read", "find", "versions", "register", "level"],
)
@pytest.mark.parametrize("page", [False, True], ids=["json", "page"])
def test_a_404_that_is_not_the_registrys_is_no_answer(
    app, registry, ask, page, monkeypatch
):
    asked, schema = Registry(app.settings), parse_schema(json.dumps(SCHEMA))
    asked.register("states-value", schema)
    registry.status = 404
    if page:
        monkeypatch.setattr(registry, "answer", lambda *_: (404, "nginx"))
    with pytest.raises(UnavailableError, match=r"does not answer \(HTTP 404\)"):
        ask(asked, schema)


def test_a_registry_may_have_no_code_for_what_it_does_not_have(
    app, registry, monkeypatch
):
    # As Apicurio, where no level is set.
    missing = 404, {"error_code": 0, "message": "No rule was found."}
    monkeypatch.setattr(registry, "answer", lambda *_: missing)
    assert Registry(app.settings).read_level("states-value") is None


def test_a_schema_needs_its_extra_only_where_it_is_declared(run_process):
    code = (
        "import sys\n"
        "for name in ('fastavro', 'httpx', 'httpx2', 'authlib'):\n"
        "    sys.modules[name] = None\n"
        "from jobs_lib import App, ConfigurationError\n"
        "app = App('shop')\n"
        "app.topic('events')\n"
        "app.consumer('events', group='g')\n"
        "app.load_schemas()\n"
        "try:\n"
        "    app.topic('states', schema={'type': 'string'})\n"
        "except ConfigurationError as error:\n"
        "    print(error)\n"
    )
    worker = run_process("-c", code)
    assert worker.wait(timeout=60) == 0, worker.output
    assert "pip install 'jobs-lib[avro]'" in worker.output


kit = App("kit")
kit_states = kit.topic("states", value=Aircraft, schema=SCHEMA, compacted=True)


@pytest.fixture
def jobs_app() -> App:
    return kit


def test_the_test_kit_needs_no_registry_and_shows_values(jobs, outbox):
    with jobs.transaction() as conn:
        kit_states.send(conn, key="a", value=Aircraft("a", 1))
    sent = outbox.assert_sent(kit_states, value=Aircraft("a", 1))
    assert sent.value == {"tail": "a", "seats": 1}
    outbox.assert_not_sent("states", value={"tail": "a", "seats": 2})
