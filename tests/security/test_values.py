"""No value of a record or payload stands in an error, a log, an event or a table."""

from __future__ import annotations

import importlib
import json
import logging
import pkgutil
import re
import traceback
import uuid
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import jobs_lib
from jobs_lib import App, PayloadError, exponential, masking, operating, telemetry
from jobs_lib.cli.main import main
from jobs_lib.errors import JobsError, StoredPayloadError
from jobs_lib.jobs.payload import Payload
from jobs_lib.schemas.codec import JsonCodec, make_decoder
from jobs_lib.settings import load_settings
from jobs_lib.telemetry.logs import TextFormatter
from tests.support.apps import make_app, running
from tests.support.canary import VALUE, watching_events
from tests.support.records import produce

SCHEMA = {
    "type": "record",
    "name": "Person",
    "fields": [
        {"name": "name", "type": "string"},
        {"name": "age", "type": ["null", "int"], "default": None},
        {
            "name": "state",
            "type": {"type": "enum", "name": "State", "symbols": ["NEW"]},
            "default": "NEW",
        },
        {
            "name": "born",
            "type": ["null", {"type": "int", "logicalType": "date"}],
            "default": None,
        },
        {
            "name": "counts",
            "type": {"type": "map", "values": "long"},
            "default": {},
        },
    ],
}


class Known(Enum):
    ONE = "one"


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Unprintable(ValueError):
    def __str__(self) -> str:
        raise KeyError(VALUE)


def refuse_loudly(value: str) -> str:
    raise ValueError(f"{value} is none of ours")


def look_up(value: str) -> str:
    known: dict[str, str] = {}
    return known[value]


def mistype(value: str) -> str:
    raise TypeError(f"cannot use {value} as utf-8")


def refuse_without_a_text(value: str) -> str:
    raise Unprintable


@dataclass
class Person:
    name: str = "x"
    age: int = 0
    known: Known = Known.ONE
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    counts: dict[str, int] = field(default_factory=dict)
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None
    checked: Annotated[str, AfterValidator(refuse_loudly)] | None = None
    both: int | list[int] = 0
    looked: Annotated[str, AfterValidator(look_up)] | None = None
    typed: Annotated[str, AfterValidator(mistype)] | None = None
    silent: Annotated[str, AfterValidator(refuse_without_a_text)] | None = None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: int


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"age": VALUE}, "age: input should be a valid integer"),
    ({"known": VALUE}, "known: input should be 'one'"),
    ({"id": VALUE}, "id: input should be a valid UUID"),
    ({"counts": {VALUE: "x"}}, r"counts\.\*: input should be a valid integer"),
    ({"counts": {"a": VALUE}}, "counts.*valid integer"),
    ({"pet": {"kind": VALUE}}, "pet: its tag is none"),
    ({"checked": VALUE}, "checked: a check of its type refuses it"),
    ({"both": VALUE}, "both.*valid integer"),
    ({"age": [VALUE] * 9}, "age: input should be a valid integer"),
    ({"looked": VALUE}, "a check of its type fails with KeyError"),
    ({"typed": VALUE}, "a check of its type fails with TypeError"),
    ({"silent": VALUE}, "a check of its type"),
]


def told(error: BaseException) -> str:
    """All that a log or an error tracker shows of an error."""
    return "".join(traceback.format_exception(error)) + repr(error) + str(error)


@pytest.fixture
def events(caplog):
    """All events of a test that logs at the lowest level."""
    caplog.set_level(logging.DEBUG)
    with watching_events() as found:
        yield found
    assert VALUE not in caplog.text


@pytest.mark.guarantee("FS16")
@pytest.mark.parametrize(("fields", "match"), UNFIT)
def test_json_that_does_not_fit_is_reported_by_place_and_reason(fields, match):
    adapter = TypeAdapter(Person)
    data = TypeAdapter(dict[str, Any]).dump_json(fields)
    for refuse in (
        lambda: JsonCodec(adapter).decode(data),
        lambda: JsonCodec(adapter).encode(fields),
    ):
        with pytest.raises(ValueError, match=match) as refused:
            refuse()
        assert VALUE not in told(refused.value)


