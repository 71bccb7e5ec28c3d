"""A loop continues after each failure, waits longer each time, and ends when asked."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from jobs_lib.backoff import Retry
from jobs_lib.loop import Loop
from tests.support.apps import heard
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.expects("loop.failed")

SHORT = Retry(first=0.001, cap=0.001)


class Delays(Retry):
    """Notes for which number of failures in a row it was asked."""

    asked: list[int]

    def delay(self, attempt: int) -> float:
        """Wait hardly at all."""
        self.asked.append(attempt)
        return 0.0


def test_a_loop_reports_each_failure_and_begins_its_work_again():
    begun: list[int] = []

    def work() -> Iterator[None]:
        begun.append(1)
        if len(begun) < 3:
            raise SystemExit(f"failure {len(begun)}")
        yield
        loop.stopping.wait()

    loop = Loop("mill", work, retry=SHORT)
    with heard("loop.failed") as events:
        loop.start()
        wait_for(lambda: len(begun) == 3)
        loop.stop()
    told = [(fields["loop"], str(fields["error"])) for _, fields in events]
    assert told == [
        ("mill", "SystemExit: failure 1"),
        ("mill", "SystemExit: failure 2"),
    ]
    assert loop.pulse.name == "jobs_lib mill"


def test_a_round_that_went_well_ends_a_row_of_failures():
    delays = Delays()
    object.__setattr__(delays, "asked", [])
    rounds = iter([False, False, True, False, True])

    def work() -> Iterator[None]:
        for went_well in rounds:
            if not went_well:
                raise OSError("no")
            yield

    loop = Loop("mill", work, retry=delays)
    loop.start()
    wait_for(lambda: not loop.pulse.is_alive())
    assert delays.asked == [1, 2, 1]


def test_a_stop_ends_the_wait_after_a_failure_and_begins_no_round():
    begun: list[int] = []
    failed: list[BaseException] = []
    ended: list[str] = []

    def work() -> Iterator[None]:
        begun.append(1)
        raise OSError("no")
        yield

    def end() -> None:
        ended.append(threading.current_thread().name)

    patient = Retry(first=3_600.0, cap=3_600.0)
    loop = Loop("mill", work, retry=patient, failed=failed.append, ended=end)
    loop.start()
    wait_for(lambda: failed)
    loop.stop(60)
    assert not loop.pulse.is_alive()
    assert len(begun) == 1
    assert ended == ["jobs_lib mill"]


def test_a_loop_beats_after_each_round():
    go_on = threading.Semaphore(0)

    def work() -> Iterator[None]:
        while not loop.stopping.is_set():
            go_on.acquire()
            yield

    loop = Loop("mill", work)
    loop.start()
    wait_for(lambda: loop.pulse.beats == 1)
    go_on.release()
    wait_for(lambda: loop.pulse.beats == 2)
    loop.stopping.set()
    go_on.release()
    loop.stop()


def test_the_stop_of_an_unstarted_loop_ends_a_loop_that_shares_its_event():
    stopping = threading.Event()

    def work() -> Iterator[None]:
        stopping.wait()
        yield

    first, second = (Loop("mill", work, stopping=stopping) for _ in range(2))
    first.start()
    second.stop()
    wait_for(lambda: not first.pulse.is_alive())
