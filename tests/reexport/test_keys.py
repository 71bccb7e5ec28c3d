"""A key of several columns, and of any type, has one text everywhere."""

from __future__ import annotations

from contextlib import suppress
from datetime import date
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from jobs_lib import App, ConfigurationError, capture_changes, join_key, split_key
from jobs_lib.errors import PayloadError, ReexportError
from jobs_lib.operating.where_facts import read_source
from jobs_lib.reexport import SqlEngine, begin, cancel, load, plan_ranges
from tests.reexport.helpers import loaded_keys, make_entity, query

KEY = ("carrier", "number")
FLIGHTS = make_entity("flights", KEY, "flights")
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8
) | st.sampled_from(['"', "\\", "\t", "a,b", "['", "\u2028", "\x1f\x7f", "%s", "\\N"])


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=60))
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_key_of_two_texts_is_written_by_python_as_by_the_server(database, pairs):
    rows = query(
        database,
        "select json_build_array(a, b)::text"
        " from unnest(%s::text[], %s::text[]) with ordinality as k(a, b, n) order by n",
        *map(list, zip(*pairs, strict=True)),
    )
    assert [join_key(*pair) for pair in pairs] == [key for (key,) in rows]
    assert [split_key(key, 2) for (key,) in rows] == pairs


CARRIERS = ["UA", "ua", "é", 'a"b', "a,b", "\\", "a\tb", "a"]


def test_a_key_of_one_column_is_its_text():
    assert join_key('["a", "b"]') == '["a", "b"]'
    assert split_key('["a", "b"]', 1) == ('["a", "b"]',)
    number = UUID(int=5)
    assert join_key("UA", 1545, number) == f'["UA", "1545", "{number}"]'


@pytest.mark.parametrize("parts", [(), (True, "a"), (1.5, 2), (date.today(), 1)])
def test_parts_whose_text_python_does_not_know_are_refused(parts):
    with pytest.raises(PayloadError, match=r"a key has at least|give its text as"):
        join_key(*parts)


@pytest.mark.parametrize(
    "key", ["UA", '["UA"]', '["UA", 1]', '["a", "b", "c"]', "[" * 100_000]
)
def test_a_text_that_is_no_key_of_so_many_columns_is_refused(key):
    with pytest.raises(PayloadError, match="texts of 2 columns"):
        split_key(key, 2)


@pytest.mark.parametrize("key", [(), ("a", "a"), ("a", ""), None, ("a", 1), ""])
def test_columns_that_make_no_key_are_refused_when_they_are_declared(admin, key):
    app = App("test")
    states = app.topic("states", compacted=True)
    with pytest.raises(ConfigurationError, match=r"key of .* is"):
        app.entity(states, source="flights", key=key)
    with pytest.raises(ConfigurationError, match=r"key of .* is"):
        capture_changes(admin, "flights", topic="states", key=key)


def make_flights(database, types, rows, *, indexed=True):
    """Make the table anew, with these rows."""
    first, second = types
    with database.connect("test") as connection:
        connection.execute("drop table if exists flights")
        connection.execute(f"create table flights (carrier {first}, number {second})")
        with connection.cursor() as cursor:
            insert = "insert into flights values (%s, %s) on conflict do nothing"
            if indexed:
                connection.execute(
                    "alter table flights add primary key (carrier, number)"
                )
            with connection.pipeline():
                cursor.executemany(insert, rows)
        connection.execute("analyze flights")


def texts_of(database):
    """The key of each row, sorted; a key of two rows is here once."""
    with database.connect("test") as connection:
        connection.execute("set timezone = 'UTC'")
        rows = connection.execute(
            'select distinct json_build_array(carrier::text, "number"::text)::text'
            ' collate "C" from flights'
        )
        return sorted(key for (key,) in rows.fetchall())


def reload(database, entity, ranges):
    """Re-export alone; return the keys, and the ranges of the plan."""
    query(database, "with gone as (delete from jobs_lib.jobs) select 1")
    begun = begin(database, entity, rate=1_000, ranges=ranges, chunk=7)
    progress = load(database, begun, SqlEngine())
    sizes = query(
        database,
        "select keys from jobs_lib.reexport_ranges where reexport_id = %s",
        begun.id,
    )
    if not progress.ended:
        cancel(database, entity.name)
    return loaded_keys(database), [keys for (keys,) in sizes]


def collations(database):
    """What this server sorts texts by, among them one that ignores case if it can."""
    with database.connect("test") as connection:
        # The PostgreSQL of the tests' own wheel is built without ICU.
        with suppress(psycopg.errors.FeatureNotSupported):
            connection.execute(
                "create collation if not exists mixed_case (provider = icu,"
                " locale = 'und-u-ks-level2', deterministic = false)"
            )
        found = connection.execute(
            "select quote_ident(collname) from pg_collation where collencoding in (-1,"
            " pg_char_to_encoding('UTF8')) and collname in ('C', 'C.utf8',"
            " 'en_US.utf8', 'de_DE.utf8', 'pg_c_utf8', 'und-x-icu', 'mixed_case')"
            " order by 1"
        )
        return [name for (name,) in found.fetchall()]


