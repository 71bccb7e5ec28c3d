"""What every reader of a log must agree about, on random logs."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    Probe,
    ReleaseGroup,
    ReleasingPartition,
    Sender,
    Shared,
    Unreadable,
    decode,
    encode,
)
from jobs_lib.coordination.snapshots import Collector
from jobs_lib.coordination.world import Entry, Outcome, World, find_digest
from tests.coordination.agreement import compare
from tests.coordination.listener import Listener, Snapshots, begin, find_interval, parse
from tests.coordination.logs import PLACES, all_logs, broken, values

RANDOM = settings(
    max_examples=100, deadline=None, suppress_health_check=list(HealthCheck)
)
WRONG = settings(RANDOM, max_examples=2_000, database=None, phases=[Phase.generate])
Records: TypeAlias = list[tuple[int, int, bytes]]
"""The offset, append time and value of each."""


def read(log: Records, world: World | None = None) -> World:
    """Fold a log."""
    world = world or World(0)
    for record in log:
        world.apply(*record)
    return world


@pytest.mark.guarantee("M2", "M4", "I31")
@RANDOM
@given(all_logs)
def test_a_reader_written_from_the_page_agrees_at_each_offset(log):
    world, listener = World(0), Listener(0)
    for record in log:
        world.apply(*record)
        listener.hear(*record)
        compare(world, listener)


@pytest.mark.guarantee("M2")
@settings(RANDOM, max_examples=300)
@given(values | broken() | st.binary(max_size=30))
def test_both_readers_agree_about_what_is_a_message(value):
    found, wanted = decode(value), parse(value)
    assert isinstance(found, Unreadable) == (wanted is None)
    if isinstance(found, Unreadable) or wanted is None:
        return
    for name in ("partial", "wants_snapshot"):
        if hasattr(found[1], name):
            assert getattr(found[1], name) is (wanted.get(name) is True)
    if isinstance(found[1], Probe):
        assert found[1].interval_ms == find_interval(wanted)


@pytest.mark.guarantee("M2", "M4", "I31")
@RANDOM
@given(all_logs)
def test_a_reader_written_from_the_page_begins_with_the_same_snapshots(log):
    collector, snapshots = Collector(), Snapshots(PLACES)
    for offset, _, value in log:
        ours = collector.read(offset, PLACES, value)
        theirs = snapshots.hear(offset, value)
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        assert (ours.as_of, ours.is_partial) == (theirs["as_of"], theirs["partial"])
        world, listener = ours.restore(0), begin(0, theirs)
        compare(world, listener)
        for record in log[ours.as_of + 1 :]:
            world.apply(*record)
            listener.hear(*record)
            compare(world, listener)


ENDS = [
    *(b"5}", b"0}", b"null}", b"05}", b"00}", b"-0}", b"-5}", b"5 }", b" 5}", b"+5}"),
    *(
        b"1e1}",
        b"5.0}",
        b"1_0}",
        b"true}",
        b"nul}",
        b"}",
        b"5",
        b"55",
        b"5]",
        b"5}}",
        b'"5"}',
    ),
    *(b"999999999999999999}", b"9223372036854775807}", b"9223372036854775808}"),
    *(b"1" * 30 + b"}", "\u0665}".encode(), b"\xb2}"),
    *(
        b'5,"position":6}',
        b'5,"x\\"position":6}',
        b'5,"x":"a:6}',
        b'5,"x":{"position":6}}',
    ),
]


@pytest.mark.guarantee("M2")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", [Heartbeat, ReleasingPartition])
def test_the_position_at_the_end_of_a_record_is_read_as_json_says(kind, end):
    sender = Sender("shop.a", "x", "1")
    shared = Shared("shop.a", "orders", 3)
    value = encode(kind(sender, shared, 7, None), 2)
    value = value.removesuffix(b"null}") + end
    for _ in range(2):  # The second time, all but the end is known.
        found, wanted = decode(value), parse(value)
        assert isinstance(found, Unreadable) == (wanted is None)
        if wanted is not None and not isinstance(found, Unreadable):
            assert found[1] == kind(sender, shared, 7, wanted["position"])


@pytest.mark.guarantee("M4", "I31")
@RANDOM
@given(all_logs, st.data())
def test_a_world_from_a_snapshot_goes_on_as_one_that_read_all(log, data):
    cut = data.draw(st.integers(0, len(log)))
    before = read(log[:cut])
    entries, pauses, digest = before.spell()
    assert digest == find_digest(entries, pauses)
    restored = World(0)
    restored.restore("".join(entries), pauses)
    restored.now_ms, restored.next_offset = before.now_ms, before.next_offset
    restored.partitions = before.partitions
    kept = before.copy()
    for record in log[cut:]:
        outcomes = {one.apply(*record) for one in (before, restored)}
        assert len(outcomes) == 1
        assert before.spell() == restored.spell()
    assert kept.spell() == (entries, pauses, digest)
    assert read(log).spell() == restored.spell()


@pytest.mark.guarantee("M4", "M12")
@RANDOM
@given(all_logs)
def test_records_about_one_partition_move_only_the_time_of_another(log):
    # So a system of several partitions has no behaviour that one partition among
    # records that move the time does not have.
    world = read(log)
    for shared, entry in world.entries.items():
        alone = []
        for offset, time, value in log:
            found = decode(value)
            if not isinstance(found, Unreadable):
                n, message = found
                if getattr(message, "shared", shared) != shared:
                    value = encode(Probe(message.sender), n)
            alone.append((offset, time, value))
        assert read(alone).find(shared) == entry


def check_positions(log: Records, world: World) -> None:
    """Check that no position falls, no range overlaps, and time does not go back."""
    ends: dict[Shared, int] = {}
    for offset, time, value in log:
        now, before = world.now_ms, dict(world.entries)
        outcome = world.apply(offset, time, value)
        assert world.now_ms >= now
        if world.entries == before:
            continue
        decoded = decode(value)
        assert not isinstance(decoded, Unreadable)
        message = decoded[1]
        assert outcome is Outcome.VALID
        shared = message.shared  # type: ignore[union-attr]
        old, new = before.get(shared, Entry()).position, world.find(shared).position
        may_fall = isinstance(message, ReleasingPartition) and world.has_paused(
            message.sender
        )
        if old is not None and not may_fall:
            assert new is not None
            assert new >= old
        if may_fall:
            ends.pop(shared, None)
        if isinstance(message, ClaimingMessages):
            assert (message.first or 0) >= ends.get(shared, 0)
            ends[shared] = message.end


@pytest.mark.guarantee("M20", "M23")
@RANDOM
@given(all_logs)
def test_positions_rise_and_claimed_ranges_never_overlap(log):
    check_positions(log, World(0))


class FallingPosition(World):
    """Who releases a partition may set its position without a pause."""

    def fold(
        self, offset: int, time_ms: int, partitions: int, message: Message
    ) -> Outcome:
        outcome = super().fold(offset, time_ms, partitions, message)
        if isinstance(message, ReleasingPartition) and outcome is Outcome.VALID:
            self.entries[message.shared] = Entry(message.position)
        return outcome


class AnyRange(World):
    """A batch need not begin where the one before ended."""

    def fold(
        self, offset: int, time_ms: int, partitions: int, message: Message
    ) -> Outcome:
        if isinstance(message, ClaimingMessages):
            known = self.find(message.shared).position
            message = message._replace(first=known, end=message.end + (known or 0))
        return super().fold(offset, time_ms, partitions, message)


class ReadsLate(World):
    """Records count by the reader's clock, and it reads all of them at once."""

    def apply(self, offset: int, time_ms: int, value: bytes | None) -> Outcome:
        return super().apply(offset, 10_000, value)


