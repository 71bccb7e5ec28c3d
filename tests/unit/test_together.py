"""Parts that stop at the same time."""

from __future__ import annotations

from threading import Barrier, Event, Thread

import pytest

from jobs_lib.service import parts
from jobs_lib.service.parts import Together


class Part:
    """Notes what happens to it, and waits or fails where it is told to."""

    def __init__(self, told: list[str], name: str, barrier: Barrier | None = None):
        self._told = told
        self._name = name
        self._barrier = barrier
        self.fails_at = ""

    def start(self) -> None:
        self._note("start")

    def stop(self) -> None:
        if self._barrier is not None:
            self._barrier.wait(30)
        self._note("stop")

    def _note(self, step: str) -> None:
        if self.fails_at == step:
            raise ValueError(f"{self._name} does not {step}")
        self._told.append(f"{step} {self._name}")


def test_parts_start_in_order_and_each_stop_waits_for_no_other():
    told: list[str] = []
    barrier = Barrier(3)  # It opens only if all three stop at once.
    together = Together(Part(told, name, barrier) for name in "abc")
    together.start()
    assert told == ["start a", "start b", "start c"]
    together.stop()
    assert sorted(told[3:]) == ["stop a", "stop b", "stop c"]
    together.stop()
    assert len(told) == 6


def test_a_part_that_does_not_start_stops_those_before_it():
    told: list[str] = []
    made = [Part(told, name) for name in "abc"]
    made[2].fails_at = "start"
    with pytest.raises(ValueError, match="c does not start"):
        Together(made).start()
    assert sorted(told) == ["start a", "start b", "stop a", "stop b"]


def test_a_part_that_does_not_stop_keeps_no_other_one():
    told: list[str] = []
    made = [Part(told, name) for name in "abc"]
    made[1].fails_at = "stop"
    together = Together(made)
    together.start()
    with pytest.raises(ValueError, match="b does not stop"):
        together.stop()
    assert sorted(told[3:]) == ["stop a", "stop c"]


def test_parts_stop_where_the_interpreter_starts_no_thread(monkeypatch):
    told: list[str] = []

    class Late(Thread):
        def start(self) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(parts, "Thread", Late)
    together = Together(Part(told, name) for name in "ab")
    together.start()
    together.stop()
    assert told[2:] == ["stop b", "stop a"]


def test_a_stop_ends_only_when_all_have_ended():
    told: list[str] = []
    may_end = Event()
    slow, quick = Part(told, "slow"), Part(told, "quick")
    real = slow.stop

    def wait() -> None:
        may_end.wait(30)
        real()

    slow.stop = wait  # type: ignore[method-assign]
    together = Together([slow, quick])
    together.start()
    stopping = Thread(target=together.stop, daemon=True)
    stopping.start()
    stopping.join(0.2)
    assert stopping.is_alive()
    may_end.set()
    stopping.join(30)
    assert not stopping.is_alive()
    assert sorted(told[2:]) == ["stop quick", "stop slow"]
