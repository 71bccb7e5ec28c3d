"""A record that cannot be sent is refused before any SQL: the transaction lives on."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel, ConfigDict

from jobs_lib import ConfigurationError, PayloadError
from tests.integration.test_callers import WAYS, settle
from tests.support.apps import count, make_app

LONGEST = "k" * 1_000


@dataclasses.dataclass
class Position:
    """A state with numbers that may be NaN."""

    height: float
    speed: float | None = None


class Model(BaseModel):
    """The same state as a model of pydantic."""

    height: float


class Lenient(BaseModel):
    """A model that says by itself how NaN is written."""

    model_config = ConfigDict(ser_json_inf_nan="strings")
    height: float
    speed: float | None = None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a long key": ({"key": LONGEST + "k"}, "1 to 1000 bytes .* [(]1001 characters"),
    "a long key of few characters": ({"key": "ключ" * 126}, "504 characters"),
    "a surrogate in a key": ({"key": "\ud800"}, "1 to 1000 bytes"),
    "NUL in a header": ({"headers": {"h": "a\0b"}}, "without NUL"),
    "NUL in a header's name": ({"headers": {"a\0b": "h"}}, "without NUL"),
    "a surrogate in a header": ({"headers": {"h": "\ud800"}}, "in UTF-8"),
    "a number in a header": (
        {"headers": {"h": 1}},
        "topic 'events' must map str to str.* the value of 'h' is of type int: make it",
    ),
    "a number for a header's name": (
        {"headers": {1: "h"}},
        "must map str to str.* the name of one is of type int: make it a str",
    ),
    "headers in a list": ({"headers": ["h"]}, "must map .* they are of type list"),
    "a version that is no number": (
        {"version": "1"},
        "must be an int of 64 bits .* of the type str: give a number that",
    ),
    "a version below 0": ({"version": -1}, "from 0 on, .* is below 0: give"),
    "a version that is too large": ({"version": 2**63}, "64 bits .* is larger: give"),
    "a large value": (
        {"value": 1_000_000 * "x"},
        r"'events' has 1,001,002 bytes, .* 1,000,000: .*'max\.message\.bytes': '20020",
    ),
    "not a number": ({"value": {"a": [math.nan]}}, r"\*\.0 is NaN"),
}


@pytest.mark.guarantee("S2")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_record_that_is_refused_costs_no_transaction(database_url, way, connect):
    app = make_app(database_url)
    events = app.topic("events")
    good: Any = {"key": LONGEST, "value": 1, "headers": {"h": "é"}, "version": 0}

    async def work():
        async with way(app) as hand:
            for bad, match in REFUSED.values():
                with pytest.raises(PayloadError, match=match):
                    await settle(events.send(hand.caller, **{**good, **bad}))
            await settle(events.send(hand.caller, **good))

    asyncio.run(work())
    app.close()
    found = connect().execute("select key, version from jobs_lib.outbox").fetchall()
    assert found == [(LONGEST, 0)]


@pytest.mark.guarantee("S2")
@pytest.mark.parametrize("call", ["tombstone", "send_current"])
def test_an_end_or_an_id_that_is_refused_costs_no_transaction(
    database_url, call, connect
):
    app = make_app(database_url)
    states = app.topic("states", value=Position, compacted=True)
    app.entity(states, source="states", key="id")(lambda connection, keys: {})
    write = getattr(states, call)
    good: dict[str, Any] = {"key": LONGEST, "version": 2**63 - 1}
    refused = [given for given in REFUSED.values() if {*given[0]} <= {*good}]
    refused += [({"key": key}, "1 to 1000 bytes") for key in ("", "a\0b", 1)]
    refused += [({"key": None}, "every record needs a key")]
    refused += [({"version": one}, "64 bits") for one in (-(2**63) - 1, 1.0, True)]
    assert len(refused) == 13
    with connect() as connection:
        for bad, match in refused:
            with pytest.raises(PayloadError, match=match):
                write(connection, **{**good, **bad})
        write(connection, **good)
    app.close()
    found = connect().execute("select key, version from jobs_lib.outbox").fetchall()
    assert found == [(LONGEST, 2**63 - 1)]


@pytest.mark.guarantee("U4")
@pytest.mark.parametrize(
    ("config", "kafka", "largest"),
    [
        ({}, {}, 1_000_000),
        ({"max.message.bytes": "2000"}, {}, 2_000),
        ({}, {"message.max.bytes": "3000"}, 3_000),
        ({"max.message.bytes": "5000000"}, {"message.max.bytes": "3000"}, 5_000_000),
    ],
    ids=["by default", "declared", "by the client's setting", "declared before both"],
)
def test_a_record_may_be_as_large_as_its_topic_is_known_to_take(
    database_url, connect, config, kafka, largest
):
    app = make_app(database_url, kafka=kafka)
    topic = app.topic("events", value=bytes, config=config)
    fitting = b"x" * (largest - 1)
    with connect() as connection:
        topic.send(connection, key="k", value=fitting)
        topic.send_many(connection, [("k", fitting, None)])
        for call in (
            lambda: topic.send(connection, key="k", value=fitting + b"x"),
            lambda: topic.send_many(connection, [("k", fitting + b"x", None)]),
        ):
            with pytest.raises(PayloadError, match=f"may have {largest:,}: send"):
                call()
    app.close()
    found = connect().execute("select length(value) from jobs_lib.outbox").fetchall()
    assert found == 2 * [(len(fitting),)]


def test_a_declared_limit_that_is_no_number_is_refused(database_url):
    with pytest.raises(
        ConfigurationError,
        match=r"'events' .* max\.message\.bytes='2 MB': give a number",
    ):
        make_app(database_url).topic("events", config={"max.message.bytes": "2 MB"})


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (Any, math.nan),
        (Any, {"a": {"b": [1, -math.inf]}}),
        (Any, [Model.model_construct(height=math.nan)]),
        (dict[str, float], {"a": math.inf}),
        (Position, Position(math.nan)),
        (Position, Position(1.0, math.inf)),
        (Model, Model(height=math.nan)),
        (list[Model], [Model(height=1), Model(height=math.inf)]),
    ],
)
def test_a_number_that_json_has_no_form_for_is_refused(database_url, type_, value):
    topic = make_app(database_url).topic("events", value=type_)
    with pytest.raises(PayloadError, match=r"is NaN|is -?Infinity"):
        topic.encode(value)


@pytest.mark.parametrize(
    ("type_", "value", "encoded"),
    [
        (Any, {"NaN": None, "a": "Infinity"}, b'{"NaN":null,"a":"Infinity"}'),
        (Position, Position(1.5), b'{"height":1.5,"speed":null}'),
        (Lenient, Lenient(height=math.inf), b'{"height":"Infinity","speed":null}'),
        (Any, {"a": None, "b": b"\xc3\xa9", "c": Decimal(1)}, None),
        (bytes, b"null \xff", b"null \xff"),
    ],
)
def test_a_value_that_only_looks_like_a_non_finite_number_is_sent(
    database_url, type_, value, encoded
):
    topic = make_app(database_url).topic("events", value=type_)
    assert topic.encode(value) == encoded or encoded is None


@pytest.mark.parametrize(
    "call",
    [
        "send('t', %(key)s, '1')",
        "send('t', %(key)s, null)",
        "send_current('t', %(key)s, 'things')",
    ],
)
def test_sql_refuses_a_long_key_with_the_way_out(admin, call):
    with pytest.raises(
        psycopg.errors.InvalidParameterValue, match="has 1001 bytes, the limit is 1000"
    ) as refused:
        admin.execute(f"select jobs_lib.{call}", {"key": LONGEST + "k"})
    assert refused.value.diag.message_hint == "Give a short stable id, or a digest."
    admin.execute(f"select jobs_lib.{call}", {"key": LONGEST})
    assert count(admin, "outbox") == 1
