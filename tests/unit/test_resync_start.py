"""A re-synchronisation can be stopped while its service waits for a server."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobs_lib.service.resync import _read
from tests.support.apps import heard, make_app


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
