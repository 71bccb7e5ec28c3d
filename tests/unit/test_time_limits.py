"""The limits of handlers hold, whatever becomes of the thread that watches them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from jobs_lib.consuming.blame import is_of_record
from jobs_lib.consuming.time_limits import TimedCall, TimeLimits
from jobs_lib.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Callable


def time_call(cancel: Callable[[], None]) -> TimedCall:
    """A call whose time is over at once."""
    return TimedCall("the handler", {}, 0.0, cancel, str)


def test_a_call_is_cancelled_although_an_earlier_one_could_not_be_watched(monkeypatch):
    def refuse(_) -> None:
        raise RuntimeError("can't start new thread")

    limits, wrong, right = TimeLimits(), threading.Event(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError), limits.watch(time_call(wrong.set)):
            raise AssertionError("it runs without a limit")
    with (
        pytest.raises(RecordError, match="took longer"),
        limits.watch(time_call(right.set)),
    ):
        right.wait(10)
    assert right.is_set()
    # Its connection may do something else by now.
    assert not wrong.is_set()


@pytest.mark.guarantee("W70", "W78")
@pytest.mark.parametrize("error", [None, ValueError("no price")], ids=["well", "badly"])
def test_a_record_is_not_at_fault_for_a_call_that_took_too_long(error):
    limits = TimeLimits()

    def call() -> None:
        with limits.watch(time_call(lambda: None)):
            if error is not None:
                raise error

    with pytest.raises(RecordError, match="took longer") as late:
        call()
    assert not is_of_record(late.value)
