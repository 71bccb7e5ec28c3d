"""However many states are staged and versions noted, a block looks up its own."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import psycopg
import pytest

from jobs_lib.outbox.block import OutboxRecord
from jobs_lib.outbox.staged import fill_in_staged, note_versions
from tests.plans.test_plans import Plans, count_pages, show_pages
from tests.support.outbox.steps import own_shards

OWNER = uuid4()
STATES = 40_000
DELETE: dict[str, Any] = {
    "shard": 0, "origin": "shard/0", "owner": OWNER, "epoch": 1, "server": 0,
    "places": "{}", "ids": "{}", "noted": False, "id": 1,
}  # fmt: skip


def fill(admin) -> None:
    """Stage states and note versions, for each of three re-exports."""
    for number in (1, 2, 3):
        admin.execute(
            "insert into jobs_lib.reexports (id, entity, topic, source, rate)"
            " values (%(id)s, 'things' || %(id)s, 'states', 'frame', 6000)",
            {"id": number},
        )
        admin.execute("select jobs_lib.make_reexport_states(%s)", (number,))
        admin.execute(
            "insert into jobs_lib.reexport_states (reexport_id, key, version, value)"
            " select %s, 'k' || n, 5, 'state' from generate_series(1, %s) n",
            (number, STATES),
        )
        admin.execute(
            "insert into jobs_lib.reexport_versions (reexport_id, key, version)"
            " select %s, 'k' || n, 4 + n %% 2 from generate_series(1, %s) n",
            (number, STATES),
        )


def make_records(reexport: int) -> list[OutboxRecord]:
    return [
        OutboxRecord("states", f"k{n}", None, 1, n, b"", [], "", staged=reexport)
        for n in range(1, 101)
    ]


@pytest.mark.guarantee("X4")
@pytest.mark.parametrize(
    ("impatient", "generic"),
    [(True, True), (True, False), (False, False)],
    ids=["generic", "custom", "bouncer"],
)
@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "never"])
def test_a_block_reads_and_notes_only_its_own_keys(
    database, admin, impatient, generic, analyzed
):
    fill(admin)
    if analyzed:
        admin.execute("analyze jobs_lib.reexport_states, jobs_lib.reexport_versions")
    queries = database.queries
    with database.connect("test", impatient=impatient) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        plans = Plans(connection)
        show_pages(connection)
        # The first one reads catalogues.
        fill_in_staged(connection, queries, make_records(1))
        records = make_records(2)
        with plans.told(generic=generic) as told:
            superseded = fill_in_staged(connection, queries, records)
        # A version of 5 has left of each second key.
        assert [one.row_id for one in superseded] == [*range(1, 101, 2)]
        assert [one.version for one in records] == [None, 5] * 50
        # Two look-ups for each key, of a few pages.
        assert sum(map(count_pages, told)) < 1_500
        left = [("states", f"k{n}", 7, 2) for n in range(1, 101)]
        note_versions(connection, queries, left[:1])
        with plans.told(generic=generic) as told:
            note_versions(connection, queries, left)
        assert sum(map(count_pages, told)) < 3_000
    # The one that has sent them needs no note.
    noted = admin.execute(
        "select reexport_id, count(*) from jobs_lib.reexport_versions"
        " where version = 7 group by 1 order by 1"
    ).fetchall()
    assert noted == [(1, 100), (3, 100)]


@pytest.mark.parametrize("query", ["delete_live", "delete_block", "delete_held"])
def test_a_block_finds_at_once_that_nothing_must_be_noted(database, admin, query):
    own_shards(admin, OWNER, [0])
    admin.execute(
        "insert into jobs_lib.reexports (entity, topic, state, source, rate)"
        " select 'e' || n, 'states', 'finished', 'frame', 6000"
        " from generate_series(1, 10000) n"
    )
    # The index has had entries of them all, and they are gone.
    admin.execute("vacuum analyze jobs_lib.reexports")
    with database.connect("test", impatient=True) as connection:
        plans = Plans(connection)
        show_pages(connection)
        execute = connection.execute
        given = DELETE | {"dropped": False if query == "delete_held" else "{}"}
        execute(database.queries[query], given, prepare=True)
        with plans.told(generic=True) as told:
            row = execute(database.queries[query], given, prepare=True).fetchone()
        assert row == (0,)
        assert sum(map(count_pages, told)) < 60
    admin.execute(
        "insert into jobs_lib.reexports (entity, topic, source, rate)"
        " values ('things', 'states', 'frame', 60)"
    )
    with database.connect("test", impatient=True) as connection:
        row = connection.execute(database.queries[query], given).fetchone()
        assert row == (-1,)
        noted = given | {"noted": True}
        row = connection.execute(database.queries[query], noted).fetchone()
        assert row == (0,)
