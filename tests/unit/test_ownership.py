"""The wishes of a source are set arithmetic, so the order of callbacks is free."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs_lib.coordination import Shared
from jobs_lib.coordination.messages import ClaimingPartition, Heartbeat, Sender
from jobs_lib.coordination.world import World
from jobs_lib.ownership import (
    Source,
    StaticSource,
    choose_owner,
    coordinated,
    follow_log,
    share_evenly,
)
from jobs_lib.ownership.coordinated import CoordinationSource
from jobs_lib.ownership.follow_log import FollowLogSource
from jobs_lib.ownership.member import MemberSource
from jobs_lib.settings import load_settings


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


def test_a_coordinated_source_that_is_stopped_as_it_begins_starts_no_member(
    monkeypatch,
):
    source = CoordinationSource(load_settings(), "shop.execute", "a", list)
    begun = []

    class LateMember:
        def __init__(self, *_: object, **__: object) -> None:
            # It was not there yet for whoever stops the source.
            source.stop()

        def start(self) -> None:
            begun.append(self)

    monkeypatch.setattr(coordinated, "Member", LateMember)
    assert list(source._be_member()) == []
    assert begun == []


@pytest.mark.guarantee("M24")
def test_odd_calls_of_a_coordinated_member_do_no_harm():
    source = CoordinationSource(load_settings(), "shop.execute", "a", list)
    one, other = (Shared("shop.execute", "t", number) for number in (1, 2))
    source.leave(one)
    source.taken(one, None)
    source.taken(one, None)
    source.lost(other)
    assert source.wanted == {"t/1"}
    # It was free, or released: nothing is taken from an owner that lives.
    assert source.claims({"t/1"}) == frozenset()
    source.note_owned(frozenset())
    assert source.wanted == {"t/1"}
    source.leave(one)
    source.note_owned(frozenset({"t/1"}))
    source.note_owned(frozenset())
    source.lost(one)
    assert source.wanted == frozenset()
    source.stop()


class Read:
    """A log of one partition, as a reader has it."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.is_known = True
        self.world = World(0)

    def get_worlds(self) -> list[World]:
        return [self.world]

    def add(self, message) -> None:
        end = self.world.next_offset
        self.world.fold(end, 1_000 * end, 1, message)


@pytest.mark.guarantee("M24")
def test_a_sidecar_follows_its_service_while_that_gives_signs_of_life(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(follow_log, "read_clock", lambda: now[0])
    settings = load_settings(pod="a", coordination_interval=10.0)
    source = FollowLogSource(settings, {"shop.consume"})
    log: Any = Read()

    def look(after: float) -> frozenset[str]:
        now[0] += after
        source._choose(log)
        return source.wanted

    senders = {
        0: Sender("shop.consume", "a", "run"),
        1: Sender("shop.consume", "b", "run"),
        2: Sender("shop.other", "a", "run"),
    }
    beats = []
    for number, sender in senders.items():
        shared = Shared(sender.group_id, "orders", number)
        beats.append(Heartbeat(sender, shared, log.world.next_offset, None))
        log.add(ClaimingPartition(sender, shared, 10_000))
    assert look(0) == set()  # The claims are not confirmed.
    for beat in beats:
        log.add(beat)
    assert look(0) == {"orders/0"}
    assert look(19.9) == {"orders/0"}
    assert look(0.2) == set()
    log.add(beats[0])
    assert look(1) == {"orders/0"}
    log.is_known = False
    assert look(0) == set()


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