@pytest.mark.guarantee("FS16")
@pytest.mark.parametrize(
    "data",
    [
        f'{{"name":"{VALUE}"'.encode(),
        f'{{"name":"{VALUE}}}'.encode(),
        VALUE.encode(),
        f'["{VALUE}"]'.encode(),
        b'{"name":"\xff' + VALUE.encode() + b'"}',
    ],
)
def test_broken_json_is_reported_without_its_text(data):
    with pytest.raises(ValueError, match=r"line 1|valid|object|Person") as refused:
        JsonCodec(TypeAdapter(Person)).decode(data)
    assert VALUE not in told(refused.value)


def test_an_unexpected_field_is_named():
    with pytest.raises(ValueError, match=r"nmae: extra inputs"):
        JsonCodec(TypeAdapter(Strict)).decode(f'{{"nmae": "{VALUE}"}}'.encode())


@pytest.mark.guarantee("FS16")
def test_an_object_made_without_checks_is_refused_without_its_value():
    unchecked = Strict.model_construct(name=VALUE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not of the type that is declared") as refused:
        JsonCodec(TypeAdapter(Strict)).encode(unchecked)
    assert VALUE not in told(refused.value)


@pytest.fixture
def avro() -> App:
    url = f"mock://{uuid.uuid4()}"
    return App("test", settings=load_settings(schema_registry_url=url))


@pytest.mark.guarantee("FS16")
@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"age": VALUE}, "Person.age, of the type str, does not fit null or int"),
        ({"state": VALUE}, "Person.state, of the type str, does not fit State"),
        ({"counts": {VALUE: "x"}}, "Person.*of the type str, does not fit long"),
        ({"born": VALUE}, "does not have the form that its field needs"),
        ({"more": VALUE}, "more fields than the schema.*more"),
        ({"name": {VALUE: 1}}, "Person.name, of the type dict"),
        ({"name": (VALUE, 1)}, "Person.name"),
    ],
)
def test_a_value_that_does_not_fit_its_avro_schema_is_reported_by_its_field(
    avro, fields, match
):
    topic = avro.topic("people", value=dict[str, Any], schema=SCHEMA)
    with pytest.raises(PayloadError, match=match) as refused:
        topic.encode({"name": VALUE} | fields)
    assert VALUE not in told(refused.value)


@pytest.mark.guarantee("FS16")
@pytest.mark.parametrize("check", [look_up, mistype, refuse_without_a_text])
def test_a_failed_check_of_an_avro_value_is_reported_without_the_value(avro, check):
    schema = {**SCHEMA, "fields": SCHEMA["fields"][:1]}
    plain = avro.topic("people", value=dict[str, Any], schema=schema)
    checked = dict[str, Annotated[str, AfterValidator(check)]]
    topic = avro.topic("checked", value=checked, schema=schema)
    decoder = make_decoder("people", checked, schema, avro.registry)
    good = plain.encode({"name": VALUE})
    for refuse in (
        lambda: topic.encode({"name": VALUE}),
        lambda: decoder.decode(good),
    ):
        with pytest.raises((PayloadError, ValueError), match="a check of") as refused:
            refuse()
        assert VALUE not in told(refused.value)


@pytest.mark.guarantee("FS16")
def test_unreadable_avro_is_reported_without_its_bytes(avro):
    topic = avro.topic("people", value=dict[str, Any], schema=SCHEMA)
    good = topic.encode({"name": VALUE, "counts": {VALUE: 1}})
    other: Any = {**SCHEMA, "fields": [{"name": "name", "type": "int"}]}
    for data, value, schema in (
        *((good[:end], dict[str, Any], "registered") for end in range(len(good))),
        (good.replace(b"ada", b"\xff\xff\xff"), dict[str, Any], "registered"),
        (good + VALUE.encode(), dict[str, Any], "registered"),
        (good, dict[str, Any], other),
        (good, Strict, "registered"),
    ):
        decoder = make_decoder("people", value, schema, avro.registry)
        refuse = decoder.prepare if len(data) < 5 else decoder.decode
        with pytest.raises(ValueError, match=r"\w") as refused:
            refuse(data)
        assert VALUE not in told(refused.value)


