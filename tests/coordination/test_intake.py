"""The records that wait: those of an earlier fetch are not taken for new ones."""

from __future__ import annotations

import math
import time

import pytest
from confluent_kafka import Message

from jobs_lib import telemetry
from jobs_lib.coordination.intake import Intake
from jobs_lib.coordination.messages import Shared
from jobs_lib.coordination.part import Part
from tests.support.clock import Clock

GROUP = "shop.mailer"
PLACE = ("orders", 0)


def make(offset: int, partition: int = 0) -> Message:
    """Make a message of Kafka's client."""
    return Message(
        topic="orders", partition=partition, offset=offset, key=b"k", value=b"value"
    )


def take(intake: Intake, position: int | None, partition: int = 0) -> Part:
    """Hold a partition from a position on, and begin to read it."""
    part = Part(Shared(GROUP, "orders", partition), position)
    intake.add(part)
    intake.begin(part)
    return part


def offsets(part: Part) -> list[int | None]:
    return [one.offset() for one in part.peek(100)]


def test_records_that_were_fetched_for_an_earlier_holding_are_dropped(settings):
    intake = Intake(settings, GROUP, lambda: math.inf)
    first = take(intake, 0)
    intake.begun(PLACE)
    intake.received([make(one) for one in range(3)])
    assert offsets(first) == [0, 1, 2]
    intake.remove(first)
    # Somebody else held it meanwhile, and got as far as 2. The reader does not know.
    again = take(intake, 2)
    intake.received([make(one) for one in range(3, 6)])
    assert offsets(again) == []
    intake.begun(PLACE)
    intake.received([make(one) for one in range(2, 6)])
    assert offsets(again) == [2, 3, 4, 5]


def test_records_before_the_position_are_dropped_and_bytes_are_counted(settings):
    intake = Intake(settings, GROUP, lambda: math.inf)
    part = take(intake, 4)
    intake.begun(PLACE)
    intake.received([make(one) for one in range(2, 8)])
    assert offsets(part) == [4, 5, 6, 7]
    intake.received([make(one) for one in range(6, 8)])
    assert offsets(part) == [4, 5, 6, 7]
    assert intake.has_room()
    assert part.waiting_bytes == 4 * (len(b"k") + len(b"value") + 200)
    intake.drop(part, 6)
    assert (offsets(part), part.position) == ([6, 7], 6)
    intake.drop(part, 8)
    assert part.waiting_bytes == 0


def test_a_batch_goes_over_the_lots_in_which_its_records_came(settings):
    intake = Intake(settings, GROUP, lambda: math.inf)
    part = take(intake, 0)
    intake.begun(PLACE)
    intake.received([make(one) for one in (0, 1, 2)])
    intake.received([make(one) for one in (3, 5)])
    intake.received([make(one) for one in (8, 9)])
    assert [one.offset() for one in part.peek(2)] == [0, 1]
    intake.drop(part, 2)
    assert [one.offset() for one in part.peek(4)] == [2, 3, 5, 8]
    # An offset that no record has: a transaction's end, or a record compacted away.
    intake.drop(part, 7)
    assert offsets(part) == [8, 9]
    intake.drop(part, 20)
    assert (offsets(part), part.waiting_bytes) == ([], 0)


def test_each_partition_with_records_has_its_turn(settings):
    intake = Intake(settings, GROUP, lambda: math.inf)
    parts = [take(intake, 0, number) for number in range(3)]
    for number in range(3):
        intake.begun(("orders", number))
    intake.received([make(one, number) for one in range(5) for number in (0, 2)])
    served = []
    for _ in range(6):
        part = intake.choose()
        assert part is not None
        served.append(part.shared.partition)
        intake.drop(part, (part.position or 0) + 1)
        intake.end(part)
    assert served == [0, 2] * 3
    # It has records again, and comes behind those that have waited.
    intake.received([make(one, 1) for one in range(2)])
    part = intake.choose()
    assert part is parts[0]
    # While it has its turn nobody else gets it, though more has come.
    intake.received([make(9)])
    assert [intake.choose(), intake.choose()] == [parts[2], parts[1]]
    assert intake.choose() is None


def test_a_partition_that_waits_has_no_turn_until_its_time(settings):
    intake = Intake(settings, GROUP, lambda: math.inf)
    part = take(intake, 0)
    intake.begun(PLACE)
    intake.received([make(0)])
    assert intake.choose() is part
    part.retry_at = time.monotonic() + 0.05
    assert not intake.end(part)
    assert intake.choose() is None
    assert 0 < intake.find_rest() <= 0.05
    time.sleep(intake.find_rest())
    assert intake.choose() is part
    assert time.monotonic() >= part.retry_at
    part.is_leaving = True
    assert intake.end(part)
    assert intake.find_rest() == math.inf


