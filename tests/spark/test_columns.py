"""Keys in columns make the same chunk jobs as keys one after the other."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs_lib.errors import ReexportError
from jobs_lib.reexport import begin, load_range
from jobs_lib.reexport.loading import KeyList, Loading
from spark_bridge.columns import KeyColumn
from tests.reexport.helpers import loaded_keys, make_entity, make_table, query

ODD = [
    *('"', "\\", "\\N", "a\tb\r\n", "\x01\x1f\x7f", "ä€😀", "\u2028", '\\"', "'", "/"),
    *("x" * 1_000, "é" * 500, " ", "[]", "{x}", "%s"),
]
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
) | st.sampled_from(ODD)


def make_loading(chunk: int, partitions: int) -> Loading:
    now = datetime.now(UTC)
    return Loading(7, now, None, chunk, "t", partitions)


def lines_of(keys, loading: Loading, due: datetime | None = None) -> list[bytes]:
    text = b"".join(map(bytes, keys.encode(loading, due)))
    return sorted(text.splitlines(keepends=True))


@given(
    st.lists(TEXTS, max_size=50),
    st.integers(1, 9),
    st.sampled_from([1, 3, 100]),
    st.sampled_from([None, datetime(2026, 1, 2, 3, 4, 5, 678, UTC)]),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_their_lines_are_those_of_single_keys(keys, chunk, partitions, due):
    loading = make_loading(chunk, partitions)
    column = KeyColumn(pa.array(keys, pa.large_string()))
    assert lines_of(column, loading, due) == lines_of(KeyList(keys), loading, due)


def test_a_part_of_an_array_is_written_alone():
    keys = ["before", *ODD, "behind"]
    part = pa.array(keys, pa.large_string())[1:-1]
    loading = make_loading(2, 5)
    assert lines_of(KeyColumn(part), loading) == lines_of(KeyList(ODD), loading)


def test_many_keys_make_many_blocks():
    rng = random.Random(3)
    keys = [f"{rng.random()}" * rng.randint(1, 9) for _ in range(30_000)]
    loading = make_loading(100, 16)
    column = KeyColumn(pa.array(keys, pa.large_string()))
    assert len([*column.encode(loading)]) > 1
    assert lines_of(column, loading) == lines_of(KeyList(keys), loading)


@pytest.mark.parametrize("unique", [True, False])
def test_they_are_read_from_a_table_and_loaded(database, unique):
    keys = [*ODD[:10], *(f"N{n}" for n in range(500))]
    make_table(database, keys if unique else keys * 2)
    if unique:
        with database.connect("test") as connection:
            connection.execute("alter table aircraft add primary key (tail)")
    begun = begin(database, make_entity(), rate=100, ranges=3, chunk=7)
    with database.connect("test") as connection:
        loaded = [
            load_range(
                connection, database.queries, begun.loading, number, KeyColumn.read
            )
            for number in range(3)
        ]
    assert sum(keys or 0 for keys in loaded) == len(keys)
    assert loaded_keys(database) == sorted(keys)


def test_a_range_without_keys_is_loaded(database):
    make_table(database, [])
    begun = begin(database, make_entity(), rate=100)
    with database.connect("test") as connection:
        queries = database.queries
        assert load_range(connection, queries, begun.loading, 0, KeyColumn.read) == 0


@pytest.mark.parametrize(
    ("key", "told"), [("é" * 501, "501 characters is too long"), ("", "a key is empty")]
)
def test_a_key_that_no_record_may_have_is_refused(database, key, told):
    make_table(database, ["short", key])
    begun = begin(database, make_entity(), rate=100, ranges=1)
    with (
        database.connect("test") as connection,
        pytest.raises(ReexportError, match=told),
    ):
        load_range(connection, database.queries, begun.loading, 0, KeyColumn.read)
    assert query(database, "select count(*) from jobs_lib.jobs") == [(0,)]
