"""To find the jobs whose gate has opened reads these, and no others."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from jobs_lib.executor.claiming.gated import GatedRows
from jobs_lib.executor.claiming.windows import Windows
from jobs_lib.executor.limiting.gate import JobGate
from jobs_lib.kafka.dependencies import Dependency
from tests.plans.test_old_snapshots import count_pages
from tests.support.apps import HOME
from tests.support.job_gates import Records

WAITING = 100_000
PARTITIONS = 4
FILL = """
insert into jobs_lib.jobs (origin, type, payload, source, record_offset)
select 'local/' || n %% 16, 'work', '{}', %s, n from generate_series(0, %s - 1) n
"""


@pytest.fixture
def records(admin) -> Records:
    """The records of a topic with some partitions, one of which has all jobs."""
    for table in ("jobs", "sources", "offsets"):
        admin.execute(f"alter table jobs_lib.{table} set (autovacuum_enabled = off)")
    made = Records(admin, "flights", PARTITIONS)
    admin.execute(FILL, (made.numbers[0], WAITING))
    return made


def ask(records: Records, low: int, end: int, **changed: Any) -> dict[str, Any]:
    """What a dispatcher asks with, which owns all origins."""
    return {
        "sources": [records.numbers[n] for n in range(PARTITIONS)],
        "lows": [low] * PARTITIONS,
        "low_ids": [0] * PARTITIONS,
        "ends": [end] * PARTITIONS,
        "limit": 1_000,
        "origins": HOME,
        "cursors": [10**9] * len(HOME),
        "highs": [0] * len(HOME),
        "batches": [0] * len(HOME),
        "types": ["work"],
        **changed,
    }


@pytest.mark.parametrize("analyzed", [True, False])
def test_a_gate_that_moves_costs_as_much_as_the_jobs_it_opens(
    owner, admin, records, analyzed
):
    if analyzed:
        admin.execute("vacuum analyze jobs_lib.jobs")
    query = owner.queries["find_opened"]

    def count(low: int, end: int) -> int:
        with owner.connection.transaction(force_rollback=True):
            # A prepared statement has a plan that knows no values.
            owner.connection.execute("set local plan_cache_mode = force_generic_plan")
            return count_pages(owner.connection, query, ask(records, low, end))

    assert count(50_000, 50_010) < 60
    assert count(WAITING, WAITING * 2) < 40
    # However far it moves, one question reads no more than its limit.
    assert count(0, WAITING) < 1_500
    found = owner.connection.execute(query, ask(records, 0, WAITING)).fetchall()
    assert len(found) == 1_001
    assert found[-1][3] is None


def test_only_jobs_that_windows_have_passed_are_found(owner, records, admin):
    query = owner.queries["find_opened"]

    def find(**changed: Any) -> int:
        asked = ask(records, 10, 20, **changed)
        return len(owner.connection.execute(query, asked).fetchall())

    assert find() == 10
    assert find(types=["other"]) == 0
    assert find(cursors=[0] * len(HOME)) == 0
    # Nothing below the mark of what is done is unfinished.
    admin.execute(
        "insert into jobs_lib.offsets (consumer_group, topic, partition, next_offset,"
        " done_offset) values ('own', 'flights', 0, 100, 15)"
    )
    assert find() == 5


@pytest.mark.parametrize("analyzed", [True, False])
def test_to_see_whether_jobs_still_wait_costs_no_more_than_the_limit(
    owner, admin, records, analyzed
):
    if analyzed:
        admin.execute("vacuum analyze jobs_lib.jobs")
    query, first = owner.queries["find_waiting"], records.numbers[0]

    def find(low: int, **changed: Any) -> list[tuple[Any, ...]]:
        asked = ask(records, low, 2**63 - 1, **changed)
        with owner.connection.transaction(force_rollback=True):
            owner.connection.execute("set local plan_cache_mode = force_generic_plan")
            assert count_pages(owner.connection, query, asked) < 1_500
            rows: list[tuple[Any, ...]] = owner.connection.execute(
                query, asked
            ).fetchall()
        return rows

    (row,) = find(50)
    assert row[:3] == (first, True, 1_049)
    # Those of others fill the slice.
    for changed in ({"types": ["other"]}, {"origins": ["other/0"]}):
        (row,) = find(50, **changed)
        assert row[:3] == (first, False, 1_049)
    (row,) = find(WAITING - 10, types=["other"])
    assert row[:3] == (first, False, None)
    assert find(WAITING) == []


def test_a_jump_passes_over_closed_jobs_and_says_up_to_where(owner, records):
    gate = JobGate(["work"], [Dependency("flights", "g")], Mock(), 1.0)
    gate.note_sources([(records.numbers[0], "own", "flights", 0)])
    gated = GatedRows(gate, ["work"])
    gated.look()
    windows = Windows()
    windows.take({HOME[0]: 1})
    asked = {
        "origin": HOME[0],
        "cursor": 0,
        "limit": 1_000,
        "room": 10,
        "groups": [],
        "floor_groups": [],
        "floor_ids": [],
        "last_types": [],
        "skipped_types": [],
    }
    query = owner.queries["jump_gated"]
    (row,) = owner.connection.execute(query, asked | gated.parameters()).fetchall()
    ids, _, seen, _, _, sources, offsets = row
    assert (ids, seen, sources) == ([], 1_000, [records.numbers[0]])
    assert offsets == [16 * 999]
