"""The watch of a group's lag leaves no thread behind when it stops."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

from jobs_lib.reexport import lag
from jobs_lib.reexport.lag import LagWatch


def test_a_look_that_outlasts_the_stop_leaves_nobody_who_asks_kafka(
    monkeypatch, wait_for
):
    looks, may_go_on = threading.Event(), threading.Event()
    asking: list[Any] = []

    class Positions:
        def __init__(self, *_, **__):
            asking.append(self)
            self.is_stopped = False

        def start(self):
            pass

        def stop(self):
            self.is_stopped = True

    def find_watched(_):
        looks.set()
        may_go_on.wait(30)
        return [(1, "topic", "group")]

    monkeypatch.setattr(lag, "_LAST_SECONDS", 0.05)
    monkeypatch.setattr(lag, "Positions", Positions)
    monkeypatch.setattr(lag, "ask_lag", lambda *_, **__: None)
    database = SimpleNamespace(connect=lambda *_, **__: nullcontext())
    watch = LagWatch(cast("Any", database), cast("Any", None))
    monkeypatch.setattr(watch, "_find_watched", find_watched)
    watch.start()
    assert looks.wait(30)
    watch.stop()
    may_go_on.set()
    wait_for(lambda: not watch._loop._thread.is_alive(), what="the look has ended")
    assert [one.is_stopped for one in asking] == [True]
