"""Blocks of id-only rows take as many as fit, by the size of their states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from psycopg import IsolationLevel

from jobs_lib.outbox import rates
from jobs_lib.outbox.reader import Reader
from jobs_lib.outbox.states import States
from tests.support.apps import make_app
from tests.support.outbox.steps import own_shards
from tests.support.reexports import write_reexport

if TYPE_CHECKING:
    from jobs_lib.outbox.block import Block
    from jobs_lib.outbox.topic import Gone

OWNER = UUID(int=7)
MIB = 2**20
LARGE = 100_000
LIMIT = 1_000
"""Rows in a block."""


class Stage:
    """A reader of shard 0, for an app whose states have any size.

    Attributes:
        sizes: of the states, by key; keys with None are gone.
        calls: the keys of each call of the loader.
        broken: keys whose state cannot be loaded.
        deadly: keys that cost the loader its connection.
    """

    def __init__(self, database: Any, admin: Any, connection: Any) -> None:
        self.sizes: dict[str, int | None] = {}
        self.calls: list[list[str]] = []
        self.broken: set[str] = set()
        self.deadly: set[str] = set()
        self.admin = admin
        self.connection = connection
        app = make_app(database.url)
        for name, merge in (("items", True), ("all", False)):
            topic = app.topic(name, value=bytes, compacted=True, merge=merge)
            app.entity(topic, source=name, key="k")(self._load)
        self.reader = Reader(
            database,
            OWNER,
            LIMIT,
            entities=app.entities,
            topics=app.topics,
            source="test",
        )

    def _load(self, connection: Any, keys: list[str]) -> dict[str, Any]:
        self.calls.append(keys)
        if self.deadly.intersection(keys):
            connection.execute("select pg_terminate_backend(pg_backend_pid())")
        if broken := self.broken.intersection(keys):
            raise ValueError(f"no state of {sorted(broken)}")
        return {key: self._make(key) for key in keys}

    def _make(self, key: str) -> bytes | Gone | None:
        size = self.sizes.get(key)
        return None if size is None else key.encode().ljust(size, b"x")

    def write(
        self,
        *keys: str,
        topic: str = "items",
        version: int | None = None,
        value: bytes | None = None,
    ) -> None:
        """Write a live row for each key: with this value, or with the id only."""
        with self.admin.cursor() as cursor:
            cursor.executemany(
                "insert into jobs_lib.outbox"
                " (shard, topic, key, version, value, entity)"
                " values (0, %s, %s, %s, %s, %s)",
                [
                    (topic, key, version, value, None if value else topic)
                    for key in keys
                ],
            )

    def read(self) -> Block:
        return self.reader.read(self.connection, 0, 1)

    def delete(self, block: Block) -> None:
        """Delete a block's rows, as after its transaction."""
        ids, _ = block.done
        ids += [row_id for _, row_id, _ in block.behind]
        ids += [row[1] for one in block.refusals for row in one.record.rows]
        self.admin.execute("delete from jobs_lib.outbox where id = any (%s)", [ids])

    def read_all(self) -> list[Block]:
        blocks = []
        while block := self.read():
            assert block.records or block.refusals or block.behind or block.dropped
            self.delete(block)
            blocks.append(block)
        return blocks


@pytest.fixture
def stage(database, admin):
    """The reader, with what its blocks need."""
    own_shards(admin, OWNER, [0])
    stage = Stage(database, admin, connect_as_relay(database))
    yield stage
    stage.connection.close()


def connect_as_relay(database: Any) -> Any:
    connection = database.connect("test")
    connection.isolation_level = IsolationLevel.REPEATABLE_READ
    return connection


def keys_of(*blocks: Block) -> list[str | None]:
    return [record.key for block in blocks for record in block.records]


def size_of(block: Block) -> int:
    return sum(len(record.value or b"") for record in block.records)


@pytest.mark.guarantee("W6", "W78")
def test_large_states_leave_in_blocks_that_have_as_many_as_fit(stage):
    keys = [f"k{n}" for n in range(400)]
    stage.sizes = dict.fromkeys(keys, LARGE)
    stage.write(*keys)
    blocks = stage.read_all()
    assert keys_of(*blocks) == keys
    assert max(map(size_of, blocks)) < 8 * MIB + LARGE
    # No block is much smaller than it has to be.
    assert len(blocks) == 5
    # What is loaded in vain is little.
    assert max(map(len, stage.calls)) <= 100
    assert sum(map(len, stage.calls)) < 1.2 * len(keys)


def test_small_states_are_loaded_by_one_call_once_their_size_is_known(stage):
    keys = [f"k{n}" for n in range(3 * LIMIT)]
    stage.sizes = dict.fromkeys(keys, 300)
    stage.write(*keys)
    blocks = stage.read_all()
    assert keys_of(*blocks) == keys
    assert len(blocks) == 3
    assert [*map(len, stage.calls[-2:])] == [LIMIT] * 2
    # The first block is loaded with care.
    assert len(stage.calls) < 8