@pytest.mark.guarantee("FS16")
def test_refused_payloads_are_reported_without_their_values():
    def handler(job, value: Person, more: Any = None) -> None: ...

    payload = Payload("take", handler, {})
    circle: list[Any] = [VALUE]
    circle.append(circle)
    wrong: list[dict[str, Any]] = [
        {"value": VALUE},
        {"value": Person(age=VALUE)},  # type: ignore[arg-type]
        {"value": Person(), "more": {VALUE: {1: VALUE}}},
        {"value": Person(), "more": VALUE + "\0"},
        {"value": Person(), "more": VALUE + "\ud800"},
        {"value": Person(), "more": [VALUE, object()]},
        {"value": Person(), "more": [VALUE, float("nan")]},
        {"value": Person(), "more": [VALUE, 10**4_400]},
        {"value": Person(), "more": VALUE * 100},
        {"value": Person(), "more": circle},
        *({"value": fields} for fields, _ in UNFIT),
    ]
    for values in wrong:
        for encode in (
            lambda values=values: payload.encode(values, 1_000),
            lambda values=values: payload.encode_many([values], 1_000),
        ):
            with pytest.raises(PayloadError) as refused:
                encode()
            assert VALUE not in told(refused.value), values
    with pytest.raises(PayloadError) as refused:
        payload.bind((VALUE, VALUE, VALUE), {})
    assert VALUE not in told(refused.value)


@pytest.mark.guarantee("FS16")
@pytest.mark.parametrize(("fields", "match"), UNFIT)
def test_stored_payloads_that_do_not_fit_are_reported_without_their_values(
    fields, match
):
    def handler(job, value: Person) -> None: ...

    stored = json.dumps({"value": fields})
    with pytest.raises(StoredPayloadError, match=match) as refused:
        Payload("take", handler, {}).decode(stored)
    assert VALUE not in told(refused.value)


@pytest.mark.guarantee("FS16")
def test_keys_and_groups_that_are_refused_are_not_repeated(database, connect):
    app = make_app(database.url)
    people = app.topic("people", value=str)
    wrong: Any = [VALUE]

    @app.job(group="name")
    def greet(job, name: str) -> None: ...

    with connect() as connection:
        for refuse in (
            lambda: people.send(connection, key=VALUE + "\0", value="x"),
            lambda: people.send(connection, key=wrong, value="x"),
            lambda: greet.enqueue(connection, name=VALUE + "\0"),
            lambda: greet.enqueue(connection, name=VALUE * 100),
        ):
            with pytest.raises(PayloadError) as refused:
                refuse()
            assert VALUE not in told(refused.value)


@pytest.mark.guarantee("FS16")
def test_a_job_with_a_misfit_payload_is_shown_without_its_value(
    database, connect, admin, wait_for, events
):
    before, after = make_app(database.url), make_app(database.url)

    @before.job(name="greet")
    def enqueued(job, name: str) -> None: ...

    @after.job(name="greet")
    def run(job, name: int) -> None: ...

    with connect() as connection:
        job = enqueued.enqueue(connection, name=VALUE)
    with running(after, "executor"):
        wait_for(
            lambda: any(event == "jobs.retried" for event, _ in events),
            timeout=30,
            what="the job waits for another release",
        )
    ((_, ran), *_) = [one for one in events if one[0] == "job.ran"]
    assert "name: input should be a valid integer" in ran["error"]
    shown = operating.show_job(database, job)
    assert shown is not None
    assert VALUE not in str(shown.errors)
    assert VALUE not in str(operating.explain(database, job, stale_after=5))


