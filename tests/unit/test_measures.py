"""How far a consumer is: what is not known is not guessed."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest

from jobs_lib.consuming.measures import Lag, Measures
from jobs_lib.consuming.progress import Progress
from jobs_lib.kafka.positions import KnownOffsets

WITHIN = 60.0


@pytest.fixture
def partitions() -> dict[tuple[str, int], Progress]:
    """Two partitions that are read, and one in which nothing was applied."""
    stored = {0: 10, 1: 20, 2: None}
    return {
        ("t", number): Progress(("t", number), epoch=1, stored=at, reading=True)
        for number, at in stored.items()
    }


@pytest.fixture
def member() -> Any:
    """A member that notes who asks for its positions."""
    return Mock(group="g")


@pytest.fixture
def measures(member, partitions) -> Measures:
    """The measures of these partitions."""
    return Measures(member, partitions, threading.Condition())


def know(ends: dict[int, int] | None, starts: dict[int, int] | None = None) -> Any:
    """What Kafka says of the topic."""
    starts = {0: 0, 1: 0, 2: 3} if starts is None else starts
    known = ends and KnownOffsets(3, ends, time.monotonic())
    return Mock(
        ask_ends=Mock(return_value=known),
        ask_starts=Mock(return_value=KnownOffsets(3, starts, time.monotonic())),
    )


def answer(member: Any, *positions: int) -> None:
    """Let the poll thread say how far the partitions are read."""
    (note,) = member.ask_positions.call_args.args
    note({("t", number): at for number, at in enumerate(positions)})


def test_a_partition_without_an_offset_lags_from_its_oldest_record_on(measures):
    found = measures.find_lags(know({0: 12, 1: 50, 2: 8}), WITHIN)
    assert found == {"t": Lag(2 + 30 + 5, 30)}


@pytest.mark.parametrize(
    "known",
    [know(None), know({0: 12, 1: 50}), know({0: 12, 1: 50, 2: 8}, {0: 0, 1: 0})],
    ids=["no ends", "no end of one", "no start of one"],
)
def test_a_topic_of_which_something_is_not_known_has_no_lag(measures, known):
    assert measures.find_lags(known, WITHIN) == {}


def test_a_partition_that_leaves_counts_no_more(measures, partitions):
    partitions["t", 1].leaving = True
    found = measures.find_lags(know({0: 12, 1: 50, 2: 8}), WITHIN)
    assert found == {"t": Lag(7, 5)}


def test_a_known_end_that_lies_before_the_offset_is_no_lag(measures, partitions):
    del partitions["t", 2]
    assert measures.find_lags(know({0: 4, 1: 21}), WITHIN) == {"t": Lag(1, 1)}


def test_what_has_no_records_any_more_is_no_lag(measures, member):
    known = know({0: 12, 1: 50, 2: 8})
    measures.find_lags(known, WITHIN)
    answer(member, 12, 49, 8)
    assert measures.find_lags(known, WITHIN) == {"t": Lag(1, 1)}


@pytest.mark.parametrize("mark", ["busy", "in_doubt", "not reading", "waiting"])
def test_where_something_may_wait_the_stored_offset_counts(
    measures, member, partitions, mark
):
    known = know({0: 12, 1: 20, 2: 3})
    measures.find_lags(known, WITHIN)
    answer(member, 12, 20, 3)
    assert measures.find_lags(known, WITHIN) == {"t": Lag(0, 0)}
    progress = partitions["t", 0]
    if mark == "waiting":
        progress.waiting.append(Mock())
    elif mark == "not reading":
        progress.reading = False
    else:
        setattr(progress, mark, True)
    # An earlier answer would hide what has come since.
    answer(member, 13, 20, 3)
    assert measures.find_lags(known, WITHIN) == {"t": Lag(2, 2)}


def test_an_offset_that_was_set_back_counts_at_once(measures, member, partitions):
    known = know({0: 12, 1: 20, 2: 3})
    measures.find_lags(known, WITHIN)
    answer(member, 12, 20, 3)
    partitions["t", 0].stored = 4
    assert measures.find_lags(known, WITHIN) == {"t": Lag(8, 8)}


def test_seconds_add_up_by_topic(measures):
    for topic, seconds in [("t", 1.5), ("u", 1.0), ("t", 2.0)]:
        measures.add_seconds(topic, seconds)
    assert measures.read_seconds() == {"t": 3.5, "u": 1.0}
