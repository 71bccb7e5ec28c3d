"""Avro values: what goes in comes out, and what does not fit is refused."""

from __future__ import annotations

import enum
import socket
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal

import pydantic
import pytest
from pydantic import BaseModel, Field

from jobs_lib import App, ConfigurationError, PayloadError
from jobs_lib.errors import UnavailableError
from jobs_lib.schemas.codec import make_decoder
from jobs_lib.schemas.registry import _DEFAULTS
from jobs_lib.settings import load_settings
from tests.support.registry import serving


class Status(enum.Enum):
    UNKNOWN = "UNKNOWN"
    AIRBORNE = "AIRBORNE"


@dataclass
class Person:
    name: str
    born: date | None = None


@dataclass
class Flight:
    tail: str
    seats: int
    status: Status
    phase: Literal["taxi", "climb"]
    load: float
    late: bool
    seen: datetime
    exact: datetime
    price: Decimal
    id: uuid.UUID
    blob: bytes
    pilot: Person | None = None
    crew: list[Person] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


PERSON = {
    "type": "record",
    "name": "Person",
    "fields": [
        {"name": "name", "type": "string"},
        {"name": "born", "type": ["null", {"type": "int", "logicalType": "date"}]},
    ],
}
MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
MICROS = {"type": "long", "logicalType": "timestamp-micros"}
FIELDS: dict[str, Any] = {
    "tail": "string",
    "seats": "int",
    "status": {
        "type": "enum",
        "name": "Status",
        "symbols": ["UNKNOWN", "AIRBORNE"],
        "default": "UNKNOWN",
    },
    "phase": {"type": "enum", "name": "Phase", "symbols": ["taxi", "climb"]},
    "load": "double",
    "late": "boolean",
    "seen": MILLIS,
    "exact": MICROS,
    "price": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
    "id": {"type": "string", "logicalType": "uuid"},
    "blob": "bytes",
    "pilot": ["null", PERSON],
    "crew": {"type": "array", "items": "Person"},
    "counts": {"type": "map", "values": "long"},
}


def record(name="Flight", /, **fields):
    made = [{"name": one, "type": type_} for one, type_ in fields.items()]
    return {"type": "record", "name": name, "fields": made}


NOON = datetime(2024, 5, 4, 12, 0, 0, 123456, tzinfo=UTC)
FLIGHT = Flight(
    tail="N123",
    seats=180,
    status=Status.AIRBORNE,
    phase="climb",
    load=0.5,
    late=True,
    seen=NOON.replace(microsecond=123000),
    exact=NOON,
    price=Decimal("12.50"),
    id=uuid.UUID(int=7),
    blob=b"\x00\xff",
    pilot=Person("Ada", date(1815, 12, 10)),
    crew=[Person("Grace")],
    counts={"bags": 3},
)


@pytest.fixture
def app():
    """An app with a registry in this process only."""
    url = f"mock://{uuid.uuid4()}"
    return App("test", settings=load_settings(schema_registry_url=url))


def read(app, data, value=Any, schema="registered"):
    decoder = make_decoder("flights", value, schema, app.registry)
    decoder.prepare(data)
    return decoder.decode(data)


def test_each_kind_of_field_comes_back_as_it_was(app):
    flights = app.topic("flights", value=Flight, schema=record(**FIELDS))
    data = flights.encode(FLIGHT)
    assert data[:1] == b"\0"
    assert read(app, data, Flight) == FLIGHT
    # A reader without a class gets plain values, from the registered schema alone.
    plain = read(app, data)
    assert plain["status"] == "AIRBORNE"
    assert plain["crew"] == [{"name": "Grace", "born": None}]
    assert plain["exact"] == NOON


def test_a_field_that_has_its_default_may_be_left_out(app):
    schema = record(tail="string")
    schema["fields"].append({"name": "seats", "type": "int", "default": 9})
    topic = app.topic("flights", value=dict[str, Any], schema=schema)
    assert read(app, topic.encode({"tail": "N1"})) == {"tail": "N1", "seats": 9}


