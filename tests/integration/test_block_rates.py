"""Rows of a block leave as their rates allow at that time, not when it was read."""

from __future__ import annotations

from uuid import UUID

import pytest
from psycopg import IsolationLevel
from psycopg.rows import dict_row

from jobs_lib.outbox import rates
from jobs_lib.outbox.reader import Reader
from tests.support.apps import make_app
from tests.support.outbox.steps import own_shards
from tests.support.reexports import write_reexport

OWNER = UUID(int=7)
ROWS = 20


@pytest.fixture
def reader(database, admin, monkeypatch):
    """The reader of an app with an entity, for the owner of shard 0.

    It asks a rate again at once that allowed too few records.
    """
    monkeypatch.setattr("jobs_lib.outbox.pace._SPENT_SECONDS", 0)
    own_shards(admin, OWNER, [0])
    app = make_app(database.url)
    states = app.topic("items", compacted=True)
    app.entity(states, source="items", key="k")(
        lambda _connection, keys: {key: 1 for key in keys if key != "gone"}
    )
    return Reader(
        database, OWNER, 500, entities=app.entities, topics=app.topics, source="test"
    )


@pytest.fixture
def connection(database):
    """A connection as a relay thread has it."""
    with database.connect("test") as connection:
        connection.isolation_level = IsolationLevel.REPEATABLE_READ
        yield connection


@pytest.fixture
def set_tokens(admin):
    """A function that sets how many records may leave now; time adds none."""
    admin.execute(
        "create function stop_the_clock() returns trigger language plpgsql as $$begin"
        " new.refilled_at := clock_timestamp() + interval '1 hour'; return new; end$$"
    )
    admin.execute(
        "create trigger stop_the_clock before insert or update on jobs_lib.reexports"
        " for each row execute function stop_the_clock()"
    )

    def set_tokens(number: float) -> None:
        admin.execute("update jobs_lib.reexports set tokens = %s", (number,))

    return set_tokens


def keys_of(block) -> list[str | None]:
    return [record.key for record in block.records]


def write_end(admin, number, version, cause="reexport") -> None:
    """Write a row of a re-export for a key that is gone."""
    admin.execute(
        "insert into jobs_lib.outbox (shard, class, topic, key, entity, version,"
        " cause, reexport_id) values (0, 1, 'items', 'gone', 'items', %s, %s, %s)",
        (version, cause, number),
    )


def tokens(admin) -> float:
    (number,) = admin.execute("select tokens from jobs_lib.reexports").fetchone()
    return round(number, 3)


@pytest.mark.guarantee("W28")
def test_rows_stay_whose_grant_is_too_old(
    reader, connection, admin, set_tokens, monkeypatch
):
    write_reexport(admin, "items", "items", ROWS, rate=600_000)
    set_tokens(ROWS)
    block = reader.read(connection, 0, 1)
    assert len(block.records) == ROWS
    set_tokens(3)
    monkeypatch.setattr(rates, "_OLD_SECONDS", -1)
    with reader.rates.leaving(connection, block):
        assert keys_of(block) == ["batch-1", "batch-2", "batch-3"]
    assert len(block.done[0]) == 3
    assert tokens(admin) == 0
    # The others are read again, once the rate allows them.
    set_tokens(ROWS)
    admin.execute("delete from jobs_lib.outbox where id = any (%s)", [block.done[0]])
    again = reader.read(connection, 0, 1)
    assert keys_of(again) == [f"batch-{n}" for n in range(4, ROWS + 1)]


@pytest.mark.guarantee("W28")
def test_a_row_that_stays_keeps_the_version_of_an_earlier_one_of_its_key(
    reader, connection, admin, set_tokens, monkeypatch
):
    number = write_reexport(admin, "items", "items", 0, rate=600_000)
    for version, cause in ((7, "live"), (None, "reexport")):
        write_end(admin, number, version, cause)
    set_tokens(2)
    monkeypatch.setattr(rates, "_OLD_SECONDS", -1)
    block = reader.read(connection, 0, 1)
    assert [(one.key, one.version) for one in block.records] == [("gone", 7)]
    set_tokens(0)
    with reader.rates.leaving(connection, block):
        assert not block.records
    assert not block.dropped


def test_a_loader_that_wants_rows_by_name_leaves_the_relays_rows_as_they_are(
    database, admin, connection
):
    own_shards(admin, OWNER, [0])
    app = make_app(database.url)
    states = app.topic("items", compacted=True)

    @app.entity(states, source="items", key="k")
    def load(conn, keys):
        conn.row_factory = dict_row
        return dict.fromkeys(keys, 1)

    reader = Reader(
        database, OWNER, 500, entities=app.entities, topics=app.topics, source="test"
    )
    write_reexport(admin, "items", "items", ROWS, rate=600_000)
    assert len(reader.read(connection, 0, 1).records) == ROWS
    assert connection.execute("select 1").fetchone() == (1,)


@pytest.mark.guarantee("W28")
def test_a_held_row_leaves_as_the_rate_of_its_re_export_allows(
    reader, connection, admin, set_tokens
):
    number = write_reexport(admin, "items", "items", 1, rate=600_000)
    (row,) = admin.execute(
        "with gone as (delete from jobs_lib.outbox returning *)"
        " insert into jobs_lib.held_rows (shard, class, id, topic, key, entity, cause,"
        " reexport_id, created_at) select shard, class, id, topic, key, entity, cause,"
        " reexport_id, created_at from gone returning id"
    ).fetchone()

    def leave(*spent: int) -> list[str | None]:
        block = reader.read_held(connection, 0, 1, row, {*spent})
        assert block.reexports == {number}
        with reader.rates.leaving(connection, block):
            return keys_of(block)

    set_tokens(0)
    assert leave() == []
    set_tokens(1)
    assert leave(number) == []
    assert tokens(admin) == 1
    assert leave() == ["batch-1"]
    assert tokens(admin) == 0
    # One that has ended has no rate, and must keep no row for ever.
    admin.execute("update jobs_lib.reexports set state = 'finished'")
    assert leave() == ["batch-1"]


