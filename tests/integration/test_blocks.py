"""Blocks of the outbox take as many rows as fit, with all of their values."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from psycopg import IsolationLevel

from jobs_lib.errors import FencedError
from jobs_lib.outbox.block import Block, PlainRows, Refusal
from jobs_lib.outbox.reader import Reader
from jobs_lib.outbox.starts import Start, Starts
from jobs_lib.service.maintenance import Maintenance
from tests.support.apps import count, make_app
from tests.support.outbox.steps import RelaySteps, own_shards

OWNER = UUID(int=7)
MIB = 2**20
CALM = 0.1
"""The seconds in which the topic `calm` collects the rows of a key."""


@pytest.fixture
def owned(admin):
    """Give shard 0 an owner."""
    own_shards(admin, OWNER, [0])


@pytest.fixture
def relay(database, owned):
    """The relay of that owner; it does nothing by itself."""
    return RelaySteps(make_app(database.url), OWNER)


@pytest.fixture
def read(database, admin, owned):
    """A function that reads the next block of shard 0, and deletes its rows."""
    app = make_app(database.url)
    topics = {
        name: app.topic(name, merge=True, settle=seconds)
        for name, seconds in (("calm", CALM), ("slow", 600))
    }
    reader = Reader(database, OWNER, 1_000, entities={}, topics=topics, source="test")
    with database.connect("test") as connection:

        def read():
            block = reader.read(connection, 0, 1)
            done, _ = block.done
            ids = done + [row_id for _, row_id, _ in block.behind]
            admin.execute("delete from jobs_lib.outbox where id = any (%s)", [ids])
            return block

        yield read


@pytest.fixture
def write(admin):
    """A function that writes rows with values of these sizes; it returns the values."""

    def write(*sizes: int | None, key: str = "k") -> list[bytes | None]:
        values = [
            None if size is None else (b"%d." % n).ljust(size, b"x")
            for n, size in enumerate(sizes)
        ]
        with admin.cursor() as cursor:
            cursor.executemany(
                "insert into jobs_lib.outbox (shard, topic, key, value)"
                " values (0, 'events', %s, %s)",
                [(key, value) for value in values],
            )
        return values

    return write


def values_of(*blocks) -> list[bytes | None]:
    return [record.value for block in blocks for record in block.records]


def test_small_values_come_by_number(read, write):
    written = write(*[8 * MIB // 1_000] * 1_001)
    first, second = read(), read()
    assert len(first.records) == 1_000
    assert values_of(first, second) == written


def test_large_values_come_by_their_size(read, write):
    written = write(*[300, MIB, None, MIB + 1] * 6)
    blocks = [read() for _ in range(2)]
    # Only the last row exceeds the limit.
    assert sum(len(value or b"") for value in values_of(blocks[0])) - MIB - 1 < 8 * MIB
    assert values_of(*blocks) == written
    assert not read()


def test_a_value_larger_than_a_block_is_one_of_its_own(read, write):
    written = write(9 * MIB, 10)
    blocks = [read(), read()]
    assert [len(block.records) for block in blocks] == [1, 1]
    assert values_of(*blocks) == written


def test_large_values_that_are_held_take_no_room(read, write, admin):
    admin.execute(
        "insert into jobs_lib.holds (topic, key, error, retry_at)"
        " values ('events', 'held', 'too large', now())"
    )
    write(*[3 * MIB] * 4, key="held")
    written = write(MIB, 1)
    block = read()
    assert values_of(block) == written
    assert len(block.behind) == 4


def test_batch_rows_wait_while_live_ones_did_not_fit(read, write, admin):
    admin.execute(
        "insert into jobs_lib.outbox (shard, class, topic, key, entity)"
        " values (0, 1, 'events', 'other', 'nobody')"
    )
    write(8 * MIB, 10)
    assert not read().dropped
    assert not read().records[0].row_class


@pytest.fixture
def exported(admin):
    """A function that writes the row of a running re-export; it returns the id."""

    def exported(topic: str, key: str) -> int:
        (reexport,) = admin.execute(
            "insert into jobs_lib.reexports (entity, topic, state, rate)"
            " values ('item', %s, 'running', 10000) returning id",
            [topic],
        ).fetchone()
        (row_id,) = admin.execute(
            "insert into jobs_lib.outbox (shard, class, topic, key, entity,"
            " reexport_id) values (0, 1, %s, %s, 'item', %s) returning id",
            [topic, key, reexport],
        ).fetchone()
        return row_id

    return exported


@pytest.mark.guarantee("W34", "I20")
def test_a_re_exports_row_goes_where_a_later_live_one_of_its_key_still_settles(
    read, exported, admin
):
    row_id = exported("slow", "k")
    admin.execute(
        "insert into jobs_lib.outbox (shard, topic, key) values (0, 'slow', 'k')"
    )
    block = read()
    # The live row stays, and will carry the newer state.
    assert [dropped for _, dropped, _ in block.dropped] == [row_id]
    assert not block.records
    assert admin.execute("select key from jobs_lib.outbox").fetchall() == [("k",)]


@pytest.mark.guarantee("W34", "I20")
def test_a_re_exports_row_gives_way_to_a_later_live_one_of_its_key_that_is_held(
    read, write, exported, admin
):
    admin.execute(
        "insert into jobs_lib.holds (topic, key, error, retry_at)"
        " values ('events', 'held', 'too large', now())"
    )
    row_id = exported("events", "held")
    write(10, key="held")
    block = read()
    # The live row has a newer state, and goes first in any case.
    assert [dropped for _, dropped, _ in block.dropped] == [row_id]
    assert len(block.behind) == 1
    assert not block.records


@pytest.mark.guarantee("W23", "I20")
def test_a_re_exports_row_waits_behind_an_earlier_live_one_of_its_key(
    read, exported, admin
):
    admin.execute(
        "insert into jobs_lib.outbox (shard, topic, key) values (0, 'slow', 'k')"
    )
    row_id = exported("slow", "k")
    block = read()
    # The live row has an older state: the table may have changed since, without another
    # row. So the other one is neither sent before it nor dropped.
    assert not block.records
    assert not block.dropped
    assert not block.behind
    rows = admin.execute("select id from jobs_lib.outbox where class = 1").fetchall()
    assert rows == [(row_id,)]


@pytest.mark.guarantee("W20")
def test_a_key_has_settled_with_all_its_rows_or_with_none(read, admin):
    for _ in range(5):
        # All rows have one time, which falls into the run of a statement.
        admin.execute(
            "insert into jobs_lib.outbox (shard, topic, key, created_at)"
            " select 0, 'calm', 'k', statement_timestamp() from generate_series(1, 900)"
        )
        deadline = time.monotonic() + 20
        while not (block := read()):
            assert time.monotonic() < deadline
        (record,) = block.records
        assert len(record.rows) == 900


@pytest.mark.guarantee("FP23", "W20")
def test_rows_from_before_the_clock_was_set_back_have_settled(read, admin):
    write = (
        "insert into jobs_lib.outbox (shard, topic, key, created_at)"
        " values (0, 'slow', %s, clock_timestamp() + %s * interval '1 second')"
    )
    # A row from the future counts as settled, and brings all rows of its key with it.
    for key, seconds in (("a", 3600), ("a", 0), ("b", 3600), ("young", 0)):
        admin.execute(write, (key, seconds))
    block = read()
    assert [one.key for one in block.records] == ["a", "b"]
    assert len(block.records[0].rows) == 2


@pytest.fixture
def write_calm(admin):
    """A function that writes rows of these keys that have already settled."""

    def write_calm(*keys: str | None) -> None:
        for key in keys:
            admin.execute(
                "insert into jobs_lib.outbox (shard, topic, key, created_at)"
                " values (0, 'calm', %s, now() - interval '1 minute')",
                [key],
            )

    return write_calm


def test_rows_that_need_no_merge_are_sent_as_plain_rows(read, write, write_calm):
    write(1, 9 * MIB // 1_000, None)
    write_calm("a", None, "b", None)
    block = read()
    assert isinstance(block.outgoing, PlainRows)
    assert [(one.topic, one.key) for one in block.records] == [
        *[("events", "k")] * 3,
        *[("calm", key) for key in ("a", None, "b", None)],
    ]


def test_rows_with_repeated_keys_are_merged_into_records(read, write_calm):
    write_calm("a", "b", "a")
    block = read()
    assert not isinstance(block.outgoing, PlainRows)
    assert [one.key for one in block.records] == ["a", "b"]
    assert len(block.records[0].rows) == 2


@pytest.mark.guarantee("W20")
def test_a_row_without_a_key_is_not_collected(read, admin):
    admin.execute("insert into jobs_lib.outbox (shard, topic) values (0, 'calm')")
    assert len(read().records) == 1


@pytest.mark.guarantee("W9")
@pytest.mark.parametrize("reexports", [set(), {1}], ids=["live", "re-export"])
@pytest.mark.parametrize(
    "taken", ["owner = gen_random_uuid()", "owner = null", "epoch = epoch + 1"]
)
def test_a_relay_that_lost_its_shard_deletes_nothing(
    database, admin, write, relay, taken, reexports
):
    write(1, 2, 3)
    with database.connect("test") as connection:
        block = relay.read(connection, 0)
        block.reexports |= reexports
        admin.execute(f"update jobs_lib.origins set {taken}")
        with pytest.raises(FencedError, match="3 of 3 rows of shard 0"):
            relay.delete(connection, 0, block)
    assert admin.execute("select count(*) from jobs_lib.outbox").fetchone() == (3,)


@pytest.mark.guarantee("W10")
@pytest.mark.parametrize("reexports", [set(), {1}], ids=["live", "re-export"])
def test_rows_that_came_meanwhile_stay(database, admin, write, relay, reexports):
    write(1, 2, 3)
    with database.connect("test") as connection:
        block = relay.read(connection, 0)
        block.reexports |= reexports
        # Even a row in the place of another stays: the read rows are deleted where they
        # lie now.
        write(4)
        admin.execute("vacuum full jobs_lib.outbox")
        newest = relay.read(connection, 0).records[-1]
        block.records[0].place = newest.place
        relay.delete(connection, 0, block)
    left = admin.execute("select id from jobs_lib.outbox").fetchall()
    assert left == [(newest.row_id,)]


@pytest.mark.guarantee("FP7")
@pytest.mark.parametrize("reexports", [set(), {1}], ids=["live", "re-export"])
def test_rows_that_were_read_from_another_server_are_not_deleted_here(
    database, admin, write, relay, reexports
):
    write(1, 2, 3)
    with database.connect("test") as connection:
        block = relay.read(connection, 0)
        block.reexports |= reexports
        # No server was started one microsecond after the epoch.
        relay.be_of_server(1)
        with pytest.raises(FencedError, match="3 of 3 rows of shard 0"):
            relay.delete(connection, 0, block)
        assert admin.execute("select count(*) from jobs_lib.outbox").fetchone() == (3,)
        ((_, server),) = relay.starts.find_pending(connection, [0])
        relay.be_of_server(server)
        relay.delete(connection, 0, block)
    assert admin.execute("select count(*) from jobs_lib.outbox").fetchone() == (0,)


@pytest.fixture
def reexporting(database, admin, owned):
    """A reader of an app with two entities that are re-exported."""
    app = make_app(database.url)
    for name in ("first", "second"):
        states = app.topic(name, compacted=True)
        app.entity(states, source=name, key="k")(lambda _, keys: dict.fromkeys(keys, 1))
    reader = Reader(
        database, OWNER, 500, entities=app.entities, topics=app.topics, source="test"
    )

    def write(name: str, number: int, rate: int, state: str, rows: int) -> None:
        admin.execute(
            "insert into jobs_lib.reexports (id, entity, topic, rate, state, total)"
            " values (%s, %s, %s, %s, %s, %s)",
            [number, name, name, rate, state, rows],
        )
        admin.execute(
            "insert into jobs_lib.outbox"
            " (shard, class, topic, key, entity, cause, reexport_id)"
            " select 0, 1, %s, %s || n, %s, 'reexport', %s"
            " from generate_series(1, %s) n",
            [name, name, name, number, rows],
        )

    return reader, write


@pytest.mark.guarantee("W33", "W34")
@pytest.mark.parametrize(
    ("rate", "state"), [(60_000, "paused"), (1, "running")], ids=["paused", "slow"]
)
def test_a_re_export_that_may_send_nothing_holds_up_no_other_one(
    database, reexporting, rate, state, wait_for
):
    reader, write = reexporting
    write("first", 1, rate, state, 150)
    write("second", 2, 60_000, "running", 10)
    sent: set[int] = set()
    with database.connect("test") as connection:
        connection.isolation_level = IsolationLevel.REPEATABLE_READ

        def read() -> bool:
            block = reader.read(connection, 0, 1)
            sent.update(one.row_id for one in block.records if one.topic == "second")
            # No block has rows of the paused re-export.
            assert state != "paused" or block.reexports <= {2}
            return len(sent) > 0

        wait_for(read, timeout=60, what="a row of the second one is read")
        # Its rows come as fast as its rate allows, and none is lost.
        wait_for(lambda: read() and len(sent) == 10, timeout=60, what="all are read")


@pytest.mark.guarantee("W33")
def test_re_exports_share_a_block(database, reexporting):
    reader, write = reexporting
    write("first", 1, 10_000_000, "running", 150)
    write("second", 2, 10_000_000, "running", 150)
    with database.connect("test") as connection:
        connection.isolation_level = IsolationLevel.REPEATABLE_READ
        block = reader.read(connection, 0, 1)
    assert [record.key for record in block.records] == [
        f"{name}{n}" for name in ("first", "second") for n in range(1, 51)
    ]


@pytest.mark.guarantee("W33", "X8")
@pytest.mark.parametrize("old_snapshot", [False, True])
@pytest.mark.parametrize("ended", ["cancelled", "deleted", "unnamed"])
def test_rows_of_an_ended_re_export_are_dropped_behind_a_paused_one(
    database, admin, reexporting, ended, old_snapshot
):
    reader, write = reexporting
    # Beside an old snapshot only the first hundred rows are looked through for such.
    write("first", 1, 60_000, "paused", 90 if old_snapshot else 150)
    write("second", 2, 60_000, "cancelled", 10)
    if ended != "cancelled":
        admin.execute("delete from jobs_lib.reexports where id = 2")
    if ended == "unnamed":
        admin.execute(
            "update jobs_lib.outbox set reexport_id = null where reexport_id = 2"
        )
    with database.connect("test") as connection:
        connection.isolation_level = IsolationLevel.REPEATABLE_READ
        start = Start(1, 1) if old_snapshot else Start()
        block = reader.read(connection, 0, 1, start)
    assert not block.records
    assert len(block.dropped) == 10
    names = admin.execute(
        "select distinct topic from jobs_lib.outbox where id = any (%s)",
        [[row_id for _, row_id, _ in block.dropped]],
    ).fetchall()
    assert names == [("second",)]


@pytest.mark.guarantee("W34")
def test_a_state_that_changes_while_records_are_taken_leaves_with_its_live_row(
    database, admin, reexporting, monkeypatch
):
    reader, write = reexporting
    write("first", 1, 60_000, "running", 3)
    real = reader.rates.take

    def take(*given: Any) -> int:
        admin.execute(
            "insert into jobs_lib.outbox (shard, topic, key, entity)"
            " values (0, 'first', 'first2', 'first')"
        )
        return real(*given)

    monkeypatch.setattr(reader.rates, "take", take)
    with database.connect("test") as connection:
        connection.isolation_level = IsolationLevel.REPEATABLE_READ
        block = reader.read(connection, 0, 1)
    assert [record.key for record in block.records] == ["first1", "first3"]
    assert len(block.dropped) == 1


@pytest.mark.guarantee("FP23")
def test_a_hold_from_before_the_clock_was_set_back_is_tried_again(
    database, admin, write, relay
):
    write(1, 1)
    ahead = "update jobs_lib.holds set retry_at = now() + %s * interval '1 second'"
    shown = "select attempts, retry_at - now() < '11 seconds' from jobs_lib.holds"
    with database.connect("test") as connection:

        def find_due() -> list[tuple[Any, ...]]:
            query = database.queries["due_holds"]
            return connection.execute(query, {"shards": [0]}).fetchall()

        first, second = relay.read(connection, 0).records
        kept = Block([], refusals=[Refusal(first, "too large")], behind=[*second.rows])
        relay.hold(connection, 0, kept)
        before = admin.execute(shown).fetchone()[0]
        # This is the longest pause.
        admin.execute(ahead, (600,))
        assert not find_due()
        admin.execute(ahead, (3600,))
        assert [row_id for *_, row_id, _ in find_due()] == [first.row_id]
        # Kafka refuses the row again, and it waits from now on.
        relay.hold(connection, 0, kept)
        assert admin.execute(shown).fetchone() == (before + 1, True)
        assert not find_due()


@pytest.mark.guarantee("FK10")
def test_rows_set_aside_behind_a_hold_that_just_ends_are_not_forgotten(
    database, admin, write, relay, connect, wait_for
):
    # The row that made the hold was dropped.
    admin.execute(
        "insert into jobs_lib.holds (topic, key, error, retry_at)"
        " values ('events', 'k', 'too large', now())"
    )
    write(1)
    sender = connect()
    sender.isolation_level = IsolationLevel.READ_COMMITTED
    with database.connect("test") as connection:
        block = relay.read(connection, 0)
    assert block.behind
    relay.hold(sender, 0, block)
    query = database.queries["end_idle_holds"]
    with ThreadPoolExecutor(1) as pool, database.connect("outbox") as operator:
        ended = pool.submit(operator.execute, query)
        waiting = (
            "select from pg_stat_activity"
            " where wait_event_type = 'Lock' and datname = current_database()"
        )
        wait_for(lambda: admin.execute(waiting).rowcount, what="the drop waits")
        sender.commit()
        ended.result()
    # Without a hold nobody would look for a held row.
    holds, held = count(admin, "holds"), count(admin, "held_rows")
    assert (holds, held, count(admin, "outbox")) == (0, 0, 1)


def test_a_hold_whose_relay_died_behind_its_last_row_is_lifted(
    database, admin, write, relay, wait_for
):
    write(1)
    write(1, key="other")
    with database.connect("test") as connection:
        block = relay.read(connection, 0)
        refusals = [Refusal(record, "too large") for record in block.records]
        relay.hold(connection, 0, Block([], refusals=refusals))
    # A relay has sent this row, and has not lifted the hold any more.
    admin.execute("delete from jobs_lib.held_rows where key = 'k'")
    maintenance = Maintenance(database, {1})
    maintenance.start()
    try:
        wait_for(lambda: count(admin, "holds") == 1, what="the idle one is lifted")
        wait_for(lambda: maintenance._maintain_at > 0, what="the round is over")
    finally:
        maintenance.stop()
    left = "select h.key from jobs_lib.holds h join jobs_lib.held_rows r using (key)"
    assert admin.execute(left).fetchall() == [("other",)]


def test_a_relay_that_may_send_no_shard_finds_no_rows(database):
    # As where no shard's producer can be made while Kafka is away, and a complete read
    # is due since an earlier one was slow.
    starts = Starts(database.queries)
    starts.due_at = 0.0
    with database.connect("test") as connection:
        assert starts.find_pending(connection, []) == []