def test_keys_that_are_gone_are_loaded_by_one_call_after_a_while(stage):
    keys = [f"k{n}" for n in range(3 * LIMIT)]
    stage.write(*keys, version=2)
    assert keys_of(*stage.read_all()) == keys
    assert [*map(len, stage.calls[-2:])] == [LIMIT] * 2


def test_a_state_larger_than_a_block_leaves_alone(stage):
    stage.sizes = {"a": 9 * MIB, "b": 1, "c": 9 * MIB, "d": 9 * MIB}
    stage.write("a", "b", "c", "d")
    assert [keys_of(block) for block in stage.read_all()] == [["a"], ["b", "c"], ["d"]]


def test_states_have_less_room_beside_large_values(stage):
    stage.sizes = {f"k{n}": LARGE for n in range(100)}
    stage.write("v", value=b"x" * 6 * MIB)
    stage.write(*stage.sizes)
    first = stage.read()
    # The oldest of them leave with every block, so that values never starve them.
    assert 9 * MIB < size_of(first) < 10 * MIB + LARGE
    stage.delete(first)
    assert keys_of(first, *stage.read_all()) == ["v", *stage.sizes]


@pytest.mark.guarantee("I20", "W19")
def test_a_row_that_stays_keeps_the_later_ones_of_its_key_back(stage):
    stage.sizes = {"a": 9 * MIB, "b": 1}
    # Each row of this topic is sent, and b's second one has no room.
    stage.write("b", topic="all", value=b"first")
    stage.write("a", "b", topic="all")
    stage.write("b", topic="all", value=b"third")
    stage.write("c", topic="all", value=b"other")
    first, second = stage.read_all()
    assert keys_of(first) == ["b", "a", "c"]
    assert first.records[0].value == b"first"
    assert [(one.key, one.value) for one in second.records] == [
        ("b", b"b"),
        ("b", b"third"),
    ]


@pytest.mark.guarantee("I20", "W19")
def test_a_row_that_stays_keeps_the_earlier_ones_it_stands_for(stage):
    stage.sizes = {"a": 9 * MIB}
    stage.write("a")
    stage.write("gone", value=b"state", version=4)
    stage.write("gone")
    first, second = stage.read_all()
    assert keys_of(first) == ["a"]
    assert not first.dropped
    # The version of the tombstone follows that of the earlier state.
    (record,) = second.records
    assert (record.key, record.value, record.version) == ("gone", None, 5)
    assert len(record.rows) == 2


def test_rows_that_stay_belong_to_the_key_of_one_topic(stage):
    stage.sizes = {"a": 9 * MIB, "b": 1}
    stage.write("a", "b")
    stage.write("b", topic="all", value=b"other")
    assert [(one.topic, one.key) for one in stage.read().records] == [
        ("items", "a"),
        ("all", "b"),
    ]


@pytest.mark.guarantee("FK10")
def test_a_state_that_cannot_be_loaded_is_refused_where_others_stay(stage):
    keys = [f"k{n}" for n in range(200)]
    stage.sizes = dict.fromkeys(keys, LARGE)
    stage.broken = {"k3", "k150"}
    stage.write(*keys)
    blocks = stage.read_all()
    assert keys_of(*blocks) == [key for key in keys if key not in stage.broken]
    assert [one.record.key for block in blocks for one in block.refusals] == [
        "k3",
        "k150",
    ]
    assert max(map(size_of, blocks)) < 8 * MIB + LARGE


def test_a_key_that_is_refused_in_several_pieces_is_held_once(stage, monkeypatch):
    monkeypatch.setattr(States, "_find_end", lambda _self, _all, begin, _: begin + 1)
    stage.broken = {"a"}
    stage.write("a", "a", topic="all")
    block = stage.read()
    assert len(block.refusals) == len(block.behind) == 1


def test_states_that_cannot_be_loaded_tell_no_size(stage):
    keys = [f"k{n}" for n in range(400)]
    stage.sizes = dict.fromkeys(keys, LARGE)
    stage.broken = {*keys[:200]}
    stage.write(*keys[:200])
    assert len(stage.read_all()[0].refusals) == 200
    stage.calls.clear()
    stage.write(*keys[200:])
    stage.read_all()
    assert max(map(len, stage.calls)) <= 100


def test_a_loader_that_fails_for_long_is_asked_for_the_whole_rest(stage, monkeypatch):
    monkeypatch.setattr("jobs_lib.outbox.states._SEARCH_SECONDS", -1)
    keys = [f"k{n}" for n in range(LIMIT)]
    stage.broken = {*keys}
    stage.write(*keys)
    block = stage.read()
    assert len(block.refusals) == LIMIT
    assert [*map(len, stage.calls)] == [100, LIMIT - 100]


