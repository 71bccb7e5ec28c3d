"""A service stops and ends also where no thread can be started, or a part fails."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from jobs_lib.service import service as module
from jobs_lib.service.service import Service
from jobs_lib.service.stopping import telling
from jobs_lib.service.supervisor import CUT_OFF
from tests.support.apps import make_app


class NoThread(Exception):
    """Ends a start that the test does not need."""


@pytest.fixture
def service():
    """A service that has not started."""
    return Service(make_app("postgresql://nobody@127.0.0.1:1/none"), ["relay"])


def test_a_stop_goes_on_without_a_word_where_no_thread_starts(monkeypatch):
    class Late(threading.Timer):
        def start(self) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading, "Timer", Late)
    waited = False
    with telling(list, 25):
        waited = True
    assert waited


def test_a_part_that_does_not_stop_keeps_no_other_one_of_the_service(service):
    stopped: list[str] = []

    class Part:
        def __init__(self, name: str, error: Exception | None = None) -> None:
            self.name, self.error = name, error

        def start(self) -> None:
            pass

        def stop(self) -> None:
            stopped.append(self.name)
            if self.error is not None:
                raise self.error

    for part in (Part("first"), Part("broken", ValueError("no")), Part("last")):
        service._start_part(part)
    with pytest.raises(ValueError, match="no"):
        service.stop()
    assert stopped == ["last", "broken", "first"]
    assert service.stop()


@pytest.mark.parametrize("asked_before", [False, True])
def test_the_order_to_end_at_once_is_obeyed_where_no_thread_starts(
    monkeypatch, service, asked_before
):
    handlers = []
    ended: list[int] = []

    def refuse(timeout):
        raise RuntimeError("can't start new thread")

    def start():
        raise NoThread

    monkeypatch.setattr(
        module, "handle_signals", lambda _, handle: handlers.append(handle)
    )
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(service.process, "abandon", refuse)
    monkeypatch.setattr(service, "start", start)
    with pytest.raises(NoThread):
        service.run()
    if asked_before:
        handlers[0](signal.SIGTERM)
        assert ended == []
    with pytest.raises(RuntimeError, match="thread"):
        handlers[0](signal.SIGTERM if asked_before else signal.SIGQUIT)
    assert ended == [CUT_OFF]