@pytest.mark.parametrize("over", ["is_lost", "is_leaving", "is_standing"])
def test_a_partition_that_is_over_has_no_turn(settings, over):
    intake = Intake(settings, GROUP, lambda: math.inf)
    part = take(intake, 0)
    intake.begun(PLACE)
    intake.received([make(0)])
    setattr(part, over, True)
    assert intake.choose() is None


@pytest.fixture
def lost():
    """The places of partitions that stand still, as ``(next, start, end)``."""
    told: list[tuple[int | None, ...]] = []
    names = ("next_offset", "start", "end")
    remove = telemetry.listen(
        lambda _, fields: told.append(tuple(fields[one] for one in names)),
        only={"offset.lost"},
    )
    yield told
    remove()


def test_a_partition_stands_still_once_its_records_in_memory_are_handled(
    settings, lost
):
    intake = Intake(settings, GROUP, lambda: math.inf)
    part = take(intake, 0)
    intake.begun(PLACE)
    intake.received([make(one) for one in range(3)])
    intake.out_of_range(PLACE, 7, 9)
    for done in range(3):
        assert intake.choose() is part
        intake.settle_range(part)
        assert (lost, offsets(part)) == ([], [*range(done, 3)])
        intake.drop(part, done + 1)
        intake.end(part)
    assert intake.choose() is part
    intake.settle_range(part)
    intake.end(part)
    assert (lost, part.is_standing) == ([(3, 7, 9)], True)
    assert intake.choose() is None


def test_a_new_group_reads_the_oldest_record_again_if_that_has_gone(settings, lost):
    intake = Intake(settings, GROUP, lambda: math.inf)
    part = take(intake, None)
    intake.begun(PLACE)
    intake.out_of_range(PLACE, 7, 9)
    assert intake.choose() is part
    told = len(intake.reader._commands)
    intake.settle_range(part)
    intake.end(part)
    assert len(intake.reader._commands) == told + 1
    intake.begun(PLACE)
    intake.received([make(one) for one in (7, 8)])
    assert (offsets(part), lost, part.is_standing) == ([7, 8], [], False)


def test_a_range_that_was_told_for_an_earlier_fetch_stops_no_partition(settings):
    intake = Intake(settings, GROUP, lambda: math.inf)
    intake.remove(take(intake, 0))
    # Somebody has set the position meanwhile.
    again = take(intake, 7)
    intake.out_of_range(PLACE, 7, 9)
    intake.begun(PLACE)
    assert intake.choose() is None
    intake.received([make(7)])
    assert (intake.choose(), offsets(again)) == (again, [7])


def test_a_position_behind_the_place_that_has_gone_is_read(settings, lost):
    intake = Intake(settings, GROUP, lambda: math.inf)
    part = take(intake, 0)
    intake.begun(PLACE)
    intake.received([make(one) for one in range(3)])
    intake.out_of_range(PLACE, 7, 9)
    # The log tells that more is processed than was read.
    intake.drop(part, 8)
    intake.settle_range(part)
    intake.begun(PLACE)
    intake.received([make(one) for one in (7, 8)])
    assert (offsets(part), lost) == ([8], [])


def test_records_that_are_let_go_are_asked_for_again_whatever_the_range_was(
    settings, clock, lost
):
    intake = make_small(settings)
    part = take(intake, 0)
    intake.begun(PLACE)
    for first in range(0, 6, 2):
        intake.received([make(one) for one in (first, first + 1)])
    assert not intake.has_room()
    intake.out_of_range(PLACE, 0, 5)
    clock.now += 0.6
    assert intake.has_room()
    assert (part.is_paused, offsets(part)) == (True, [0, 1, 2, 3])
    intake.drop(part, 4)
    intake.settle_range(part)
    intake.begun(PLACE)
    intake.received([make(4)])
    assert (offsets(part), lost) == ([4], [])