class Aliased(BaseModel):
    tail: str = Field(alias="tailNumber")


def test_fields_are_named_by_their_aliases(app):
    topic = app.topic("flights", value=Aliased, schema=record(tailNumber="string"))
    data = topic.encode(Aliased(tailNumber="N1"))
    assert read(app, data) == {"tailNumber": "N1"}
    assert read(app, data, Aliased).tail == "N1"


@pytest.fixture
def new_york(monkeypatch):
    """Set the time zone of the machine."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    "written",
    [
        datetime(2024, 5, 4, 12),
        datetime(2024, 5, 4, 14, tzinfo=timezone(timedelta(hours=2))),
    ],
)
def test_a_time_means_the_same_on_every_machine(app, new_york, written):
    topic = app.topic("flights", value=dict[str, Any], schema=record(at=MILLIS))
    at = datetime(2024, 5, 4, 12, tzinfo=UTC)
    assert read(app, topic.encode({"at": written})) == {"at": at}


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"tail": "N1"}, "seats"),
        ({"tail": "N1", "seats": 2**31}, "seats"),
        ({"tail": "N1", "seats": True}, "seats"),
        ({"tail": "N1", "seats": 1.5}, "seats"),
        ({"tail": None, "seats": 1}, "tail"),
        ({"tail": "N1", "seats": 1, "more": 1}, "more"),
        ({"tail": "N1", "seats": 1, "status": "LOST"}, "status.*does not fit"),
        ({"tail": "N1", "seats": 1, "price": Decimal("1.234")}, "[Ss]cale"),
        (b"\0\0\0\0\1", "valid dict"),
    ],
)
def test_a_value_that_does_not_fit_the_schema_is_refused(app, value, match):
    schema = record(tail="string", seats="int")
    for name in ("status", "price"):
        schema["fields"].append({"name": name, "type": ["null", FIELDS[name]]})
        schema["fields"][-1]["default"] = None
    topic = app.topic("flights", value=dict[str, Any], schema=schema)
    with pytest.raises(PayloadError, match=match):
        topic.encode(value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: b'{"tail": "N1"}', "does not start with"),
        (lambda data: b"", "does not start with"),
        (lambda data: b"\0\0\0\0\x63" + data[5:], "no schema 99"),
        (lambda data: data[:-1], "does not hold the Avro schema"),
        (lambda data: data + b"\0", "1 bytes follow"),
    ],
)
def test_unreadable_bytes_are_refused_with_the_reason(app, change, match):
    topic = app.topic("flights", value=dict[str, Any], schema=record(tail="string"))
    data = topic.encode({"tail": "N1"})
    with pytest.raises(ValueError, match=match):
        read(app, change(data))


def test_bytes_without_a_schema_stay_as_they_are(app):
    raw = app.topic("raw", value=bytes)
    assert raw.encode(b"\0\xff") == b"\0\xff"
    assert read(app, b"\0\xff", bytes, None) == b"\0\xff"
    assert app.topic("json").encode(b"{}") == b"{}"


def test_a_type_that_can_never_fit_its_schema_is_refused_at_declaration(app):
    schema = record(name="string", age="int")
    with pytest.raises(ConfigurationError, match=r"no field born; the type .* age$"):
        app.topic("people", value=Person, schema=schema)
    schema["fields"][1]["default"] = 0
    with pytest.raises(ConfigurationError, match=r"no field born$"):
        app.topic("people", value=Person, schema=schema)
    # Before there is a value, nothing is known about these.
    for n, value in enumerate((Any, dict[str, Any], Person | None, list[Person])):
        app.topic(f"people-{n}", value=value, schema=schema)


@pytest.mark.skipif(
    pydantic.VERSION.startswith("2.9."), reason="this pydantic wants all names at once"
)
def test_a_type_may_name_one_that_is_defined_later(app, monkeypatch):
    @dataclass
    class Pair:
        name: str
        other: Later  # type: ignore[name-defined]  # noqa: F821

    topic = app.topic("pairs", value=Pair, schema=record(name="string", other="string"))
    monkeypatch.setitem(globals(), "Later", str)
    assert read(app, topic.encode(Pair("a", "b"))) == {"name": "a", "other": "b"}


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ({"type": "nonsense"}, "no Avro schema"),
        ({"type": object}, "no Avro schema"),
        ("flights.avsc", "pathlib.Path"),
    ],
)
def test_a_schema_that_is_none_is_refused_where_it_is_declared(app, schema, match):
    with pytest.raises(ConfigurationError, match=match):
        app.topic("flights", schema=schema)


def test_a_schema_is_read_from_its_file(app, tmp_path):
    path = tmp_path / "flights.avsc"
    with pytest.raises(ConfigurationError, match=r"flights\.avsc.*working folder"):
        app.topic("flights", schema=path)
    path.write_text('{"type": "nonsense"}')
    with pytest.raises(ConfigurationError, match=r"flights\.avsc.*no Avro schema"):
        app.topic("flights", schema=path)
    path.write_text('"string"')
    assert read(app, app.topic("flights", schema=path).encode("x")) == "x"


def test_the_error_without_a_registry_names_the_setting():
    app = App("test", settings=load_settings())
    topic = app.topic("flights", schema=record(tail="string"))
    with pytest.raises(ConfigurationError, match="JOBS_LIB_SCHEMA_REGISTRY_URL"):
        topic.encode({"tail": "N1"})
    with pytest.raises(ConfigurationError, match="JOBS_LIB_SCHEMA_REGISTRY_URL"):
        app.load_schemas()


def test_an_unregistered_schema_is_named_with_the_way_out():
    with serving() as registry:
        settings = load_settings(schema_registry_url=registry.url)
        app = App("test", settings=settings)
        app.topic("flights", schema=record(tail="string"))
        match = r"'flights-value'.*jobs-lib schemas register"
        with pytest.raises(ConfigurationError, match=match):
            app.load_schemas()
        assert not registry.subjects


@pytest.mark.parametrize(
    ("status", "error", "match"),
    [
        (503, UnavailableError, "does not answer"),
        (429, UnavailableError, "does not answer"),
        (401, ConfigurationError, "basic.auth.user.info"),
        (422, ConfigurationError, "not now"),
    ],
)
def test_errors_of_the_registry_are_reported_without_secrets(status, error, match):
    with serving() as registry:
        registry.status = status
        settings = load_settings(
            schema_registry_url=",".join(
                [registry.url.replace("//", "//me:hunter2canary@")] * 2
            ),
        )
        app = App("test", settings=settings)
        topic = app.topic("flights", schema=record(tail="string"))
        with pytest.raises(error, match=match) as raised:
            topic.encode({"tail": "N1"})
    assert "hunter2canary" not in str(raised.value) + repr(settings)


def test_a_registry_that_is_silent_is_given_up(monkeypatch):
    monkeypatch.setitem(_DEFAULTS, "timeout", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = load_settings(schema_registry_url=url)
        app = App("test", settings=settings)
        topic = app.topic("flights", schema=record(tail="string"))
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1.*Timeout"):
            topic.encode({"tail": "N1"})


def test_a_setting_that_the_client_does_not_know_is_named_without_its_value():
    app = App(
        "test",
        settings=load_settings(
            schema_registry_url="http://127.0.0.1:1",
            schema_registry={"basic.auth.user.inf": "me:hunter2canary"},
        ),
    )
    with pytest.raises(ConfigurationError, match=r"basic\.auth\.user\.inf") as raised:
        app.registry()
    assert "hunter2canary" not in str(raised.value)
