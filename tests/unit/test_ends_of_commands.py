"""A command says how its work has ended, also when it ends at an odd moment."""

from __future__ import annotations

import signal
import threading
from typing import Any, cast
from unittest.mock import Mock

import pytest

from jobs_lib import reexport as api
from jobs_lib.cli import reexport_output
from jobs_lib.cli.readmodel import _STOPPED, _resync
from jobs_lib.cli.reexport_output import in_background, show_bar
from jobs_lib.errors import ReexportError
from jobs_lib.service import limits
from jobs_lib.service import resync as module
from jobs_lib.service.supervisor import STOPPING, end_while_loading

NOBODY = cast("Any", None)
# A signal comes while Python clears the modules of a process that has ended.
LATE = """
import signal, sys
from jobs_lib.service.supervisor import end_while_loading

class Late:
    number = int(sys.argv[1])

    def __del__(self):
        signal.raise_signal(self.number)
        print("it has cleared its modules", flush=True)

end_while_loading()
late = Late()
sys.exit(3)
"""


@pytest.fixture
def handlers():
    """Signals are handled after the test as they were before it."""
    before = [(number, signal.getsignal(number)) for number in STOPPING]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_a_load_that_fails_while_it_is_asked_for_is_no_success(monkeypatch):
    may_fail = threading.Event()

    def load():
        may_fail.wait(30)
        raise ReexportError("it cannot be loaded")

    is_alive = threading.Thread.is_alive

    def ask(thread):
        if thread.name == "re-export":
            may_fail.set()
            thread.join(30)
        return is_alive(thread)

    loaded = in_background(load)
    monkeypatch.setattr(threading.Thread, "is_alive", ask)
    with pytest.raises(ReexportError, match="cannot be loaded"):
        loaded()


def test_a_watch_of_what_was_never_begun_ends_with_the_reason(monkeypatch):
    def status(*_):
        raise ReexportError("'flight' was never re-exported")

    def sleep(_):
        raise AssertionError("it waits for ever")

    monkeypatch.setattr(api, "status", status)
    # Other threads of the process sleep as before.
    monkeypatch.setattr(reexport_output, "time", Mock(sleep=sleep))
    with pytest.raises(ReexportError, match="never re-exported"):
        show_bar(NOBODY, "flight", lambda: True)


@pytest.mark.parametrize("number", STOPPING)
def test_a_resync_that_is_stopped_by_any_signal_is_no_success(
    monkeypatch, handlers, number
):
    def resync(*_, stopping, **__):
        signal.raise_signal(number)
        assert stopping.wait(30)

    tuned: list[bool] = []
    monkeypatch.setattr(limits, "tune_memory", lambda: tuned.append(True))
    monkeypatch.setattr(module, "resync", resync)
    end_while_loading(_STOPPED)
    with pytest.raises(SystemExit) as ended:
        _resync(NOBODY, "model", "group")
    assert ended.value.code == _STOPPED
    # It reads as many records as a service does.
    assert tuned


def test_a_resync_that_is_stopped_before_it_begins_is_no_success(monkeypatch, handlers):
    from jobs_lib.cli import readmodel

    def load(_):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(readmodel, "load_app", load)
    with pytest.raises(SystemExit) as ended:
        readmodel.readmodel_resync.main(["app:app", "model"], standalone_mode=False)
    assert ended.value.code == _STOPPED


@pytest.mark.guarantee("J19", "FP19")
@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_that_comes_too_late_leaves_the_exit_code(run_process, number):
    process = run_process("-c", LATE, str(int(number)))
    assert process.wait(timeout=60) == 3, process.output
    assert process.lines == ["it has cleared its modules"]
