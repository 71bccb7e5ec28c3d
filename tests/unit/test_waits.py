"""The tests' waits are as long as the machine needs."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.waiting import read_busyness, wait_for


@pytest.fixture
def load(monkeypatch):
    """A function that sets how many threads want a processor, for each one."""

    def set_load(each: float) -> None:
        every = each * (os.cpu_count() or 1)
        monkeypatch.setattr(os, "getloadavg", lambda: (every, 0.0, 0.0))

    return set_load


def test_what_never_comes_is_named_after_its_time(load):
    load(0)
    began = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="in vain until: it comes"):
        wait_for(lambda: False, timeout=0.1, what="it comes")
    assert time.monotonic() - began >= 0.1


def test_a_busy_machine_gets_more_time(load):
    load(9)
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > 0.5, timeout=0.25)


@pytest.mark.parametrize(("each", "times"), [(0, 1), (3, 1), (6, 2), (1_000, 4)])
def test_the_time_grows_with_the_load_up_to_four_times(load, each, times):
    load(each)
    assert read_busyness() == times