@pytest.mark.guarantee("FS16", "FS11")
def test_a_record_that_cannot_be_handled_is_reported_without_its_value(
    database_url, admin, topic, bootstrap_servers, wait_for, events
):
    admin.execute("create table model (id text primary key, version bigint, n int)")
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    numbers, broken, rows = topic(), topic(), topic()

    @app.consumer(numbers, group=f"{numbers}-g", value=Person)
    def number(record, connection) -> None: ...

    @app.consumer(broken, group=f"{broken}-g", value=Person)
    def text(record, connection) -> None: ...

    @app.read_model(rows, table="model", key="id", group=f"{rows}-g", value=str)
    def row(record):
        return {"n": record.value}

    produce(bootstrap_servers, numbers, [("k", f'{{"age": "{VALUE}"}}'.encode())])
    produce(bootstrap_servers, broken, [("k", f'{{"age": "{VALUE}'.encode())])
    produce(bootstrap_servers, rows, [("k", f'"{VALUE}"'.encode())])
    with running(app, "consumers"):
        wait_for(
            lambda: (
                {f"{one}/0" for one in (numbers, broken, rows)}
                <= {f["origin"] for event, f in events if event == "record.failed"}
            ),
            timeout=40,
            what=lambda: f"each is reported: {events}",
        )
    errors = {f["origin"]: f["error"] for event, f in events if "error" in f}
    assert "age: input should be a valid integer" in errors[f"{numbers}/0"]
    assert "line 1 column" in errors[f"{broken}/0"]
    assert "table model is refused: Invalid" in errors[f"{rows}/0"]


def relaying_app(url: str, bootstrap_servers: str) -> App:
    """Make an app whose relay waits for a busy broker."""
    return make_app(
        url, kafka_bootstrap_servers=bootstrap_servers, session_timeout=60.0
    )


@pytest.mark.guarantee("FS16")
def test_a_held_row_is_reported_without_its_value(
    database_url, connect, topic, bootstrap_servers, wait_for, events
):
    app = relaying_app(database_url, bootstrap_servers)
    people = app.topic(topic(), value=Strict, compacted=True)

    @app.entity(people, source="people", key="id")
    def load(connection, keys: list[str]) -> dict[str, Any]:
        return {key: {"name": VALUE} for key in keys}

    with running(app, "relay"):
        with connect() as connection:
            people.send_current(connection, key="a")
        wait_for(
            lambda: operating.list_holds(app.database()),
            timeout=40,
            what="the row is held",
        )
    (hold,) = operating.list_holds(app.database())
    assert "name: input should be a valid integer" in hold.error


CARRYING = {"payload", "payloads", "headers", "more", "value", "content"}
"""The fields of our objects that hold the values of jobs and records."""


@pytest.mark.guarantee("FS16")
def test_no_object_shows_what_it_carries():
    seen = set()
    for module in pkgutil.walk_packages(jobs_lib.__path__, "jobs_lib."):
        # Users of the test kit want to see the value.
        if module.name.startswith(("jobs_lib.testing", "jobs_lib.schemas.registry")):
            continue
        for one in vars(importlib.import_module(module.name)).values():
            if isinstance(one, type) and is_dataclass(one):
                shown = {f.name for f in fields(one) if f.repr and f.type != "bool"}
                assert shown.isdisjoint(CARRYING), one
                seen.add(one.__name__)
    assert {"Job", "Record", "Draft", "OutboxRecord", "Published"} <= seen


@pytest.mark.guarantee("FS16", "O5")
def test_a_job_is_logged_without_its_headers(database, connect, wait_for, events):
    app = make_app(database.url)

    @app.job()
    def work(job) -> None:
        assert job.headers == {"who": VALUE}
        telemetry.emit("job.stuck", job=job, stack="")

    with connect() as connection:
        work.options(headers={"who": VALUE}).enqueue(connection)
    with running(app, "executor"):
        wait_for(
            lambda: any(event == "job.ran" for event, _ in events),
            timeout=30,
            what="the job has run",
        )
    assert "job.stuck" in {event for event, _ in events}


