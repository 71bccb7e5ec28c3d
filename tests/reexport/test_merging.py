"""Rows of one key in a block: a staged state never hides a newer change."""

from __future__ import annotations

from uuid import uuid4

import psycopg
import pytest

from jobs_lib.outbox.reader import Reader
from jobs_lib.outbox.starts import Start
from tests.support.apps import make_app
from tests.support.outbox.steps import own_shards

OWNER = uuid4()
_WRITE = """
insert into jobs_lib.outbox
    (shard, class, topic, key, value, entity, cause, reexport_id)
values (0, %(class)s, 'states', %(key)s, %(value)s, %(entity)s, %(cause)s, %(reexport)s)
"""


@pytest.fixture
def read(database, admin):
    """A function that reads the one block; the re-export 1 is of a DataFrame."""
    own_shards(admin, OWNER, [0])
    admin.execute(
        "insert into jobs_lib.reexports (id, entity, topic, state, source, rate, total,"
        " refilled_at) values (1, 'things', 'states', 'running', 'frame', 60000, 99,"
        " now() - interval '1 minute')"
    )
    admin.execute("select jobs_lib.make_reexport_states(1)")
    app = make_app(database.url)
    states = app.topic("states", value=str, compacted=True)
    app.entity(states, source="things", key="k")(
        lambda _, keys: {key: f"current {key}" for key in keys}
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
    """A function that writes a row: of a staged state, of a change, or a live one."""

    def write(key: str, what: str) -> None:
        if what == "staged":
            admin.execute(
                "insert into jobs_lib.reexport_states"
                " (reexport_id, key, version, value) values (1, %s, 5, %s)",
                (key, f'"staged {key}"'.encode()),
            )
        live = what == "live"
        row = {
            "class": 0 if live else 1,
            "key": key,
            "value": b'"live"' if live else None,
            "entity": None if live else "things",
            "cause": "reexport" if what == "staged" else "live",
            "reexport": None if live else 1,
        }
        admin.execute(_WRITE, row)

    return write


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
    sent = {(one.key, one.value.decode()) for one in block.records}
    assert sent == {
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