@pytest.mark.guarantee("X2")
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(CARRIERS), TEXTS),
        max_size=80,
    ),
    ranges=st.sampled_from([1, 2, 7, 40]),
    place=st.integers(0, 20),
    indexed=st.booleans(),
)
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_ranges_hold_each_key_of_two_texts_once(database, rows, ranges, place, indexed):
    names = collations(database)
    collation = names[place % len(names)]
    types = (f"text collate {collation}", f"text collate {collation}")
    make_flights(database, types, rows, indexed=indexed)
    loaded, _ = reload(database, FLIGHTS, ranges)
    assert loaded == texts_of(database)


DAYS = [f"2026-{month:02}-{day:02}" for month in range(1, 13) for day in range(1, 26)]
PAIRS: dict[str, tuple[Any, list[Any]]] = {
    "number and time": (
        ("bigint", "timestamptz"),
        [(n % 7 * 10**9, f"{day} 01:30+0{n % 5}") for n, day in enumerate(DAYS)],
    ),
    "one heavy column": (("text", "int"), [("hot", n) for n in range(900)]),
    "uuid and numeric": (
        ("uuid", "numeric"),
        [(UUID(int=n % 9 * 2**120), f"{n}.{n % 10}0") for n in range(300)],
    ),
    "day and bytes": (("date", "bytea"), [(d, b"\\\0\n") for d in DAYS]),
    "enum and pair": (
        ("color", "pair"),
        [("red" if n % 3 else "blue", f'({n},"x, {n}")') for n in range(300)],
    ),
    "padded and flag": (
        ("char(6)", "boolean"),
        [(f"a{n}", n % 2 == 0) for n in range(300)],
    ),
    "float and span": (
        ("float8", "interval"),
        [(n * 1e15, f"{n * 37} minutes") for n in range(300)],
    ),
}


@pytest.fixture
def types(admin):
    """An enum and a composite type."""
    admin.execute(
        "create type color as enum ('red', 'blue');"
        " create type pair as (n int, name text)"
    )


@pytest.mark.guarantee("X2")
@pytest.mark.parametrize("kind", PAIRS)
def test_ranges_hold_each_key_of_two_columns_once(database, types, kind):
    kinds, rows = PAIRS[kind]
    make_flights(database, kinds, rows)
    loaded, sizes = reload(database, FLIGHTS, 7)
    assert loaded == texts_of(database)
    assert len(loaded) == len(rows)
    assert len(sizes) == 7
    assert max(sizes) <= 2 * min(sizes)


@pytest.mark.guarantee("X2")
def test_a_sample_cuts_keys_of_two_columns(database):
    make_flights(database, ("text", "int"), [(f"c{n % 5}", n) for n in range(5_000)])
    with database.connect("test") as connection:
        plan = plan_ranges(connection, database.queries, FLIGHTS, 8, sampled_from=1_000)
    assert len(plan.ranges) in (8, 9)
    assert {plan.source.unique, plan.source.nullable} == {True, False}


CAPTURED: dict[str, tuple[Any, Any, Any]] = {
    **{kind: (kinds, rows[0], KEY) for kind, (kinds, rows) in PAIRS.items()},
    "time alone": (("timestamptz", "int"), ("2026-03-29 01:30+03", 1), "carrier"),
    "padded alone": (("char(6)", "int"), ("ab", 1), "carrier"),
    "float alone": (("float8", "int"), (1e15, 1), "carrier"),
    "pair alone": (("pair", "int"), ("(1,x)", 1), "carrier"),
    "array alone": (("int[]", "int"), ([1, 2], 1), "carrier"),
    "bytes alone": (("bytea", "int"), (b"\0\1", 1), "carrier"),
    "number alone": (("bigint", "int"), (10**15, 1), "carrier"),
    "odd text": (("text", "text"), ('a"\\,\t', "é\n"), KEY),
}


@pytest.mark.guarantee("X2")
@pytest.mark.parametrize("kind", CAPTURED)
def test_a_trigger_writes_the_key_that_a_reexport_writes(database, types, admin, kind):
    kinds, row, key = CAPTURED[kind]
    make_flights(database, kinds, [])
    capture_changes(admin, "flights", topic="states", key=key)
    # Whatever the session that changes the table has set.
    admin.execute(
        "set timezone = 'Asia/Tokyo'; set datestyle = 'German'; set intervalstyle ="
        " 'iso_8601'; set bytea_output = 'escape'; set extra_float_digits = -5"
    )
    admin.execute("insert into flights values (%s, %s)", row)
    admin.execute("update flights set carrier = carrier")
    admin.execute("delete from flights")
    sent = admin.execute("select key from jobs_lib.outbox order by id").fetchall()
    with database.connect("test") as connection:
        connection.execute("drop trigger jobs_lib_capture on flights")
        connection.execute("insert into flights values (%s, %s)", row)
    loaded, _ = reload(database, make_entity("flights", key, "flights"), None)
    assert [one for (one,) in sent] == loaded * 3
    # As `jobs-lib where` finds it.
    app_entity = make_entity("flights", key, "flights")
    with database.connect("test") as connection:
        connection.execute("set timezone = 'UTC'")
        assert read_source(connection, database, app_entity, loaded[0]).is_there