@pytest.mark.guarantee("I10")
def test_a_loader_that_costs_the_connection_behind_good_pieces_is_left_alone(
    database, stage, monkeypatch
):
    # Each key is a piece of its own.
    monkeypatch.setattr(States, "_find_end", lambda _self, _all, begin, _: begin + 1)
    stage.sizes = dict.fromkeys("abc", 1)
    stage.deadly = {"b"}
    stage.write("a", "b", "c")
    for _ in range(2):
        with pytest.raises(psycopg.OperationalError):
            stage.read()
        assert stage.calls == [["a"], ["b"]]
        stage.calls.clear()
        stage.connection.close()
        stage.connection = connect_as_relay(database)
    # It is not called for the other keys: they are held, and tried seldom.
    assert [one.record.key for one in stage.read().refusals] == ["a", "b", "c"]
    assert not stage.calls


@pytest.mark.guarantee("W34")
def test_rows_of_re_exports_wait_while_live_ones_stay(stage, admin):
    stage.sizes = {"a": 9 * MIB, "b": 1, "batch-1": 1}
    write_reexport(admin, "items", "items", 1, rate=600_000)
    stage.write("a", "b")
    assert [keys_of(block) for block in stage.read_all()] == [["a"], ["b", "batch-1"]]


def tokens(admin: Any) -> float:
    (number,) = admin.execute("select tokens from jobs_lib.reexports").fetchone()
    return float(number)


@pytest.mark.guarantee("W28", "W33")
def test_the_rate_gets_back_what_large_states_of_a_re_export_left(stage, admin):
    rows = 50
    stage.sizes = {f"batch-{n}": MIB for n in range(1, rows + 1)}
    write_reexport(admin, "items", "items", rows, rate=600)
    # The rate refills hardly anything meanwhile, and may give all at once.
    admin.execute(
        "create function keep_the_time() returns trigger language plpgsql as $$begin"
        " new.refilled_at := clock_timestamp() + interval '1 hour'; return new; end$$"
    )
    admin.execute(
        "create trigger keep_the_time before insert or update on jobs_lib.reexports"
        " for each row execute function keep_the_time()"
    )
    admin.execute("update jobs_lib.reexports set rate = 600000, tokens = %s", [rows])
    block = stage.read()
    assert keys_of(block) == [f"batch-{n}" for n in range(1, 9)]
    assert tokens(admin) == rows - 8
    # What is late counts for those that leave.
    assert [len(found) for found in block.limited.values()] == [8]
    stage.delete(block)
    assert len(stage.read().records) == 8


@pytest.mark.guarantee("W28")
def test_a_re_exports_row_that_stays_keeps_the_version_of_an_earlier_one(stage, admin):
    stage.sizes = {"batch-1": 9 * MIB}
    number = write_reexport(admin, "items", "items", 1, rate=600_000)
    for version, cause in ((7, "live"), (None, "reexport")):
        admin.execute(
            "insert into jobs_lib.outbox (shard, class, topic, key, entity, version,"
            " cause, reexport_id) values (0, 1, 'items', 'gone', 'items', %s, %s, %s)",
            (version, cause, number),
        )
    first = stage.read()
    assert keys_of(first) == ["batch-1"]
    assert not first.dropped
    stage.delete(first)
    (record,) = stage.read().records
    assert (record.key, record.version) == ("gone", 7)


@pytest.mark.guarantee("W33")
def test_re_exports_of_large_states_share_a_block(stage, admin):
    stage.sizes = {f"{one}-{n}": MIB for one in "ab" for n in range(1, 41)}
    write_reexport(admin, "items", "items", 40, rate=10_000_000, keys="a")
    write_reexport(admin, "all", "all", 40, rate=10_000_000, keys="b")
    stage.delete(stage.read())
    # Their sizes are known now.
    keys = keys_of(stage.read())
    assert [str(key)[0] for key in keys].count("b") == 4


@pytest.mark.guarantee("W28")
def test_staged_states_leave_in_blocks_that_have_as_many_as_fit(stage, admin):
    rows = 20
    number = write_reexport(admin, "items", "items", rows, rate=600_000)
    admin.execute("update jobs_lib.reexports set source = 'frame'")
    admin.execute("select jobs_lib.make_reexport_states(%s)", [number])
    admin.execute(
        "insert into jobs_lib.reexport_states (reexport_id, key, version, value)"
        " select %s, 'batch-' || n, n, convert_to(repeat('x', %s), 'UTF8')"
        " from generate_series(1, %s) n",
        [number, MIB, rows],
    )
    blocks = stage.read_all()
    assert keys_of(*blocks) == [f"batch-{n}" for n in range(1, rows + 1)]
    assert [len(block.records) for block in blocks] == [8, 8, 4]
    assert not stage.calls


def test_rates_that_are_asked_late_are_asked_for_what_fits(stage, admin, monkeypatch):
    monkeypatch.setattr(rates, "_OLD_SECONDS", -1)
    stage.sizes = {f"batch-{n}": MIB for n in range(1, 51)}
    write_reexport(admin, "items", "items", 50, rate=600_000)
    block = stage.read()
    with stage.reader.rates.leaving(stage.connection, block):
        assert keys_of(block) == [f"batch-{n}" for n in range(1, 9)]
