"""Passed-over jobs are kept by value, and taken when their value has room."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import pytest

from jobs_lib.executor.claiming import passed as module
from jobs_lib.executor.claiming.passed import Passed
from jobs_lib.executor.claiming.refills import Refills
from jobs_lib.executor.lane import ClaimedJob, Finished, Lane
from jobs_lib.executor.limiting.limiter import Limiter
from jobs_lib.executor.limiting.slots import Slots
from jobs_lib.executor.section import Section
from jobs_lib.jobs.limit import Limit
from jobs_lib.ownership.lease import UNLIMITED
from tests.support.claimed import make_claimed

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


@pytest.fixture
def limited() -> tuple[Limiter, Finished, Passed, list[ClaimedJob], list[int]]:
    """A limiter in which enough jobs of a value wait, so that one was passed over.

    There are two dispatchers: the jobs of one wait here, and the other has passed over
    one. The last list has the numbers of those that are woken.
    """
    workers: Any = Mock(ran=0, size=4)
    section = Section(frozenset({"work"}), limit=Limit(1, "tenant"), type_name="work")
    slots = Slots(section, UUID(int=1), lambda: UNLIMITED, 30.0, lambda: True)
    limiter = Limiter(workers, slots, is_async=False)
    dispatchers = [(Finished(), Passed()) for _ in range(2)]
    woken: list[int] = []
    for number, (finished, passed) in enumerate(dispatchers):
        limiter.serve(finished, passed)
        finished.wake = partial(woken.append, number)
    (ours, _), (_, theirs) = dispatchers
    lane = Lane("o", 1, None, 1, UUID(int=1), ours)
    jobs = [make_claimed(lane, number) for number in range(1, 33)]
    for job in jobs:
        job.value = "v"
    limiter.put(jobs)
    theirs.add("p", "v", 40)
    assert theirs.take({"p"}, ()) == []
    woken.clear()
    return limiter, ours, theirs, jobs, woken


def test_what_was_passed_over_comes_once_all_that_waited_is_taken_back(limited):
    limiter, ours, theirs, jobs, woken = limited
    assert limiter.take_back(ours) == jobs
    # None of them may come back: another process has their origin by now.
    assert woken == [1]
    assert theirs.take({"p"}, ()) == [("v", "p", 40)]


@pytest.mark.parametrize("end", ["wanted", "aborted"])
def test_what_was_passed_over_comes_though_the_last_turn_had_to_end(limited, end):
    limiter, _, theirs, jobs, woken = limited
    limiter.prepare()
    limiter._read_count([("v", 1)])
    line = limiter._lines["v"]
    assert [line.turn.take() for _ in jobs] == jobs
    woken.clear()
    if end == "wanted":
        # Another process wants the slot.
        line.allowed = 0
        assert line.turn.take() is None
    else:
        line.turn.abort()
    assert 1 in woken
    assert theirs.take({"p"}, ()) == [("v", "p", 40)]


@pytest.mark.parametrize("wanted", [{1: "local/1"}, {}], ids=["paused", "released"])
def test_a_value_is_not_held_up_by_a_job_of_an_origin_that_may_not_run(wanted):
    passed = Passed()
    passed.room = lambda value: 1
    refills = Refills(passed, "tenant")
    for number in (1, 2):
        passed.add(f"local/{number}", "a", number)
    # There was no room for it in the claim that was to ask for it.
    assert refills.choose({"local/1", "local/2"}, {}) == {1: "local/1"}
    assert refills.choose({"local/1", "local/2"}, {1: "local/1"}) == {}
    assert refills.choose({"local/2"}, wanted) == {2: "local/2"}