@pytest.fixture
def people(admin):
    """A table that refuses the value twice: once as a duplicate, once as no number."""
    admin.execute("create table people (email text unique, age int check (age < 200))")
    admin.execute("insert into people values (%s)", (VALUE,))


def insert_again(connection):
    connection.execute("insert into people values (%s)", (VALUE,))


def insert_no_number(connection):
    connection.execute("insert into people (age) values (%s::text::int)", (VALUE,))


def insert_by_literal(connection):
    connection.execute(f"insert into people (age) values ('{VALUE}')")


def name_no_column(connection):
    connection.execute(f"select no_column, '{VALUE}' from people")


def send_an_empty_key(connection):
    connection.execute("select jobs_lib.send('states', '', %s)", (f'"{VALUE}"',))


def insert_by_sqlalchemy(connection):
    engine = create_engine("postgresql+psycopg://", creator=lambda: connection)
    with Session(engine) as session:
        session.execute(text("insert into people values (:email)"), {"email": VALUE})


def validate_a_model(connection):
    Strict.model_validate({"name": VALUE, "more": 1})


def validate_a_mapping(connection):
    TypeAdapter(dict[str, int]).validate_python({VALUE: VALUE})


FOREIGN = [
    (insert_again, 'UniqueViolation: duplicate key .* constraint "people_email_key"$'),
    (insert_no_number, r"InvalidTextRepresentation: the server .* value \(22P02\)$"),
    (insert_by_literal, r"InvalidTextRepresentation: the server .* value \(22P02\)$"),
    (send_an_empty_key, "ParameterValue: a key of the topic states is empty$"),
    (name_no_column, 'UndefinedColumn: column "no_column" does not exist$'),
    (insert_by_sqlalchemy, "IntegrityError: duplicate key value .*people_email_key"),
    (validate_a_model, "ValidationError: Strict: name: input should be a valid int"),
    (validate_a_mapping, r"ValidationError: dict\[str,int\]: \*: input should be"),
]


@pytest.mark.guarantee("FS16")
@pytest.mark.parametrize(("act", "match"), FOREIGN)
def test_an_error_of_the_server_or_of_pydantic_is_logged_without_values(
    act, match, people, connect, caplog
):
    with pytest.raises(Exception) as raised:  # noqa: PT011
        act(connect())
    assert re.search(match, masking.describe(raised.value))
    # Include all errors behind it, also in a group.
    try:
        raise ExceptionGroup("several", [raised.value]) from raised.value
    except ExceptionGroup:
        telemetry.logger.exception("failed")
    assert "several" in caplog.text
    assert VALUE not in caplog.text
    assert VALUE not in masking.describe(raised.value)


@pytest.mark.guarantee("FS16", "FS11")
@pytest.mark.parametrize(("act", "match"), FOREIGN[:1] + FOREIGN[6:7])
def test_an_error_of_a_record_handler_is_reported_without_values(
    act, match, people, database_url, topic, bootstrap_servers, wait_for, events
):
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    name = topic()

    @app.consumer(name, group=f"{name}-g", value=str)
    def handle(record, connection) -> None:
        act(connection)

    produce(bootstrap_servers, name, [("k", f'"{VALUE}"'.encode())])
    with running(app, "consumers"):
        wait_for(
            lambda: [f for event, f in events if event == "record.failed"],
            timeout=40,
            what="the record fails",
        )
    (error, *_) = [f["error"] for event, f in events if event == "record.failed"]
    assert re.search(match, error)


@pytest.mark.guarantee("FS16")
@pytest.mark.parametrize(("act", "match"), FOREIGN)
def test_an_error_of_a_job_handler_is_stored_without_values(
    act, match, people, database, connect, wait_for, events
):
    app = make_app(database.url)

    @app.job(retry=exponential(first=60, cap=60))
    def handle(job, email: str) -> None:
        with job.transaction() as connection:
            act(connection)

    with connect() as connection:
        job = handle.enqueue(connection, email=VALUE)
    with running(app, "executor"):
        wait_for(
            lambda: any(event == "jobs.retried" for event, _ in events),
            timeout=40,
            what="the job has failed",
        )
    shown = operating.show_job(database, job)
    assert shown is not None
    assert shown.errors is not None
    assert re.search(match, shown.errors[-1]["error"])
    assert VALUE not in str(shown.errors)