def test_a_change_of_one_column_of_the_key_is_refused(admin):
    admin.execute("create table flights (carrier text, number int, seats int)")
    capture_changes(admin, "flights", topic="states", key=KEY)
    admin.execute("insert into flights values ('UA', 1, 2)")
    admin.execute("update flights set seats = 3")
    with pytest.raises(Exception, match="the key carrier, number of "):
        admin.execute("update flights set number = 2")
    with pytest.raises(Exception, match="lacks its key"):
        admin.execute("insert into flights values ('UA', null, 2)")


def test_where_finds_no_row_of_a_key_that_is_none_of_the_columns(database):
    make_flights(database, ("text", "int"), [("UA", 1)])
    with database.connect("test") as connection:
        for key in ("UA", '["UA"]', '["UA", "x"]', '["UA", "2"]'):
            assert not read_source(connection, database, FLIGHTS, key).is_there


@pytest.mark.parametrize("row", [("UA", None), (None, 1)])
def test_a_row_that_lacks_a_part_of_its_key_is_refused(database, row):
    make_flights(database, ("text", "int"), [("UA", 1), row], indexed=False)
    with pytest.raises(ReexportError, match="have no 'carrier or number'"):
        begin(database, FLIGHTS, rate=100)


@pytest.mark.parametrize("type_", ["json", "point", "xid"])
def test_a_key_that_cannot_be_sorted_is_refused(database, type_):
    make_flights(database, ("text", type_), [], indexed=False)
    with pytest.raises(ReexportError, match=f"types text, {type_}, and PostgreSQL"):
        begin(database, FLIGHTS, rate=100)
    assert query(database, "select count(*) from jobs_lib.reexports") == [(0,)]


def test_a_missing_column_of_several_is_named(database):
    make_flights(database, ("text", "int"), [])
    with pytest.raises(ReexportError, match="key column 'flown'"):
        begin(database, make_entity("flights", ("carrier", "flown")), rate=100)


@pytest.mark.parametrize(
    ("index", "unique"),
    [
        ("unique index on flights (number, carrier)", True),
        ("unique index on flights (carrier)", True),
        ("unique index on flights (carrier) include (seats)", True),
        ("unique index on flights (carrier, number, seats)", False),
        ("unique index on flights (carrier, number) where number > 1", False),
        ("unique index on flights (carrier, lower(number::text))", False),
        ("index on flights (carrier, number)", False),
    ],
)
def test_an_index_that_keeps_the_key_unique_is_found(database, index, unique):
    with database.connect("test") as connection:
        connection.execute("create table flights (carrier text, number int, seats int)")
        connection.execute(f"create {index}")
        plan = plan_ranges(connection, database.queries, FLIGHTS)
    assert plan.source.unique == unique


def test_columns_with_odd_names_are_read(database):
    with database.connect("test") as connection:
        connection.execute('create table flights (rank int, "50%s {x}" int)')
        connection.execute(
            "insert into flights select n % 9, n from generate_series(1, 90) n"
        )
    loaded, sizes = reload(
        database, make_entity("flights", ("rank", "50%s {x}"), "flights"), 4
    )
    assert loaded == sorted(join_key(n % 9, n) for n in range(1, 91))
    assert len(sizes) == 4


def most_rows(plan):
    """The most rows that one step of a plan has read."""
    mine = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
    return max(mine, *map(most_rows, plan.get("Plans", [])), 0)


@pytest.mark.parametrize("key", [KEY, "carrier"])
def test_a_range_is_read_by_the_index(database, key):
    make_flights(database, ("text", "int"), [])
    entity = make_entity("flights", key, "flights")
    with database.connect("test") as connection:
        connection.execute(
            "insert into flights select 'c' || lpad(n::text, 5, '0'), n"
            " from generate_series(1, 20000) n"
        )
        connection.execute("vacuum analyze flights")
        plan = plan_ranges(connection, database.queries, entity, 40)
        piece = plan.ranges[20]
        read = plan.source.keys_between(database.queries, piece.lower, piece.upper)
        explained = connection.execute(
            sql.SQL("explain (analyze, format json) ") + read
        ).fetchone()
    assert explained is not None
    assert 0 < most_rows(explained[0][0]["Plan"]) <= 2 * piece.keys
