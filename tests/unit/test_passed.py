"""Passed-over jobs are kept by value, and taken when their value has room."""

from __future__ import annotations

import pytest

from jobs_lib.executor.claiming import passed as module
from jobs_lib.executor.claiming.passed import Passed

ORIGINS = {"local/0", "local/1"}


@pytest.fixture
def passed():
    """Passed jobs of two values in two origins, with room for two of each value."""
    passed = Passed()
    passed.room = lambda value: 2
    for job_id in range(1, 7):
        passed.add(f"local/{job_id % 2}", "a" if job_id < 5 else "b", job_id)
    return passed


def test_jobs_of_each_value_are_taken_up_to_its_room(passed):
    taken = passed.take(ORIGINS, ())
    assert sorted(value for value, _, _ in taken) == ["a", "a", "b", "b"]
    assert len(passed) == 2
    assert {*passed.values} == {"a"}
    # This value yields no more jobs until it is marked to have room again.
    assert passed.take(ORIGINS, ()) == []
    passed.hungry.add("a")
    assert len(passed.take(ORIGINS, ())) == 2
    assert len(passed) == 0
    assert not passed.values


def test_the_oldest_passed_jobs_of_an_origin_are_taken_first(passed):
    taken = passed.take({"local/1"}, ())
    assert [job_id for value, _, job_id in taken if value == "a"] == [1, 3]


def test_a_job_passed_over_twice_is_kept_once(passed):
    passed.add("local/1", "a", 1)
    assert len(passed) == 6
    assert 1 in passed


def test_values_that_a_claim_already_asks_for_wait(passed):
    assert {value for value, _, _ in passed.take(ORIGINS, {"a"})} == {"b"}
    assert len(passed.take(ORIGINS, ())) == 2


def test_values_of_origins_that_are_paused_are_taken_once_they_are_not(passed):
    assert passed.take((), ()) == []
    assert len(passed.take(ORIGINS, ())) == 4


def test_a_released_origin_takes_its_passed_jobs_along(passed):
    passed.release(["local/0"])
    assert len(passed) == 3
    passed.release(["local/1"])
    assert len(passed) == 0
    assert not passed.values


def test_the_number_of_passed_jobs_is_limited(passed, monkeypatch):
    monkeypatch.setattr(module, "MOST", 6)
    passed.add("local/0", "c", 7)
    assert passed.is_overflown
    assert len(passed) == 6
    passed.clear()
    assert not passed.is_overflown