@pytest.mark.guarantee("X10", "X11")
@pytest.mark.parametrize("versions", [(9, 3), (3, 9), (9, None)])
def test_merged_rows_have_the_highest_of_their_versions(
    reader, connection, admin, set_tokens, versions
):
    # A stale key's row has the version that follows the topic's; that of a change which
    # is given meanwhile may be below it, since it follows the table's.
    number = write_reexport(admin, "items", "items", 0, rate=600_000)
    for version in versions:
        write_end(admin, number, version)
    set_tokens(2)
    (record,) = reader.read(connection, 0, 1).records
    assert (record.key, record.version) == ("gone", 9)


@pytest.mark.guarantee("W33")
@pytest.mark.parametrize("causes", [("live", "reexport"), ("reexport", "live")])
def test_a_change_that_is_merged_with_a_row_of_its_table_stays_a_change(
    reader, connection, admin, set_tokens, causes
):
    number = write_reexport(admin, "items", "items", 0, rate=600_000)
    for cause in causes:
        write_end(admin, number, None, cause)
    set_tokens(2)
    (record,) = reader.read(connection, 0, 1).records
    # Only changes are copied, and leave although the end has no version.
    assert record.of_table is None


@pytest.mark.guarantee("W28")
def test_a_slow_loader_does_not_take_records_twice(
    reader, connection, admin, set_tokens, monkeypatch
):
    write_reexport(admin, "items", "items", ROWS, rate=600_000)
    # Every loader is slow.
    monkeypatch.setattr(rates, "_OLD_SECONDS", -1)

    def leave() -> tuple[float, int, float]:
        block = reader.read(connection, 0, 1)
        before, loaded = tokens(admin), len(block.records)
        with reader.rates.leaving(connection, block):
            left = block.done[0]
        admin.execute("delete from jobs_lib.outbox where id = any (%s)", [left])
        return before, loaded, len(left)

    # The first time it is not known yet.
    set_tokens(8)
    assert leave() == (0, 8, 0)
    assert tokens(admin) == 0
    # Then as many are loaded as the rate may allow, and taken when they leave.
    set_tokens(8)
    assert leave() == (8, 1, 1)
    assert leave() == (7, 2, 2)
    assert leave() == (5, 4, 4)
    assert leave() == (1, 8, 1)
    assert tokens(admin) == 0
    # A loader that is quick again is asked for as many as were granted.
    monkeypatch.setattr(rates, "_OLD_SECONDS", 60)
    leave()
    set_tokens(3)
    assert leave() == (0, 3, 3)


@pytest.mark.guarantee("W28")
@pytest.mark.parametrize("fails", [False, True])
def test_records_that_left_late_count_twice(
    reader, connection, admin, set_tokens, monkeypatch, fails
):
    write_reexport(admin, "items", "items", ROWS, rate=600_000)
    set_tokens(ROWS)
    block = reader.read(connection, 0, 1)

    def leave() -> None:
        with reader.rates.leaving(connection, block):
            monkeypatch.setattr(rates, "_OLD_SECONDS", 0)
            assert reader.rates.is_stuck()
            # What waits for such records is not even read.
            assert not reader.read(connection, 0, 1)
            assert tokens(admin) == 0
            if fails:
                raise TimeoutError

    monkeypatch.setattr(rates, "_LATE_SECONDS", 0)
    take, was_stuck = reader.rates.take, []

    def note_and_take(*args) -> int:
        was_stuck.append(reader.rates.is_stuck())
        return take(*args)

    monkeypatch.setattr(reader.rates, "take", note_and_take)
    if fails:
        with pytest.raises(TimeoutError):
            leave()
    else:
        leave()
    # Until they are counted, the bucket has records that nothing else may take.
    assert was_stuck == [True]
    assert not reader.rates.is_stuck()
    assert tokens(admin) == -ROWS


@pytest.mark.guarantee("W28")
def test_nothing_is_taken_anew_while_others_are_stuck(
    reader, connection, admin, set_tokens, monkeypatch
):
    write_reexport(admin, "items", "items", ROWS, rate=600_000)
    set_tokens(ROWS)
    stuck = reader.read(connection, 0, 1)
    set_tokens(ROWS)
    slow = reader.read(connection, 0, 1)
    assert len(slow.records) == ROWS
    slow.shard = 1
    set_tokens(ROWS)
    with reader.rates.leaving(connection, stuck):
        monkeypatch.setattr(rates, "_OLD_SECONDS", -1)
        with reader.rates.leaving(connection, slow):
            assert not slow.records
        assert tokens(admin) == ROWS


@pytest.mark.guarantee("W28")
def test_where_every_block_takes_long_none_is_late(
    reader, connection, admin, set_tokens, monkeypatch
):
    monkeypatch.setattr(rates, "_LATE_SECONDS", 0)
    monkeypatch.setattr(rates, "_USUAL", 1_000_000)
    write_reexport(admin, "items", "items", ROWS, rate=600_000)
    # No other block tells of the first one.
    for left in (-1, 0, 0):
        set_tokens(1)
        block = reader.read(connection, 0, 1)
        with reader.rates.leaving(connection, block):
            ids = block.done[0]
        admin.execute("delete from jobs_lib.outbox where id = any (%s)", [ids])
        assert tokens(admin) == left
