"""The queue of times that a process keeps for a type with a rate."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from jobs_lib import Job, Rate
from jobs_lib.executor.running import throttle as module
from jobs_lib.executor.running.throttle import Throttle
from jobs_lib.jobs.job import RateLimited
from tests.support.apps import make_app

RATE = Rate(10)
NEW = SimpleNamespace(run_at=None)
"""A job that has just come."""
BACK = SimpleNamespace(run_at="then")
"""A job that was put off before."""


class World:
    """A throttle, on a clock that stands still, and the bucket of the database."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.tokens = 0.0
        self.asked = 0
        self._filled_at = self.now
        self.queries = {"take_starts": "take"}
        app = make_app("postgresql://nowhere")

        @app.job(rate=RATE)
        def text(job: Job) -> None: ...

        self._throttle = Throttle(app.jobs, self)  # type: ignore[arg-type]

    def monotonic(self) -> float:
        """The time that the test has set."""
        return self.now

    @contextlib.contextmanager
    def ask(self, *what: str):
        """Lend the database."""
        yield self

    def execute(self, query: str, wanted: dict[str, Any]) -> Any:
        """Answer as the function `take_starts` does."""
        self.asked += 1
        filled = self.tokens + (self.now - self._filled_at) * RATE.per_second
        self.tokens, self._filled_at = min(RATE.capacity, filled), self.now
        granted = min(wanted["wanted"], int(self.tokens + 1e-9))
        self.tokens -= granted
        seconds = 0.0 if granted else (1 - self.tokens) / RATE.per_second
        return SimpleNamespace(fetchone=lambda: (granted, seconds))

    def admit(self, job: Any) -> float:
        """Let a job start, or put it off; return the seconds, 0 for a start."""
        try:
            self._throttle._admit(job, "text", RATE)
        except RateLimited as refused:
            return refused.seconds
        return 0.0


@pytest.fixture
def world(monkeypatch) -> World:
    """A throttle on a clock that the test sets."""
    world = World()
    monkeypatch.setattr(module, "time", world)
    return world


def test_new_jobs_do_not_wait_behind_jobs_that_were_put_off_and_never_come_back(world):
    waits = [world.admit(NEW) for _ in range(36_000)]
    assert waits[-1] == pytest.approx(3_600, abs=1)
    # All are cancelled. Meanwhile the bucket has filled up.
    world.now += 5
    waits = [world.admit(NEW) for _ in range(20)]
    assert waits[:8] == [0] * 8
    # The others queue from now on, each at a time of its own.
    assert waits[8:] == pytest.approx([0.1 * n for n in range(1, 13)])


def test_new_jobs_wait_behind_jobs_that_were_put_off_and_come_back_in_time(world):
    booked = [world.now + world.admit(NEW) for _ in range(1_200)]
    asked = world.asked
    late = 0.05  # they are found a moment after their time
    for at in booked[:600]:
        world.now = at + late
        assert world.admit(BACK) == 0
        assert world.admit(NEW) > 59
    # Nobody asked but those that came back.
    assert world.asked - asked <= 600


def test_new_jobs_use_what_jobs_that_were_put_off_leave(world):
    booked = [world.now + world.admit(NEW) for _ in range(1_200)]
    # Every second one is cancelled.
    started = 0
    for at in booked[:600:2]:
        world.now = at
        world.admit(BACK)
        started += world.admit(NEW) == 0
    assert started > 200
