"""Queries about some slots read little while very many are held."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.plans.test_old_snapshots import count_pages

OWNER, OTHER = UUID(int=1), UUID(int=2)
HELD = 50_000
FILL = (
    "insert into jobs_lib.slots (type, value, slot, owner)"
    " select 'call', n::text, 1, %s from generate_series(1, %s) n"
)
MINE = {"type": "call", "owner": OWNER}
FEW = {"values": [f"v{n}" for n in range(5)] + ["7"], "counts": [2] * 6, "most": 2}


@pytest.mark.parametrize("analyzed", [True, False])
@pytest.mark.parametrize(
    ("query", "given", "most"),
    [
        ("take_slots", FEW, 400),
        ("give_slots_back", FEW, 400),
        ("watch_slots", {}, 50),
        ("count_slots", {}, 50),
    ],
)
def test_a_few_slots_are_found_among_very_many(
    owner, admin, query, given, most, analyzed
):
    admin.execute(FILL, (OTHER, HELD))
    if analyzed:
        admin.execute("analyze jobs_lib.slots")
    with owner.connection.transaction(force_rollback=True):
        # A prepared statement has a plan that knows no values.
        owner.connection.execute("set local plan_cache_mode = force_generic_plan")
        pages = count_pages(owner.connection, owner.queries[query], MINE | given)
    assert pages < most


def test_a_process_takes_free_slots_and_marks_one_it_lacks(owner, admin):
    def ask(process: UUID, **counts: int) -> dict[str, int]:
        given = {
            "type": "call",
            "owner": process,
            "values": [*counts],
            "counts": [*counts.values()],
            "most": 3,
        }
        query = owner.queries["take_slots"]
        return dict(owner.connection.execute(query, given).fetchall())

    def marks() -> list[tuple[str, UUID]]:
        return admin.execute(
            "select value, owner from jobs_lib.slots where wanted order by 1, slot"
        ).fetchall()

    assert ask(OWNER, a=2, b=9) == {"a": 2, "b": 3}
    assert marks() == []
    # One slot of a is left, and none of b.
    assert ask(OTHER, a=2, b=1) == {"a": 1}
    assert marks() == [("b", OWNER)]
    # It is marked once, and not if the others have hardly more.
    assert ask(OTHER, a=1, b=1) == {}
    assert marks() == [("b", OWNER)]


def test_a_smaller_limit_holds_beside_slots_of_a_larger_one(owner, admin):
    admin.execute(FILL, (OTHER, 1))
    admin.execute(
        "insert into jobs_lib.slots (type, value, slot, owner) values"
        " ('call', '1', 2, %s), ('call', '1', 3, %s)",
        (OTHER, OTHER),
    )
    given = MINE | {"values": ["1"], "counts": [1], "most": 2}
    assert owner.connection.execute(owner.queries["take_slots"], given).fetchall() == []
