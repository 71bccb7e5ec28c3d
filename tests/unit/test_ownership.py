"""The wishes of a source are set arithmetic, so the order of callbacks is free."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs_lib.ownership import Source, StaticSource, choose_owner, share_evenly
from jobs_lib.ownership.member import MemberSource


@pytest.mark.guarantee("FK3")
def test_odd_callbacks_do_no_harm():
    source = MemberSource([], 0.01)
    changes: list[frozenset[str]] = []
    source.start(lambda: changes.append(source.wanted))
    source.revoked(frozenset({("t", 9)}))
    source.assigned(frozenset({("t", 1), ("t", 2)}))
    source.assigned(frozenset({("t", 2)}))
    source.revoked(frozenset({("t", 2), ("t", 7)}))
    source.lost(frozenset({("t", 2)}))
    assert source.wanted == {"t/1"}
    source.lost(frozenset({("t", 1)}))
    assert source.wanted == frozenset()
    assert changes[-1] == frozenset()


def test_an_assigned_origin_may_be_taken_from_a_live_owner_once():
    source = Source()
    source.assign({"t/1", "t/2"})
    assert source.claims({"t/1", "t/2", "t/3"}) == {"t/1", "t/2"}
    # After a take-over has failed, it can be tried again.
    assert source.claims({"t/1"}) == {"t/1"}
    source.took({"t/1"})
    assert source.claims({"t/1", "t/2"}) == {"t/2"}
    source.revoke({"t/2"})
    assert source.claims({"t/2"}) == frozenset()
    source.assign({"t/1"})
    assert source.claims({"t/1"}) == {"t/1"}


def test_a_replaced_set_gives_no_authority():
    source = Source()
    source.replace({"t/1"})
    assert source.wanted == {"t/1"}
    assert source.claims({"t/1"}) == frozenset()


def test_a_static_source_wants_its_list_until_it_is_stopped():
    source = StaticSource(["t/1"])
    assert source.wanted == frozenset()
    source.start(lambda: None)
    assert source.wanted == source.claims(["t/1", "t/2"]) == {"t/1"}
    source.stop()
    assert source.wanted == frozenset()


def test_an_origin_moves_only_when_its_owner_goes():
    processes = [UUID(int=n * 7919) for n in range(1, 6)]
    origins = [f"t/{n}" for n in range(1_000)]
    before = {origin: choose_owner(origin, processes) for origin in origins}
    for process in processes:
        assert 120 < sum(owner == process for owner in before.values()) < 280
    after = {origin: choose_owner(origin, processes[1:]) for origin in origins}
    moved = {origin for origin in origins if before[origin] != after[origin]}
    assert moved == {o for o in origins if before[o] == processes[0]}
    assert choose_owner("t/1", []) is None


@given(st.sets(st.uuids(), min_size=1, max_size=12), st.integers(0, 40))
def test_live_processes_share_evenly(processes, count):
    origins = tuple(f"t/{n}" for n in range(count))
    owners = share_evenly(origins, tuple(sorted(processes)))
    assert {*owners} == {*origins}
    loads = Counter(dict.fromkeys(processes, 0))
    loads.update(owners.values())
    assert {*loads} == processes
    assert max(loads.values()) - min(loads.values()) <= 1


def test_few_origins_move_when_a_process_comes_or_goes():
    moved, needed = 0, 0
    origins = tuple(f"shard/{n}" for n in range(16))
    for count in range(2, 9):
        for seed in range(50):
            processes = tuple(
                UUID(int=seed << 64 | n * 7919) for n in range(1, count + 1)
            )
            before = share_evenly(origins, processes[1:])
            after = share_evenly(origins, processes)
            moved += sum(before[o] != after[o] for o in origins)
            needed += len(origins) // count
    assert needed <= moved < 1.5 * needed
    assert share_evenly(origins, ()) == {}
