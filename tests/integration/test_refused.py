"""A job that cannot be stored is refused before any SQL: the transaction lives on."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest
from pydantic import BaseModel

from jobs_lib import EnqueueError, Item, Job, PayloadError
from tests.support.apps import heard, make_app

BERLIN = ZoneInfo("Europe/Berlin")


class Unknown:
    """A class without a form in JSON."""

    def __repr__(self) -> str:
        return "Unknown()"


class Height(BaseModel):
    """A model in which pydantic writes NaN as null."""

    metres: float


@pytest.fixture
def note(database_url):
    """A job type that takes anything."""
    app = make_app(database_url)

    @app.job(group="group")
    def note(job: Job, group: str | None = None, data: Any = None) -> None: ...

    return note


@pytest.fixture
def refused(connect, note):
    """A function that checks that a call is refused, and that earlier work commits."""
    connection = connect()
    note.enqueue(connection, data="before")

    def check(match, call):
        with pytest.raises(EnqueueError, match=match):
            call(connection)

    yield check
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    note.enqueue(connection, data="after")
    connection.commit()
    kept = connection.execute(
        "select payload from jobs_lib.jobs order by id"
    ).fetchall()
    assert kept == [({"data": "before"},), ({"data": "after"},)]


def refuse_both(refused, note, match, **values):
    refused(match, lambda conn: note.enqueue(conn, **values))
    refused(match, lambda conn: note.enqueue_many(conn, [{"data": 1}, values]))


@pytest.mark.guarantee("J4")
def test_a_call_that_does_not_fit_the_signature_is_refused(refused, note):
    refuse_both(refused, note, "extra", other=1)
    refuse_both(refused, note, "group", group=7)


@pytest.mark.guarantee("FJ5")
@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"at": datetime(2026, 1, 1, tzinfo=UTC)}, "datetime has no JSON form"),
        ({"deep": [{"of": {1, 2}}]}, "set has no JSON form"),
        ([(1, 2)], "tuple has no JSON form"),
        ({1: "x"}, "key of it is of the type int"),
        ({"a": Unknown()}, "Unknown has no JSON form"),
        ({"a": Decimal(1)}, "Decimal has no JSON form|decimal has no JSON form"),
        (math.nan, "NaN"),
        ([math.inf], "0 is Infinity"),
        ({"a": -math.inf}, "is -Infinity"),
    ],
    ids=repr,
)
def test_a_value_without_a_json_form_is_refused(refused, note, data, match):
    refuse_both(refused, note, match, data=data)


@pytest.mark.guarantee("FJ5")
def test_a_nan_inside_a_model_is_refused_with_its_place(database_url, refused):
    app = make_app(database_url)

    @app.job()
    def climb(job: Job, to: Height) -> None: ...

    @app.batch(size=2)
    def climb_together(jobs: list[Item[Height]]) -> None: ...

    for job_type, field in ((climb, "to"), (climb_together, "payload")):
        good, bad = ({field: Height(metres=metres)} for metres in (1, math.nan))
        place = rf"{field}\.metres is NaN"
        refused(place, lambda conn, t=job_type, of=bad: t.enqueue(conn, **of))
        refused(
            place, lambda conn, t=job_type, of=(good, bad): t.enqueue_many(conn, of)
        )


@pytest.mark.guarantee("FJ6", "FJ7")
@pytest.mark.parametrize(
    "data", ["a\0b", {"\0": 1}, "\ud800", {"\udfff": 1}], ids=ascii
)
def test_characters_that_postgresql_does_not_store_are_refused(refused, note, data):
    refuse_both(refused, note, "NUL|no JSON form|surrogate", data=data)
    key = next(iter(data)) if isinstance(data, dict) else data
    refuse_both(refused, note, "NUL|no JSON form", group=key)
    refused("UTF-8", lambda conn: note.options(unique=key))
    refused("UTF-8", lambda conn: note.options(headers={"a": key}))


def test_a_number_of_too_many_digits_is_refused(refused, note):
    refuse_both(refused, note, "5001 digits", data=10**5000)


def test_a_value_that_is_nested_too_deeply_is_refused(refused, note):
    nested: list[Any] = []
    for _ in range(5_000):
        nested = [nested]
    refuse_both(refused, note, "no JSON form", data=nested)


@pytest.mark.guarantee("FJ8")
def test_numbers_come_back_as_the_documentation_says(connect, note):
    with connect() as connection:
        note.enqueue(connection, data={"big": 2**70, "b": 1.10, "a": 1e300})
        row = connection.execute("select payload::text from jobs_lib.jobs").fetchone()
    values = note.payload.decode(row[0])["data"]
    assert values == {"big": 2**70, "b": 1.1, "a": 10**300}
    assert type(values["big"]) is int
    # jsonb sorts keys and drops trailing zeros, so it does not suit signed bytes.
    assert row[0].startswith('{"data": {"a": 1000')
    assert '"b": 1.1,' in row[0]


@pytest.mark.guarantee("FJ9")
@pytest.mark.parametrize("priority", ["urgent", 2**31, -1, 1, None, True], ids=repr)
def test_an_unknown_priority_is_refused(refused, note, priority):
    refused("high, normal, batch", lambda conn: note.options(priority=priority))


@pytest.mark.guarantee("FJ10")
@pytest.mark.parametrize(
    ("run_at", "match"),
    [
        ("infinity", "must be a datetime"),
        (date(2026, 1, 1), "must be a datetime"),
        (datetime(2026, 1, 1), "time zone"),
        (datetime.max.replace(tzinfo=UTC), "2000 to 9999"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))), "2000 to 9999"),
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=5))), "2000 to 9999"),
        (datetime(1970, 1, 1, tzinfo=UTC), "2000 to 9999"),
        (
            datetime(2026, 3, 29, 2, 30, tzinfo=BERLIN),
            "does not exist in Europe/Berlin",
        ),
    ],
    ids=repr,
)
def test_an_impossible_run_time_is_refused(refused, note, run_at, match):
    refused(match, lambda conn: note.options(run_at=run_at))


def test_a_repeated_local_time_means_the_first_unless_its_fold_is_set(connect, note):
    with connect() as connection:
        for fold in (0, 1):
            run_at = datetime(2026, 10, 25, 2, 30, fold=fold, tzinfo=BERLIN)
            note.options(run_at=run_at).enqueue(connection)
        rows = connection.execute(
            "select run_at at time zone 'UTC' from jobs_lib.jobs order by id"
        ).fetchall()
    assert rows == [(datetime(2026, 10, 25, 0, 30),), (datetime(2026, 10, 25, 1, 30),)]


@pytest.mark.guarantee("FJ11")
def test_a_huge_payload_is_refused_and_a_large_one_reported_once(refused, note):
    refuse_both(refused, note, r"JOBS_LIB_PAYLOAD_LIMIT", data="x" * 1_048_576)
    with heard("payload.large") as events:
        note.payload.encode({"data": "x" * 65_000}, 1_048_576)
        assert events == []
        note.payload.encode({"data": "x" * 65_536}, 1_048_576)
        note.payload.encode_many([{"data": "x" * 70_000}], 1_048_576)
    assert events == [("payload.large", {"type": "note", "bytes": 65_547})]


@pytest.mark.guarantee("FJ12")
@pytest.mark.parametrize(
    "group",
    ["", "x" * 1_001, "ü" * 501, "a\0b", 7.5, b"x"],
    ids=lambda group: repr(group)[:8],
)
def test_a_group_that_is_no_short_string_is_refused(database_url, refused, group):
    app = make_app(database_url)

    # The function may return anything for any payload.
    @app.job(group=lambda n: group if n else "fine")
    def free(job: Job, n: int) -> None: ...

    refused("the group of 'free'", lambda conn: free.enqueue(conn, 1))
    refused(
        "the group of 'free'",
        lambda conn: free.enqueue_many(conn, [{"n": 0}, {"n": 1}]),
    )


@pytest.mark.guarantee("FJ12")
def test_groups_keep_their_exact_characters(connect, note):
    groups = [" ", "x ", "X", "x", "\u00e9", "e\u0301", "ü" * 500]
    with connect() as connection:
        for group in groups:
            note.enqueue(connection, group=group)
        rows = connection.execute('select "group" from jobs_lib.jobs order by id')
        assert [row[0] for row in rows] == groups


@pytest.mark.parametrize(
    "headers",
    [{"a": 1}, {1: "a"}, [("a", "b")], "a", {"a": "x" * 8_192}, {"a": None}],
    ids=lambda value: repr(value)[:20],
)
def test_headers_that_are_no_short_strings_are_refused(refused, note, headers):
    refused("headers of 'note'", lambda conn: note.options(headers=headers))


def test_enqueue_refuses_arguments_that_do_not_fit_the_signature(refused, note):
    refuse_both(refused, note, "colour: extra", colour="red")
    refuse_both(refused, note, "group: input should be a valid string", group=7)
    refused("too many", lambda conn: note.enqueue(conn, None, None, 3))
    with pytest.raises(PayloadError, match="takes"):
        note.enqueue(object(), None, None, 3)