class ForgetsTime(World):
    """The time of the log may go back."""

    def pass_over(self, offset: int, time_ms: int) -> None:
        self.next_offset, self.now_ms = offset + 1, time_ms


@pytest.mark.guarantee("I40")
@pytest.mark.parametrize("wrong", [FallingPosition, AnyRange, ForgetsTime])
def test_a_wrong_fold_is_found(wrong):
    def breaks(log: Records) -> bool:
        try:
            check_positions(log, wrong(0))
        except AssertionError:
            return True
        return False

    find(all_logs, breaks, settings=WRONG)


class PausesForAll(World):
    """All instances of the client that pauses a group may claim, and set positions."""

    def has_paused(self, sender: Sender) -> bool:
        pause = self.pauses.get(sender.group_id)
        if pause is None:
            return False
        return super().has_paused(sender._replace(instance_id=pause.instance_id))


class KeepsRights(World):
    """Who has paused a group may set its positions when the pause is over, too."""

    def has_paused(self, sender: Sender) -> bool:
        pause = self.pauses.get(sender.group_id)
        return pause is not None and sender[1:] == pause[1:]


class LongestPause(World):
    """A pause does not end before its time."""

    def _pause(self, message: ReleaseGroup) -> Outcome:
        before = self.pauses.get(message.sender.group_id)
        if before is not None and before.until_ms > message.msg_expire_time:
            return Outcome.VALID
        return super()._pause(message)


