"""The records that wait: those of an earlier fetch are not taken for new ones."""

from __future__ import annotations

from confluent_kafka import Message

from jobs_lib.coordination.intake import Intake, Part
from jobs_lib.coordination.messages import Shared

GROUP = "shop.mailer"
PLACE = ("orders", 0)


def make(offset: int) -> Message:
    """Make a message of Kafka's client."""
    return Message(topic="orders", partition=0, offset=offset, key=b"k", value=b"value")


def take(intake: Intake, position: int) -> Part:
    """Hold the partition from a position on, and begin to read it."""
    part = Part(Shared(GROUP, *PLACE), position)
    intake.add(part)
    part.begin(intake.reader)
    return part


def offsets(part: Part) -> list[int | None]:
    return [one.offset() for one in part.waiting]


def test_records_that_were_fetched_for_an_earlier_holding_are_dropped(settings):
    intake = Intake(settings, GROUP)
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
    intake = Intake(settings, GROUP)
    part = take(intake, 4)
    intake.begun(PLACE)
    intake.received([make(one) for one in range(2, 8)])
    assert offsets(part) == [4, 5, 6, 7]
    intake.received([make(one) for one in range(6, 8)])
    assert offsets(part) == [4, 5, 6, 7]
    assert part.waiting_bytes == 4 * (len(b"k") + len(b"value") + 200)
    part.pop(6, intake.reader, intake.share)
    assert (offsets(part), part.position) == ([6, 7], 6)
    part.pop(8, intake.reader, intake.share)
    assert part.waiting_bytes == 0
