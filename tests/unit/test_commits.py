"""Kafka is told again and again where the owned partitions go on."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest

from jobs_lib.consuming import commits
from jobs_lib.consuming.commits import Commits
from jobs_lib.consuming.measures import Measures
from jobs_lib.consuming.progress import Progress


@pytest.fixture
def partitions() -> dict[tuple[str, int], Progress]:
    """Three partitions; in the last one nothing was applied."""
    stored = {0: 10, 1: 20, 2: None}
    return {
        ("t", number): Progress(("t", number), epoch=1, stored=at)
        for number, at in stored.items()
    }


@pytest.fixture
def member() -> Any:
    """A member of the group."""
    return Mock(group="g")


@pytest.fixture
def told(member, partitions):
    """What is told if it is time again since so many seconds."""
    lock = threading.Condition()
    made = Commits(member, lock, Measures(member, partitions, lock))

    def told(late: float) -> dict[tuple[str, int], int] | None:
        member.commit.reset_mock()
        made._again_at = time.monotonic() - late
        made.tell(now=True)
        return member.commit.call_args and member.commit.call_args.args[0]

    return told


def test_all_offsets_are_told_again(told):
    assert told(0.0) == {("t", 0): 10, ("t", 1): 20, ("t", 2): 0}


@pytest.mark.parametrize("why", ["replaced", "ended"])
def test_what_may_be_another_place_is_not_told_again(told, partitions, why):
    # Its topic was made anew, or it ended before: it has records that nobody handled.
    setattr(partitions["t", 0], why, True)
    partitions["t", 1].in_doubt = True
    partitions["t", 2].leaving = True
    assert told(0.0) == {("t", 0): 0}


def test_a_process_that_stood_still_tells_nothing_again_at_once(told):
    assert told(commits._AGAIN + 1) is None
    assert told(-1.0) is None
