"""A re-synchronisation ends, or can be stopped, whatever it waits for."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobs_lib.consuming import resync
from jobs_lib.service.resync import _read
from tests.support.apps import heard, make_app
from tests.support.clock import Clock


@pytest.mark.expects("loop.failed")
def test_a_resync_stops_while_it_waits_for_the_database(wait_for):
    settings = make_app("postgresql://nobody@127.0.0.1:1/none").settings
    declared = SimpleNamespace(is_read_model=False, is_called=bool)
    work = SimpleNamespace(settings=settings, make_subscription=lambda: declared)
    stopping = threading.Event()
    ended: list[bool] = []

    def read() -> None:
        ended.append(_read("test", cast("Any", work), lambda parts: None, stopping))

    with heard("loop.failed") as failures:
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        wait_for(lambda: failures, what="the start waits")
        stopping.set()
        reader.join(10)
    assert ended == [False]


@pytest.fixture
def pass_ends(monkeypatch):
    """A function that reaches ends in so many seconds each; returns how many it took.

    It returns None if the last ones are not enough, either.
    """
    clock = Clock()
    monkeypatch.setattr(resync, "time", clock)
    monkeypatch.setattr(resync, "find_places", lambda *_: {0: int(clock.now)})
    declared = SimpleNamespace(model=object(), topic="orders")
    work = resync.Resync(cast("Any", None), cast("Any", None), cast("Any", declared))
    monkeypatch.setattr(work, "_open", contextlib.nullcontext)
    monkeypatch.setattr(work, "_find_removing", lambda connection: ("orders",))

    def reach(*seconds: float) -> int | None:
        for number, passed in enumerate(seconds):
            clock.now += passed
            if not work.raise_ends():
                return number
        return None

    return reach


def test_a_resync_ends_although_its_gate_always_lags(pass_ends):
    assert pass_ends(*10 * [61.0]) == 2


def test_a_resync_takes_newer_ends_as_long_as_they_are_reached_sooner(pass_ends):
    assert pass_ends(3_600, 600, 100, 59) == 3
    # What has come while rows went is reached late.
    assert pass_ends(61) == 0