class NoRestart(World):
    """A client that restarts waits as long as all others."""

    def judge(self, sender: Sender, shared: Shared) -> Outcome:
        holding = self.find(shared).holding
        if holding is not None and holding.client_id == sender.client_id:
            sender = sender._replace(client_id="z")
        return super().judge(sender, shared)


@pytest.mark.guarantee("I40", "M4")
@pytest.mark.parametrize(
    "wrong",
    [
        PausesForAll,
        pytest.param(KeepsRights, marks=pytest.mark.slow),
        LongestPause,
        NoRestart,
    ],
)
def test_the_reader_written_from_the_page_tells_a_wrong_fold(wrong):
    def disagree(log: Records) -> bool:
        world, listener = wrong(0), Listener(0)
        try:
            for record in log:
                world.apply(*record)
                listener.hear(*record)
                compare(world, listener)
        except AssertionError:
            return True
        return False

    find(all_logs, disagree, settings=WRONG)


def name_right(
    world: World, message: Message, outcome: Outcome, before: Entry
) -> str | None:
    """Name the rule of a pause that a record has met, if it has met one."""
    is_pausing = world.has_paused(message.sender)
    if isinstance(message, ClaimingPartition):
        pause = world.pauses.get(message.sender.group_id)
        is_of_pauser = pause is not None and pause[1] == message.sender[1]
        if outcome is Outcome.VALID and is_pausing:
            return "the run that pauses claims"
        if outcome is Outcome.PAUSED and is_of_pauser:
            return "another run of its client claims in vain"
    elif isinstance(message, ReleasingPartition) and is_pausing:
        position = world.find(message.shared).position
        if outcome is Outcome.VALID and (position or 0) < (before.position or 0):
            return "the run that pauses sets a position back"
    return None


@pytest.mark.guarantee("M19", "M20")
def test_random_logs_reach_what_a_run_may_do_while_it_pauses_a_group():
    def reach(log: Records) -> bool:
        world = World(0)
        reached: set[str | None] = set()
        for record in log:
            decoded, entries = decode(record[2]), dict(world.entries)
            outcome = world.apply(*record)
            if not isinstance(decoded, Unreadable):
                shared: Any = getattr(decoded[1], "shared", None)
                before = entries.get(shared, Entry())
                reached.add(name_right(world, decoded[1], outcome, before))
        return len(reached - {None}) == 3

    find(all_logs, reach, settings=WRONG)


@pytest.mark.guarantee("I40", "I31")
def test_readers_with_their_own_clocks_disagree():
    def disagree(log: Records) -> bool:
        found = [read(log), read(log, ReadsLate(0))]
        claims = [
            {
                s: e.holding.claim
                for s, e in one.entries.items()
                if e.holding is not None
            }
            for one in found
        ]
        return claims[0] != claims[1]

    find(all_logs, disagree, settings=WRONG)
