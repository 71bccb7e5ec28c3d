"""A read model is compared with its source by digests, and accused after two looks."""

from __future__ import annotations

import gzip
from typing import Any
from uuid import UUID

import psycopg
import pytest

from jobs_lib import App, OperatingError, UnavailableError
from jobs_lib.consuming.keys import write_key
from jobs_lib.operating.verification import (
    BUCKETS,
    Difference,
    FileSide,
    TableSide,
    verify,
    write_keys,
)
from jobs_lib.postgres.database import Database

ROWS = 20_000


@pytest.fixture
def source(empty_url, database):
    """The owner's table, in another database."""
    with psycopg.connect(empty_url, autocommit=True) as connection:
        connection.execute("create table items (id int primary key, version bigint)")
        connection.execute(
            "insert into items select n, n %% 7 + 1 from generate_series(1, %s) n",
            (ROWS,),
        )
        yield connection


@pytest.fixture
def source_side(empty_url, source, database):
    """The owner's side."""
    return TableSide.of(Database(empty_url), "items", "id", "version")


@pytest.fixture(params=["row", "side"])
def versions(request):
    """Where the read model has its versions."""
    return request.param


@pytest.fixture
def model(admin, versions):
    """The read model's table, equal to the source."""
    admin.execute("create table item_rm (id int primary key, version bigint)")
    admin.execute(
        "insert into item_rm select n, n %% 7 + 1 from generate_series(1, %s) n",
        (ROWS,),
    )
    if versions == "side":
        admin.execute(
            "insert into jobs_lib.model_keys (model, key, version, is_gone)"
            " select 'item_rm', id::text, version, false from item_rm"
        )
        admin.execute(
            "insert into jobs_lib.model_keys (model, key, version)"
            " values ('item_rm', 'gone', 5)"
        )


@pytest.fixture
def model_side(database, model, versions):
    """The read model's side."""
    app = App("test")

    @app.read_model("items", table="item_rm", key="id", group="g", versions=versions)
    def row(record):
        return {}

    return TableSide.of_model(database, app.consumers[0])


@pytest.fixture
def spoil(admin, source, versions):
    """A function that makes four keys of the model wrong, each in another way."""

    def spoil() -> list[Difference]:
        table, key = ("item_rm", "id::text")
        if versions == "side":
            table, key = ("jobs_lib.model_keys", "key")
        admin.execute(f"delete from {table} where {key} = '5'")
        admin.execute(f"update {table} set version = version - 1 where {key} = '6'")
        admin.execute(f"update {table} set version = version + 1 where {key} = '8'")
        source.execute("delete from items where id = 9")
        return [
            Difference("5", 6, None, "missing"),
            Difference("6", 7, 6, "older"),
            Difference("8", 2, 3, "newer"),
            Difference("9", None, 3, "left over"),
        ]

    return spoil


def test_equal_sides_have_no_difference(source_side, model_side):
    counts = [count for count, _ in source_side.digest().values()]
    assert sum(counts) == ROWS
    assert BUCKETS / 2 < len(counts) <= BUCKETS
    assert verify(source_side, model_side, pause=0) == []


@pytest.mark.parametrize("column", ["uuid", "text"])
def test_uuids_are_equal_however_each_side_writes_them(
    admin, empty_url, database, versions, column
):
    key = UUID(int=7)
    with psycopg.connect(empty_url, autocommit=True) as owner:
        owner.execute("create table items (id uuid, version bigint)")
        owner.execute("insert into items values (%s, 3)", (key,))
    written = write_key(key, UUID)  # as the consumer does
    admin.execute(f"create table item_rm (id {column} primary key, version bigint)")
    admin.execute("insert into item_rm values (%s, 3)", (written,))
    admin.execute(
        "insert into jobs_lib.model_keys (model, key, version, is_gone)"
        " values ('item_rm', %s, 3, false)",
        (written,),
    )
    app = App("test")

    @app.read_model(
        "items",
        table="item_rm",
        key="id",
        group="g",
        key_type=UUID,
        versions=versions,
    )
    def row(record):
        return {}

    source = TableSide.of(Database(empty_url), "items", "id", "version")
    model = TableSide.of_model(database, app.consumers[0])
    assert verify(source, model, pause=0) == []
    admin.execute("delete from item_rm")
    admin.execute("delete from jobs_lib.model_keys")
    wanted = [Difference(str(key), 3, None, "missing")]
    assert verify(source, model, pause=0) == wanted


