"""A re-export whose loader finds no room on the database's disk."""

from __future__ import annotations

import psycopg
import pytest

from jobs_lib import reexport
from jobs_lib.errors import ReexportError
from jobs_lib.reexport import SqlEngine
from jobs_lib.reexport.plan import Range
from jobs_lib.reexport.staging import State, begin_staged, stage_range
from tests.faults.small_disk import SmallDisk
from tests.reexport.helpers import loaded_keys, make_entity, make_table, query

KEYS = [f"N{n:05}" for n in range(20_000)]


@pytest.fixture
def disk(postgres_server, admin):
    """A small disk, for tables of the test's database."""
    with psycopg.connect(postgres_server.url, autocommit=True) as superuser:
        disk = SmallDisk(superuser)
        yield disk
        admin.execute("drop schema jobs_lib cascade")
        disk.close()


def status(database):
    return reexport.status(database, "aircraft")


@pytest.mark.guarantee("FP12", "W32")
def test_a_load_that_finds_no_room_says_so_and_goes_on_once_there_is_some(
    database, admin, disk
):
    make_table(database, KEYS)
    entity = make_entity()

    class Fills(SqlEngine):
        """An engine whose disk is full after the first range."""

        def load(self, database, loading, ranges):
            super().load(database, loading, ranges[:1])
            disk.fill()
            super().load(database, loading, ranges[1:])

    admin.execute("alter table jobs_lib.jobs set tablespace small")
    with pytest.raises(ReexportError, match="disk of the database is full, so the ran"):
        reexport.start(database, entity, rate=6_000, ranges=4, engine=Fills())
    assert 1 <= status(database).loaded_ranges < 4
    assert len(loaded_keys(database)) == status(database).loaded
    disk.empty()
    reexport.start(database, entity, rate=6_000)
    assert loaded_keys(database) == KEYS
    assert (status(database).loaded_ranges, status(database).total) == (4, len(KEYS))


@pytest.mark.guarantee("FP12", "W32")
def test_states_that_find_no_room_are_staged_once_there_is_some(database, admin, disk):
    states = [State(key, 1, b"x" * 100, None) for key in KEYS]
    begun = begin_staged(
        database,
        make_entity(),
        [Range(None, None, len(KEYS))],
        rate=6_000,
        chunk=100,
    )
    staged = f"reexport_states_{begun.id}"
    admin.execute(f"alter table jobs_lib.{staged} set tablespace small")

    def stage() -> int | None:
        with database.connect("test") as connection:
            return stage_range(connection, database.queries, begun.loading, 0, states)

    disk.fill()
    with pytest.raises(ReexportError, match="make room there, and start again"):
        stage()
    assert (status(database).loaded_ranges, loaded_keys(database)) == (0, [])
    disk.empty()
    assert stage() == len(KEYS)
    assert loaded_keys(database) == KEYS
    assert query(database, "select count(*) from jobs_lib.reexport_states") == [
        (len(KEYS),)
    ]
