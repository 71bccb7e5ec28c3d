"""Rows of one key in a block: no older state hides a newer one, or follows it."""

from __future__ import annotations

from collections import defaultdict
from uuid import uuid4

import psycopg
import pytest

from jobs_lib.outbox.reader import Reader
from jobs_lib.outbox.starts import Start
from tests.support.apps import count, make_app
from tests.support.outbox.steps import own_shards

OWNER = uuid4()
_WRITE = """
insert into jobs_lib.outbox
    (id, shard, class, topic, key, value, entity, cause, reexport_id)
values (
    coalesce(%(id)s, nextval('jobs_lib.outbox_id_seq')), 0, %(class)s, 'states',
    %(key)s, %(value)s, %(entity)s, %(cause)s, %(reexport)s
)
"""


@pytest.fixture
def states():
    """The states that the loader gives by key; one that is called may change them."""
    return defaultdict(lambda: lambda key: f"current {key}")


@pytest.fixture
def read(database, admin, states):
    """A function that reads the one block; the re-export 1 is of a DataFrame."""
    own_shards(admin, OWNER, [0])
    for number, entity, source in (1, "things", "frame"), (2, "others", "table"):
        admin.execute(
            "insert into jobs_lib.reexports (id, entity, topic, state, source, rate,"
            " total, refilled_at) values (%s, %s, 'states', 'running', %s, 600000, 99,"
            " now() - interval '1 minute')",
            (number, entity, source),
        )
    admin.execute("select jobs_lib.make_reexport_states(1)")
    app = make_app(database.url)
    topic = app.topic("states", value=str, compacted=True)
    app.entity(topic, source="things", key="k")(
        lambda _, keys: {key: states[key](key) for key in keys}
    )
    reader = Reader(
        database, OWNER, 500, entities=app.entities, topics=app.topics, source="test"
    )

    def read():
        with database.connect("test", impatient=True) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            return reader.read(connection, 0, 1, Start())

    return read


@pytest.fixture
def write(admin):
    """A function that writes a row of a key.

    It is one of a staged state, of the table, of a change, or live: with its value, or
    with the state that is loaded when it leaves.
    """

    def write(key: str, what: str, row_id: int | None = None) -> None:
        if what == "staged":
            admin.execute(
                "insert into jobs_lib.reexport_states"
                " (reexport_id, key, version, value) values (1, %s, 5, %s)",
                (key, f'"staged {key}"'.encode()),
            )
        live = what in ("live", "loaded")
        row = {
            "id": row_id,
            "class": 0 if live else 1,
            "key": key,
            "value": b'"live"' if what == "live" else None,
            "entity": None if what == "live" else "things",
            "cause": "reexport" if what in ("staged", "table") else "live",
            "reexport": None if live else 2 if what == "table" else 1,
        }
        admin.execute(_WRITE, row)

    return write


def list_sent(block):
    """The keys and values of a block's records."""
    return [(one.key, one.value.decode()) for one in block.records]


def delete(admin, block):
    """Delete the rows of a block that has left."""
    ids, _ = block.done
    admin.execute("delete from jobs_lib.outbox where id = any (%s)", (ids,))


@pytest.mark.guarantee("X4", "X11")
def test_the_current_state_of_a_key_replaces_a_staged_one_in_any_order(read, write):
    for key, what in (
        ("a", "staged"), ("a", "change"),
        ("b", "change"), ("b", "staged"),
        ("c", "staged"), ("c", "live"),
        ("d", "staged"),
        ("e", "change"), ("e", "change"),
    ):  # fmt: skip
        write(key, what)
    block = read()
    assert {*list_sent(block)} == {
        ("a", '"current a"'),
        ("b", '"current b"'),
        ("c", '"live"'),
        ("d", '"staged d"'),
        ("e", '"current e"'),
    }
    # One record for each key; the other four rows leave with the block, too.
    assert len(block.records) == 5
    assert len(block.dropped) == 4
    ids, _ = block.done
    assert len(ids) == len({*ids}) == 9


@pytest.mark.guarantee("W33", "W23", "X4")
@pytest.mark.parametrize("what", ["change", "table", "staged"])
def test_a_row_leaves_behind_an_older_live_value_of_its_key(
    admin, read, write, wait_for, what
):
    write("a", "live")
    write("a", what)
    block = read()
    assert list_sent(block) == [("a", '"live"')]
    assert not block.dropped
    delete(admin, block)
    block = wait_for(read, timeout=30, what="the row is read again")
    assert [key for key, _ in list_sent(block)] == ["a"]
    assert count(admin, "outbox") == len(block.done[0]) == 1


@pytest.mark.guarantee("W33", "W23")
@pytest.mark.parametrize("what", ["change", "table"])
@pytest.mark.parametrize("row_id", [None, 1], ids=["later", "earlier"])
def test_a_row_that_commits_while_a_live_row_is_loaded_is_not_lost(
    admin, read, write, states, wait_for, what, row_id
):
    def commit(key: str) -> str:
        write(key, what, row_id)
        states[key] = lambda key: f"newer {key}"
        return "older"

    states["a"] = commit
    admin.execute("select nextval('jobs_lib.outbox_id_seq')")
    write("a", "loaded")
    # Another row leaves with the block, so that it has one of the re-export at all.
    write("b", what)
    block = read()
    assert list_sent(block) == [("a", '"older"'), ("b", '"current b"')]
    assert not block.dropped
    delete(admin, block)
    block = wait_for(read, timeout=30, what="the row is read again")
    assert list_sent(block) == [("a", '"newer a"')]


@pytest.mark.guarantee("W36")
@pytest.mark.parametrize("what", ["change", "table"])
def test_a_live_row_whose_state_is_loaded_stands_for_later_rows_too(read, write, what):
    write("a", "loaded")
    write("a", what)
    block = read()
    assert list_sent(block) == [("a", '"current a"')]
    assert len(block.dropped) == 1


def test_rows_behind_those_that_wait_for_live_ones_leave(read, write, wait_for):
    for n in range(150):
        write(str(n), "live")
        write(str(n), "change")
    write("behind", "change")
    # The block that is not sent stands for live rows that settle.
    wait_for(
        lambda: list_sent(read())[150:] == [("behind", '"current behind"')],
        timeout=30,
        what="the last row is read",
    )
