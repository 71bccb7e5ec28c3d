"""A part that does not get all its threads leaves none behind."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import MagicMock, Mock
from uuid import uuid4

import pytest

from jobs_lib.consuming.consumer import Consumer
from jobs_lib.executor import Executor
from jobs_lib.loop import Loop
from jobs_lib.outbox.relay import Relay
from jobs_lib.ownership import StaticSource
from jobs_lib.ownership.ownership import Ownership


@pytest.fixture
def second_fails(monkeypatch) -> list[Loop]:
    """Let the second loop that is started get no thread; the list has the first one."""
    started: list[Loop] = []
    start = Loop.start

    def start_once(self: Loop) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(Loop, "start", start_once)
    return started


def test_a_consumer_without_its_second_thread_leaves_none_behind(second_fails):
    declared = Mock(topic="t", after=(), block=None, waits_for_relay=False)
    consumer = Consumer(
        *(MagicMock(), Mock(group="a"), [declared], uuid4()),
        threads=2,
        block=100,
        block_seconds=1.0,
        prefetch_bytes=1_000_000,
        heartbeat=1.0,
        topic_ids=Mock(),
    )
    with pytest.raises(RuntimeError, match="can't start"):
        consumer.start()
    (first,) = second_fails
    assert not first._thread.is_alive()
    assert declared.close.called


def test_an_ownership_without_its_source_leaves_no_thread_behind(second_fails):
    class Watching(StaticSource):
        def start(self, changed: Any) -> None:
            Loop("watch", lambda: iter(())).start()

    ownership = Ownership(
        *(MagicMock(), Mock(has_left=False), "a", Watching([]), Mock()),
        interval=60,
        stale_after=60,
        handover_timeout=1,
    )
    with pytest.raises(RuntimeError, match="can't start"):
        ownership.start()
    (first,) = second_fails
    assert not first._thread.is_alive()


def test_a_relay_without_its_second_thread_leaves_none_behind(second_fails):
    relay: Any = Relay.__new__(Relay)
    relay._senders = [Loop("relay", lambda: iter(())) for _ in range(2)]
    relay._listener, relay._stopping, relay._patience = Mock(), threading.Event(), 5
    with pytest.raises(RuntimeError, match="can't start"):
        relay.start()
    (first,) = second_fails
    assert not first._thread.is_alive()
    assert relay._stopping.is_set()


def test_an_executor_without_its_second_dispatcher_leaves_none_behind(
    second_fails, monkeypatch
):
    dispatchers = [Loop("executor", lambda: iter(())) for _ in range(2)]
    monkeypatch.setattr(Executor, "_dispatchers", dispatchers)
    executor: Any = Executor.__new__(Executor)
    executor._pools = {"a": (workers := Mock())}
    with pytest.raises(RuntimeError, match="can't start"):
        executor.start()
    (first,) = second_fails
    assert first.stopping.is_set()
    assert workers.stop.called
