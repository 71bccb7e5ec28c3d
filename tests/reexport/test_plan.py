"""Ranges cover each key exactly once, for every kind of key."""

from __future__ import annotations

import random
import uuid

import pytest
from psycopg import sql

from jobs_lib.errors import ReexportError
from jobs_lib.reexport import SqlEngine, begin, load, plan_ranges
from jobs_lib.reexport.plan import make_ranges, range_size
from tests.reexport.helpers import loaded_keys, make_entity, make_table, query


def covering(ranges, key):
    """The ranges that contain a key, in Python's order."""
    return [
        number
        for number, piece in enumerate(ranges)
        if (piece.lower is None or piece.lower <= key)
        and (piece.upper is None or key < piece.upper)
    ]


@pytest.mark.parametrize("seed", range(50))
def test_every_key_is_in_exactly_one_range(seed):
    rng = random.Random(seed)
    keys = [str(rng.randint(0, rng.choice([3, 50, 10**6]))) for _ in range(200)]
    distinct = sorted(set(keys))
    size = range_size(len(distinct), rng.choice([None, 1, 7, 500]))
    ranges = make_ranges(distinct[size::size], len(distinct))
    for key in [*keys, "", "~", rng.choice(keys) + "0"]:
        assert len(covering(ranges, key)) == 1
    assert sum(piece.keys for piece in ranges) == len(distinct)


def test_equal_cuts_make_one_range():
    assert [p.lower for p in make_ranges(["a", "a", "b"], 3)] == [None, "a", "b"]


SKEWED = [1, *range(10**9, 10**9 + 999), 2**62]
KEYS = {
    "integer": ("bigint", [-5, 9, 10, 100, *range(1_000, 1_900)]),
    "skewed": ("bigint", SKEWED),
    "repeated": ("int", [n for n in range(300) for _ in range(1 + n % 7 * 3)]),
    "one heavy key": ("text", ["hot"] * 5_000 + [f"k{n}" for n in range(20)]),
    "uuid": ("uuid", [uuid.UUID(int=(n * 2**91 + n) % 2**128) for n in range(500)]),
    "text": ("text", [f"{c}'\\\t\n{n}ä€😀\"" for n in range(100) for c in "aB_z"]),
    "address": ("inet", [f"10.{n % 3}.{n}.{255 - n}" for n in range(200)]),
    "bytes": ("bytea", [f"\\x{n * 7919:08x}" for n in range(200)]),
    "span": ("interval", [f"{n * 37} minutes" for n in range(200)]),
    "numeric": ("numeric", [f"{n}.{n % 10}" for n in range(-200, 200)]),
    "time": ("timestamptz", [f"2026-03-29 0{n % 10}:00+0{n % 5}" for n in range(50)]),
    "blank text": ("text", [" "]),
    "none": ("bigint", []),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("ranges", [1, 7, None])
def test_ranges_of_a_table_hold_each_key_once(database, kind, ranges):
    type_, keys = KEYS[kind]
    make_table(database, keys, type_)
    begun = begin(database, make_entity(), rate=1_000, ranges=ranges, chunk=7)
    progress = load(database, begun, SqlEngine())
    with database.connect("test") as connection:
        connection.execute("set timezone = 'UTC'")
        expected = connection.execute(
            "select distinct tail::text from aircraft"
        ).fetchall()
    assert loaded_keys(database) == sorted(key for (key,) in expected)
    assert progress.loaded == progress.total == len(expected)
    if ranges == 7 and len(expected) > 100:
        sizes = [
            n for (n,) in query(database, "select keys from jobs_lib.reexport_ranges")
        ]
        assert max(sizes) <= 2 * min(sizes)


@pytest.mark.parametrize("percent_from", [1, 10**9])
def test_a_sample_is_as_good_as_all_keys(database, percent_from):
    make_table(database, range(20_000), "int")
    with database.connect("test") as connection:
        plan = plan_ranges(
            connection, database.queries, make_entity(), 8, sampled_from=percent_from
        )
    assert len(plan.ranges) in (8, 9)
    assert plan.total == 20_000


def test_a_plan_reads_a_table_in_another_schema_with_odd_names(database):
    with database.connect("test") as connection:
        connection.execute('create schema "My ""app"')
        connection.execute('create table "My ""app"."T{x}" ("Key no" int primary key)')
        connection.execute('insert into "My ""app"."T{x}" values (1), (2)')
        entity = make_entity('My "app.T{x}', "Key no")
        plan = plan_ranges(connection, database.queries, entity)
    assert plan.total == 2
    assert plan.source.unique
    assert not plan.source.nullable


def test_a_row_without_a_key_is_refused(database):
    make_table(database, ["N1", None])
    with pytest.raises(ReexportError, match="have no 'tail'"):
        begin(database, make_entity(), rate=100)


@pytest.mark.parametrize(
    "entity", [make_entity("nowhere"), make_entity(key="nothing"), make_entity("a.b.c")]
)
def test_a_missing_table_or_column_is_named(database, entity):
    make_table(database, ["N1"])
    with pytest.raises(ReexportError, match="no such table or column"):
        begin(database, entity, rate=100)


@pytest.mark.parametrize(
    "values", [{"rate": 0}, {"rate": 10**8}, {"chunk": 0}, {"ranges": 0}]
)
def test_options_out_of_range_are_refused(database, values):
    make_table(database, ["N1"])
    with pytest.raises(ReexportError, match="not "):
        begin(database, make_entity(), **{"rate": 100, **values})


def test_a_unique_key_is_cut_without_a_sort(database):
    make_table(database, range(50_000), "int")
    with database.connect("test") as connection:
        connection.execute("alter table aircraft add primary key (tail)")
        connection.execute("vacuum analyze aircraft")
        plan = plan_ranges(connection, database.queries, make_entity())
        cuts = plan.source.query(database.queries, "source_cuts", size=10)
        shown = connection.execute(sql.SQL("explain ") + cuts).fetchall()
    text = "\n".join(line for (line,) in shown)
    assert "Index Only Scan using aircraft_pkey" in text