def test_records_in_memory_outlive_the_client_that_has_fetched_them(settings, clock):
    intake = make_small(settings)
    part = take(intake, 0)
    intake.begun(PLACE)
    intake.received([make(one) for one in range(6)])
    assert not intake.has_room()
    intake.lost(frozenset([PLACE]))
    assert offsets(part) == [*range(6)]
    # What the failed client has fetched comes no more; the next one reads on.
    intake.received([make(7)])
    intake.begun(PLACE)
    intake.received([make(one) for one in (6, 7)])
    assert offsets(part) == [*range(8)]
    assert not intake.has_room()
    # Also if it was paused: its bytes count again.
    clock.now += 0.6
    assert intake.has_room()
    assert part.is_paused
    intake.lost(frozenset([PLACE]))
    assert (part.is_paused, offsets(part)) == (False, [*range(6)])
    assert not intake.has_room()
    intake.drop(part, 6)
    assert intake.has_room()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The time of the intake."""
    clock = Clock(0.0)
    for module in ("coordination.intake", "kafka.fullness"):
        monkeypatch.setattr(f"jobs_lib.{module}.time", clock)
    return clock


def make_small(settings) -> Intake:
    """Make an intake that is full with five of these records."""
    small = settings.model_copy(update={"consumer_prefetch_bytes": 1_000})
    return Intake(small, GROUP, lambda: math.inf)


def test_what_has_left_makes_room_and_is_not_read(settings, clock):
    intake = make_small(settings)
    part, other = take(intake, 0), take(intake, 0, 1)
    for number in range(2):
        intake.begun(("orders", number))
    intake.received([make(one) for one in range(3)])
    assert intake.has_room()
    intake.received([make(one, 1) for one in range(3)])
    assert not intake.has_room()
    intake.drop(part, 3)
    assert intake.has_room()
    intake.received([make(one) for one in range(3, 6)])
    assert not intake.has_room()
    intake.remove(part)
    assert intake.has_room()
    intake.drop(part, 6)
    told = len(intake.reader._commands)
    intake.begin(part)
    assert len(intake.reader._commands) == told
    intake.received([make(one, 1) for one in range(3, 5)])
    assert not intake.has_room()
    intake.remove(other)
    assert intake.has_room()
    assert not intake.parts


def test_a_partition_that_cannot_go_on_leaves_room_for_later_ones(settings, clock):
    intake = make_small(settings)
    stuck = take(intake, 0)
    intake.begun(PLACE)
    for first in range(0, 6, 2):
        intake.received([make(one) for one in (first, first + 1)])
    assert not intake.has_room()
    # It has all the room, since it was the only one. Now another one comes.
    other = take(intake, 0, 1)
    intake.begun(("orders", 1))
    clock.now += 0.4
    assert not intake.has_room()
    clock.now += 0.2
    assert intake.has_room()
    assert (stuck.is_paused, other.is_paused) == (True, False)
    assert stuck.waiting_bytes <= 500
    assert offsets(stuck) == [0, 1]
    # What was on its way lies behind what it has let go.
    intake.received([make(one) for one in (6, 7)])
    assert offsets(stuck) == [0, 1]
    intake.received([make(one, 1) for one in range(4)])
    assert intake.has_room()
    assert offsets(other) == [0, 1, 2, 3]
    # It goes on, and is read from the first record that it has let go.
    told = len(intake.reader._commands)
    intake.drop(stuck, 2)
    assert (stuck.is_paused, stuck.next_fetch) == (False, 2)
    assert len(intake.reader._commands) == told + 1
    intake.received([make(8)])
    assert offsets(stuck) == []
    intake.begun(PLACE)
    intake.received([make(2)])
    # The bytes of both count again.
    assert not intake.has_room()
    intake.received([make(one) for one in range(3, 6)])
    assert offsets(stuck) == [2, 3, 4, 5]


def test_a_partition_is_paused_only_while_all_are_full_for_long(settings, clock):
    intake = make_small(settings)
    part = take(intake, 0)
    intake.begun(PLACE)
    for first in (0, 5):
        intake.received([make(one) for one in range(first, first + 5)])
        assert not intake.has_room()
        clock.now += 0.4
        intake.drop(part, first + 5)
        assert intake.has_room()
    assert not part.is_paused
    # One lot is kept, however large it is.
    intake.received([make(one) for one in range(10, 20)])
    assert not intake.has_room()
    clock.now += 0.6
    assert intake.has_room()
    assert part.is_paused
    assert offsets(part) == [*range(10, 20)]


def test_a_position_that_was_told_is_where_reading_goes_on(settings, clock):
    intake = make_small(settings)
    part = take(intake, 0)
    intake.begun(PLACE)
    for first in (0, 5):
        intake.received([make(one) for one in range(first, first + 5)])
    assert not intake.has_room()
    clock.now += 0.6
    assert intake.has_room()
    assert (part.is_paused, part.next_fetch) == (True, 5)
    intake.drop(part, 8)
    assert (part.is_paused, part.next_fetch) == (False, 8)
