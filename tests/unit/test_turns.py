"""Turns: they end where nothing waits, or where there are too many of them."""

from __future__ import annotations

from typing import Any

import pytest

from jobs_lib.executor.turn import Line, Turn


@pytest.fixture
def ends():
    """The ends of turns, and whether they had to end."""
    return []


@pytest.fixture
def line(ends):
    """A line with a turn, which ends whenever it asks to."""

    def end(at, must):
        ends.append((at.value, must))
        return True

    line = Line("a", end, is_async=False)
    line.turns = line.allowed = 1
    return line


def test_a_turn_takes_what_waits_and_ends(line, ends):
    line.waiting.extend(["first", "second"])
    turn = line.turn
    assert [turn.take(), turn.take(), turn.take()] == ["first", "second", None]
    assert ends == [("a", False)]
    assert line.ran == 2


def test_a_turn_goes_on_where_something_has_come_before_its_end(line):
    late: Any = object()

    def end(at, must):
        at.waiting.append(late)
        return False

    assert Turn(line, end, is_async=False).take() is late


def test_a_turn_ends_before_its_next_job_where_there_are_too_many(line, ends):
    line.waiting.append("first")
    line.allowed = 0
    assert line.turn.take() is None
    assert ends == [("a", True)]
    assert [*line.waiting] == ["first"]


def test_a_long_turn_stands_back_for_once(line):
    assert [line.turn.is_long() for _ in range(100)].index(True) == 49