@pytest.mark.guarantee("FS16")
@pytest.mark.parametrize(("act", "match"), FOREIGN[1:2] + FOREIGN[6:7])
def test_an_error_of_a_loader_is_reported_without_values(
    act,
    match,
    people,
    database_url,
    connect,
    topic,
    bootstrap_servers,
    wait_for,
    events,
):
    app = relaying_app(database_url, bootstrap_servers)
    sent = app.topic(topic(), value=Strict, compacted=True)

    @app.entity(sent, source="people", key="id")
    def load(connection, keys: list[str]) -> dict[str, Any]:
        act(connection)
        return {}

    with running(app, "relay"):
        with connect() as connection:
            sent.send_current(connection, key="a")
        wait_for(
            lambda: operating.list_holds(app.database()),
            timeout=40,
            what="the row is held",
        )
    (hold,) = operating.list_holds(app.database())
    assert re.search(match, hold.error)
    assert VALUE not in hold.error


@pytest.mark.guarantee("FS16", "FS2")
@pytest.mark.parametrize("kind", [JobsError, ValueError])
def test_an_error_cannot_forge_a_line_of_a_commands_output(kind, capsys, monkeypatch):
    forged = "x\n2026-01-01 CRITICAL root forged\r\x85\u2028\x1b[2J"

    def fail(**options: Any) -> None:
        raise kind(forged)

    monkeypatch.setattr("jobs_lib.cli.main.cli", fail)
    with pytest.raises(SystemExit):
        main()
    first, *more = capsys.readouterr().err.splitlines()
    assert first.strip().startswith(("error: x", "Traceback"))
    assert more
    assert all(line.startswith("    ") and line.isprintable() for line in more)


@pytest.mark.guarantee("FS16", "FS2")
def test_a_text_cannot_forge_a_line_of_the_log(caplog, monkeypatch):
    monkeypatch.setattr(masking, "_secrets", set())
    monkeypatch.setattr(masking, "_pattern", None)
    masking.keep_secret({"hunter2-canary"})
    forged = 'x"\n2026-01-01 CRITICAL root forged\r\x85\u2028\x1b[2Jhunter2-canary'

    def fail(event: str, fields: dict[str, Any]) -> None:
        raise ValueError(forged)

    telemetry.emit("record.failed", group="g", origin="t/1", offset=5, error=forged)
    stop = telemetry.listen(fail)
    telemetry.emit("jobs.claimed", count=1)
    stop()
    telemetry.logger.error("stopped: %s", forged)
    for record in caplog.records:
        lines = logging.Formatter().format(record).splitlines()
        assert all(line.startswith("    ") for line in lines[1:])
        assert "hunter2" not in str(lines)
    # Our own commands write in this way what other libraries log.
    try:
        raise ValueError(forged)
    except ValueError as error:
        failure = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", 40, "x", 1, "it: %s", (forged,), failure)
    lines = TextFormatter("%(levelname)s %(message)s").format(record).splitlines()
    assert all(line.startswith("    ") for line in lines[1:])
    assert "hunter2" not in str(lines)


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FS2")
@pytest.mark.expects("loop.failed")
def test_events_carry_errors_as_text_without_secrets(monkeypatch):
    monkeypatch.setattr(masking, "_secrets", set())
    monkeypatch.setattr(masking, "_pattern", None)
    masking.keep_secret({"hunter2-canary"})
    try:
        raise RuntimeError("it is hunter2-canary") from ValueError("hunter2-canary")
    except RuntimeError as error:
        with watching_events() as events:
            telemetry.emit("loop.failed", loop="x", error=error)
    ((_, fields),) = events
    assert fields["error"] == "RuntimeError: it is ***"
