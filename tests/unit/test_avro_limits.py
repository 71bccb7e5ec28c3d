"""A few bytes of Avro cannot ask for more than a process can hold."""

from __future__ import annotations

import json
import uuid
from decimal import Decimal
from io import BytesIO
from typing import Any

import fastavro
import pytest

from jobs_lib import App, PayloadError
from jobs_lib.schemas.avro import parse_schema
from jobs_lib.schemas.avro_limits import (
    MOST_DECIMAL,
    MOST_EMPTY,
    LimitError,
    check_limits,
)
from jobs_lib.schemas.codec import make_decoder
from jobs_lib.schemas.json_limits import MOST_LEVELS
from jobs_lib.settings import load_settings
from tests.unit.test_avro import FIELDS, FLIGHT, record

NULLS = {"type": "array", "items": "null"}
TREE = record("Tree", kids={"type": "array", "items": "Tree"})
CHAIN = record("Chain", next=["null", "Chain"])
PRICE = record(price=FIELDS["price"])
EMPTY = [
    "null",
    {"type": "null"},
    record("Empty"),
    {"type": "fixed", "name": "None", "size": 0},
    record("Nulls", a="null", b=record("Inner", c="null")),
]


@pytest.fixture
def app():
    """An app with a registry in this process only."""
    url = f"mock://{uuid.uuid4()}"
    return App("test", settings=load_settings(schema_registry_url=url))


@pytest.fixture
def read(app):
    """A function that reads bytes by a schema, as a consumer does."""

    def read(schema: Any, data: bytes, value: Any = Any) -> Any:
        topic = app.topic(f"t{uuid.uuid4()}", value=dict[str, Any], schema=schema)
        topic.encoder.load()
        prefix = topic.encoder._prefix
        return make_decoder(topic.name, value, "registered", app.registry).decode(
            prefix + data
        )

    return read


def number(value: int) -> bytes:
    stream = BytesIO()
    fastavro.schemaless_writer(stream, "long", value)
    return stream.getvalue()


@pytest.mark.guarantee("FK12")
@pytest.mark.parametrize("items", EMPTY, ids=str)
@pytest.mark.parametrize(
    "blocks",
    [
        number(MOST_EMPTY + 1),
        number(10**8),
        number(2**62),
        number(-(10**8)) + number(0),
        number(5) * (MOST_EMPTY // 5 + 1),
    ],
    ids=["one-more", "many", "endless", "with-its-size", "in-small-blocks"],
)
def test_items_without_bytes_are_limited(read, items, blocks):
    schema = record(many={"type": "array", "items": items})
    with pytest.raises(ValueError, match=r"many: it has more than the 10000 items"):
        read(schema, blocks + b"\0")


def test_all_lists_of_a_value_share_the_limit(read):
    schema = record(rows={"type": "array", "items": {"type": "map", "values": NULLS}})
    row = number(1) + number(1) + b"k" + number(100) + b"\0\0"
    full = number(MOST_EMPTY // 100)
    assert len(read(schema, full + row * 100 + b"\0")["rows"]) == 100
    with pytest.raises(ValueError, match="rows: it has more than"):
        read(schema, full + row * 100 + number(1) + row + b"\0")


def test_an_array_of_as_many_empty_items_as_the_limit_is_read(read):
    value = read(record(many=NULLS), number(MOST_EMPTY) + b"\0")
    assert value == {"many": [None] * MOST_EMPTY}


@pytest.mark.guarantee("FK12")
def test_a_type_inside_itself_is_read_to_the_depth_of_json(read):
    def chain(levels: int) -> bytes:
        return number(1) * (levels - 1) + number(0)

    def tree(levels: int) -> bytes:
        return number(1) * (levels // 2 - 1) + b"\0" * (levels // 2)

    for schema, make in ((CHAIN, chain), (TREE, tree)):
        read(schema, make(MOST_LEVELS))
        # At the depth of the last case, fastavro would end the process.
        for levels in (MOST_LEVELS + 2, 1_000, 1_000_000):
            with pytest.raises(ValueError, match="more than the 200 levels"):
                read(schema, make(levels))


def test_a_type_that_never_ends_is_refused_at_its_first_value(read):
    with pytest.raises(ValueError, match="more than the 200 levels"):
        read(record("Endless", next="Endless"), b"")


@pytest.mark.guarantee("FK12")
def test_a_decimal_of_endless_digits_is_refused(read):
    def price(size: int) -> bytes:
        return number(size) + b"\x11" * size

    assert read(PRICE, price(2)) == {"price": Decimal("43.69")}
    read(PRICE, price(MOST_DECIMAL))
    for size in (MOST_DECIMAL + 1, 1_000_000):
        with pytest.raises(ValueError, match=f"price: it is a decimal of {size} bytes"):
            read(PRICE, price(size))


def test_a_value_that_no_consumer_could_read_is_not_sent(app):
    def make(levels: int) -> dict[str, Any]:
        value: dict[str, Any] = {"next": None}
        for _ in range(levels - 1):
            value = {"next": value}
        return value

    chains = app.topic("chains", value=dict[str, Any], schema=CHAIN)
    chains.encode(make(MOST_LEVELS))
    with pytest.raises(PayloadError, match="more than the 200 levels"):
        chains.encode(make(MOST_LEVELS + 1))
    nulls = app.topic("nulls", value=dict[str, Any], schema=record(many=NULLS))
    with pytest.raises(PayloadError, match="more than the 10000 items"):
        nulls.encode({"many": [None] * (MOST_EMPTY + 1)})


def test_the_check_goes_over_each_kind_of_field_as_fastavro_does(app):
    data = app.topic("flights", value=type(FLIGHT), schema=record(**FIELDS)).encode(
        FLIGHT
    )[5:]
    schema = parse_schema(json.dumps(record(**FIELDS)))
    check_limits(data, 0, schema.parsed, schema.named)
    for end in range(len(data)):
        with pytest.raises(LimitError, match="ends too early"):
            check_limits(data[:end], 0, schema.parsed, schema.named)


@pytest.mark.parametrize(
    ("schema", "threshold"),
    [
        (record(many=NULLS), 0),
        (CHAIN, 0),
        (TREE, 0),
        (PRICE, MOST_DECIMAL),
        (record("All", a=PRICE, b=record("B", many=NULLS)), 0),
        (record(a=record("A", n="null"), b="A", c="string"), None),
        (record(a={"type": "array", "items": ["null", "int"]}), None),
        (record(a={"type": "map", "values": "null"}), None),
    ],
    ids=str,
)
def test_only_schemas_that_can_exceed_a_limit_are_checked(schema, threshold):
    assert parse_schema(json.dumps(schema)).threshold == threshold
