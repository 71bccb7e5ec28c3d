"""A look at new read models may take long: probes do not wait for each other's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

from jobs_lib.service.filling import Filling
from tests.support.apps import make_app


def test_a_probe_does_not_wait_for_the_look_of_another_one(monkeypatch):
    app = make_app("postgresql://nobody@127.0.0.1:1/none")
    declared = cast("Any", SimpleNamespace(is_read_model=True))
    filling = Filling(app.settings, app.database(), [declared])
    looks, may_end = threading.Event(), threading.Event()

    def look(_: object) -> str | None:
        looks.set()
        may_end.wait(30)
        return None

    monkeypatch.setattr(filling, "_explain", look)
    with ThreadPoolExecutor(2) as threads:
        try:
            first = threads.submit(filling.explain)
            assert looks.wait(30)
            second = threads.submit(filling.explain)
            told = "its read models are being looked at"
            assert second.result(timeout=5) == told
        finally:
            may_end.set()
        assert first.result(timeout=30) is None
    assert filling.explain() is None