def test_each_key_that_differs_is_named(source_side, model_side, spoil):
    wanted = spoil()
    assert verify(source_side, model_side, pause=0) == wanted


def test_few_buckets_are_opened(source_side, model_side, spoil):
    spoil()
    opened: list[Any] = []
    read = source_side.open

    def note(buckets):
        opened.extend(buckets)
        return read(buckets)

    source_side.open = note
    verify(source_side, model_side, pause=0)
    assert 1 <= len(set(opened)) <= 4


def test_a_change_that_is_on_its_way_is_no_difference(source, source_side, model_side):
    source.execute("update items set version = 9 where id = 5")
    read, looks = model_side.digest, []

    def digest():
        looks.append(1)
        if len(looks) == 2:
            source.execute("update items set version = 6 where id = 5")
        return read()

    model_side.digest = digest
    assert verify(source_side, model_side, pause=0) == []
    assert len(looks) == 2


def test_a_file_of_the_source_serves_as_well(source_side, model_side, spoil, tmp_path):
    wanted = spoil()
    file = tmp_path / "keys.gz"
    assert write_keys(source_side, file) == ROWS - 1
    assert verify(FileSide(file), model_side, pause=0) == wanted


@pytest.mark.parametrize("versions", ["row"], indirect=True)
def test_a_key_without_a_version_is_there_on_either_side(
    admin, source, source_side, model_side
):
    admin.execute("update item_rm set version = null where id in (5, 6)")
    source.execute("delete from items where id = 5")
    source.execute("update items set version = null where id in (7, 8)")
    admin.execute("delete from item_rm where id = 8")
    assert verify(source_side, model_side, pause=0) == [
        Difference("5", None, None, "left over"),
        Difference("6", 7, None, "older"),
        Difference("7", None, 1, "newer"),
        Difference("8", None, None, "missing"),
    ]


@pytest.mark.parametrize("versions", ["row"], indirect=True)
@pytest.mark.parametrize(
    ("view", "told"),
    [
        (
            "select nullif(id, 9) as id, version from items where id in (9, 10)",
            "^1 rows have NULL as their",
        ),
        ("select * from items union all select 2, 3", "rows have the same key"),
    ],
    ids=["NULL", "several rows"],
)
def test_a_view_whose_column_is_no_key_is_refused(
    empty_url, source, model_side, tmp_path, view, told
):
    source.execute(f"create view seen as {view}")
    side = TableSide.of(Database(empty_url), "seen", "id", "version")
    with pytest.raises(OperatingError, match=f"{told}.*--table"):
        verify(side, model_side, pause=0)
    with pytest.raises(OperatingError, match=f"{told}.*--table"):
        write_keys(side, tmp_path / "keys.gz")
    # As a release before this one has written it.
    file = tmp_path / "old.gz"
    with gzip.open(file, "wt") as lines:
        lines.write('{"format": "jobs_lib keys 1"}\n[null, 3, 0, [[null, 1]]]\n')
    with pytest.raises(OperatingError, match="3 rows have NULL"):
        verify(FileSide(file), model_side, pause=0)


def test_what_cannot_be_compared_is_refused(empty_url, source, model_side, tmp_path):
    for table, key in (("nothing", "id"), ("items", "nothing")):
        side = TableSide.of(Database(empty_url), table, key, "version")
        with pytest.raises(OperatingError, match=r"does not exist.*--table"):
            verify(side, model_side)
    nowhere = Database("postgresql://u:s3cret@127.0.0.1:1/x")
    away = TableSide.of(nowhere, "items", "id", "version")
    with pytest.raises(UnavailableError) as failed:
        verify(away, model_side)
    assert "s3cret" not in str(failed.value)
    file = tmp_path / "other"
    file.write_text("no keys")
    with pytest.raises(OperatingError, match="is no file of"):
        FileSide(file)
