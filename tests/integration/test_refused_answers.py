"""What a read model cannot be asked, or given, is refused with nothing lost."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from jobs_lib import AnswerError, ConfigurationError, EntityState
from tests.support.apps import make_app

NOON = datetime(2026, 11, 24, 12, tzinfo=UTC)


@pytest.fixture
def aircraft(database_url, admin):
    """What a read model answers."""
    admin.execute("create table aircraft_rm (tail text primary key, version bigint)")
    app = make_app(database_url)

    @app.read_model("states", table="aircraft_rm", key="tail", group="g")
    def aircraft_rm(record): ...

    return app.answers(aircraft_rm)


def any_(value: Any) -> Any:
    """The value, of a type that no type checker knows."""
    return value


@pytest.mark.parametrize(
    ("call", "arguments", "told"),
    [
        ("put", {"key": 7}, "the key is of the type int, and .* declared as str"),
        ("put", {"key": ""}, "1 to 2,000 bytes"),
        ("put", {"key": "s3cret\0"}, "without NUL"),
        ("put", {"key": "s3cret\ud800"}, "of UTF-8"),
        ("put", {"key": "s3cret" * 400}, "2,400 characters"),
        ("put", {"version": True}, "an int of 64 bits, and this one is of the type"),
        ("put", {"version": 2**63}, "this one is larger"),
        ("wait_for", {"version": -1}, "0 or more .* this one is below 0: give"),
        ("put", {"entity": ["s3cret"]}, "an entity is of the type list"),
        ("put", {"entity": {"at": NOON}}, "kept as JSON: a datetime has no JSON form"),
        ("put", {"entity": {"n": math.nan}}, "cannot be kept as JSON"),
        ("put", {"entity": {1: "s3cret"}}, "a key of it is of the type int"),
        ("put", {"entity": {"a": "s3cret" * 20_000}}, "has 120,009 bytes as JSON"),
        ("wait_for", {"key": b"s3cret"}, "the key is of the type bytes"),
        ("wait_for", {"version": "17"}, "of the type str"),
        ("wait_for", {"timeout": -1}, "the timeout is -1"),
        ("wait_for", {"timeout": math.inf}, "the timeout is inf"),
        ("wait_for", {"timeout": None}, "the timeout is None"),
        ("valid_since", {"key": 7}, "the key is of the type int"),
        (
            "newer",
            {"given": [("s3cret", 1, {})]},
            "of the type tuple: give Ent",
        ),
        ("newer", {"given": [EntityState(7, 1, {})]}, "the key is of the type int"),
        ("newer", {"given": [EntityState("a", any_(1.0), {})]}, "of the type float"),
        ("newer", {"given": [EntityState("a", 1, any_("s3cret"))]}, "of the type str"),
        ("newer", {"given": [EntityState("a", 1, {})] * 1_001}, "1,001 states"),
    ],
)
def test_what_cannot_be_is_refused_without_values_and_the_transaction_goes_on(
    aircraft, connect, call, arguments, told
):
    good = {
        "put": {"key": "N1", "version": 1, "entity": {}},
        "wait_for": {"key": "N1", "version": 1},
    }
    connection = connect()
    connection.execute("create table kept (id int)")
    with pytest.raises(AnswerError, match=told) as refused:
        getattr(aircraft, call)(connection, **{**good.get(call, {}), **arguments})
    assert "s3cret" not in str(refused.value)
    connection.execute("insert into kept values (1)")


@pytest.mark.parametrize(
    ("column", "bad", "good"),
    [
        ("smallint", "32768", "-32768"),
        ("int", "2147483648", "2147483647"),
        ("bigint", "s3cret", "-9223372036854775808"),
        ("uuid", "s3cret", "00000000-0000-0000-0000-00000000000a"),
        ("uuid", "urn:uuid:00000000-0000-0000-0000-00000000000a", "A" * 32),
    ],
)
def test_a_key_that_the_column_cannot_hold_is_refused_before_it_fails_the_transaction(
    database_url, admin, connect, column, bad, good
):
    admin.execute(f"create table thing_rm (id {column} primary key, version bigint)")
    app = make_app(database_url)
    app.read_model("things", table="thing_rm", key="id", group="g")(lambda record: {})
    things = app.answers("thing_rm")
    connection = connect()
    connection.execute("create table kept (id int)")
    for call in (
        lambda: things.put(connection, key=bad, version=1, entity={}),
        lambda: things.wait_for(connection, key=bad, version=1, timeout=0),
        lambda: things.newer(connection, given=[EntityState(bad, 1, {})]),
    ):
        with pytest.raises(AnswerError, match="cannot be one") as refused:
            call()
        assert "s3cret" not in str(refused.value)
    assert things.put(connection, key=good, version=1, entity={})
    assert things.newer(connection) == [EntityState(good, 1, {})]


def test_a_key_that_no_reader_could_compare_is_never_kept(database_url, admin, connect):
    admin.execute("create table day_rm (day date primary key, version bigint)")
    app = make_app(database_url)
    app.read_model("days", table="day_rm", key="day", group="g")(lambda record: {})
    days = app.answers("day_rm")
    with connect() as connection, pytest.raises(psycopg.DataError):
        days.put(connection, key="someday", version=1, entity={})
    with connect() as connection:
        assert days.put(connection, key="2026-11-24", version=1, entity={})
        assert [state.key for state in days.newer(connection)] == ["2026-11-24"]


def test_a_table_that_is_not_there_is_named(database_url, connect):
    app = make_app(database_url)
    app.read_model("things", table="thing_rm", key="id", group="g")(lambda record: {})
    with connect() as connection:
        with pytest.raises(AnswerError, match="no table thing_rm with a column id"):
            app.answers("thing_rm").newer(connection)
        connection.execute("select 1")


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"key": "number"}, "keys of str in the column 'number'"),
        ({"key": "id", "key_type": int}, "keys of int in the column 'id'"),
        ({"key": "id", "versions": "side"}, "keys of str beside the table"),
    ],
    ids=["column", "type", "place"],
)
def test_versions_of_a_table_with_different_keys_give_no_answers(other, told):
    app = make_app("")

    def first(record): ...
    def second(record): ...

    app.read_model("things", table="thing_rm", key="id", group="g")(first)
    assert app.answers(first)
    app.read_model("things", table="thing_rm", group="g", version=2, **other)(second)
    for asked in (first, second):
        with pytest.raises(
            ConfigurationError,
            match=f"has keys of str in the column 'id' and version 2 has {told}. Give",
        ):
            app.answers(asked)


def test_versions_beside_a_table_give_answers_whatever_its_column_is_called():
    app = make_app("")

    def first(record): ...
    def second(record): ...

    for number, (function, key) in enumerate([(first, "id"), (second, "no")], 1):
        app.read_model(
            "things", table="thing_rm", key=key, group="g", versions="side",
            version=number,
        )(function)  # fmt: skip
    assert app.answers(first)
    assert app.answers(second)


def test_a_read_model_is_named_by_its_function_or_one_of_its_tables():
    app = make_app("")

    def row(record): ...

    for name in ("one_rm", "two_rm"):
        app.read_model(f"{name}-topic", table=name, key="id", group="g")(row)
    tables = {"order_rm": "id", "line_rm": "order_id"}

    @app.read_model("orders", tables=tables, group="g")
    def order(record): ...

    assert app.answers(order)
    assert app.answers("line_rm")
    assert app.answers("two_rm")
    with pytest.raises(ConfigurationError, match="row means several read models"):
        app.answers(row)
    for other in (test_a_table_that_is_not_there_is_named, "three_rm"):
        with pytest.raises(ConfigurationError, match="no read model of this app"):
            app.answers(other)
