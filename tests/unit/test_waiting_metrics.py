"""Figures of what waits are there at each scrape, however seldom scrapes come."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from jobs_lib.operating.depths import Consumed, Depths
from jobs_lib.service import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.consuming.measures import Lag

FIGURES = (Depths(outbox=5), Consumed())


class Idle(threading.Event):
    """An event that tells whether somebody waits for it."""

    waited_for = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, and say so meanwhile."""
        self.waited_for = True
        try:
            return super().wait(timeout)
        finally:
            self.waited_for = False


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The reader's clock: `clock.now += 60` takes a minute."""
    made = SimpleNamespace(now=1_000.0)
    made.monotonic = lambda: made.now
    monkeypatch.setattr(metrics, "time", made)
    return made


@pytest.fixture
def reads(clock, monkeypatch) -> list[float]:
    """The times at which the database was read."""
    found: list[float] = []

    def read(_: Any) -> Depths:
        found.append(clock.now)
        return FIGURES[0]

    monkeypatch.setattr(metrics, "read_depths", read)
    monkeypatch.setattr(metrics, "read_consumed", lambda *_: FIGURES[1])
    return found


@pytest.fixture
def reader(clock, reads) -> Iterator[metrics._Reader]:
    """A reader that pauses for a short time only."""
    one = metrics._Reader(Mock(), list, 0.01)
    one._asked = Idle()
    one.start()
    yield one
    one.stop()


def test_a_scrape_long_after_the_one_before_has_figures(reader, clock, reads, wait_for):
    assert reader.ask() is None
    wait_for(lambda: reads, timeout=30, what="the first scrape starts the reading")
    for _ in range(3):
        clock.now += 120
        wait_for(lambda: reads[-1] == clock.now, timeout=30, what="it reads on")
        wait_for(lambda: reader._seen[0] == clock.now, timeout=30, what="it has read")
        assert reader.ask() == FIGURES


def test_the_reading_ends_some_minutes_after_the_last_scrape(
    reader, clock, reads, wait_for
):
    reader.ask()
    wait_for(lambda: reads, timeout=30, what="the first scrape starts the reading")
    clock.now += 600
    wait_for(lambda: reader._asked.waited_for, timeout=30, what="it waits for a scrape")
    clock.now += 600
    # Figures that are so old are not shown, and the scrape starts the reading again.
    assert reader.ask() is None
    wait_for(lambda: reads[-1] == clock.now, timeout=30, what="it reads again")


def test_kafka_is_asked_for_the_lag_between_scrapes(clock, reads, wait_for):
    positions = Mock()
    consumer = Mock(group="g", gated=(), find_waits=list, read_seconds=dict)
    asked: list[float] = []

    def find_lags(*_: object) -> dict[str, Lag]:
        asked.append(clock.now)
        return {}

    consumer.find_lags = find_lags
    shown = metrics.ServiceMetrics(
        Mock(),
        list,
        dict,
        consumers=lambda: [consumer],
        positions=lambda: positions,
        pause=0.01,
    )
    shown.start()
    try:
        shown.render()
        clock.now += 120
        wait_for(lambda: asked[-1] == clock.now, timeout=30, what="it asks again")
    finally:
        shown.stop()
