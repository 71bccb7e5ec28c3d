"""`/livez` fails for stuck threads, but not for long handlers or outages."""

from __future__ import annotations

import threading
import time

import pytest

from jobs_lib.devstack.ports import free_port
from jobs_lib.executor.dispatcher import Dispatcher
from jobs_lib.executor.running.threads import ThreadWorkers
from tests.support.apps import make_app, running
from tests.support.probes import ask_probe
from tests.support.proxy import Proxy

SILENT = 4.0
"""Four times the shortest answer that a thread may wait for."""


@pytest.fixture
def serve(url, monkeypatch):
    """An app with probes, whose threads count as dead after a short silence."""
    monkeypatch.setattr("jobs_lib.service.service.SILENT", SILENT)
    port = free_port()

    def make(at: str = url):
        app = make_app(at, database_timeout=1, probes_port=port, workers=1)

        def ask(path: str = "/livez") -> tuple[int, str]:
            return ask_probe(port, path)

        return app, ask

    return make


@pytest.mark.guarantee("O2", "FJ19")
@pytest.mark.parametrize(
    ("owner", "method", "name"),
    [
        (Dispatcher, "_collect", "jobs_lib executor"),
        (ThreadWorkers, "_watch", "jobs_lib worker"),
    ],
)
def test_a_stuck_or_ended_thread_fails_livez(
    serve, monkeypatch, wait_for, owner, method, name
):
    freed, stuck = threading.Event(), threading.Event()
    real = getattr(owner, method)

    def stand(self):
        if name.endswith("worker"):
            return None  # the thread ends
        if stuck.is_set():
            freed.wait(60)
        return real(self)

    monkeypatch.setattr(owner, method, stand)
    app, ask = serve()

    @app.job()
    def work(job) -> None: ...

    with running(app, "executor"):
        assert ask() == (200, "live")
        stuck.set()
        wait_for(lambda: ask()[0] == 503, timeout=60, what="it is not live")
        assert name in ask()[1]
        freed.set()


@pytest.mark.guarantee("O2")
def test_a_long_handler_does_not_fail_livez(serve, connect, wait_for):
    app, ask = serve()
    freed, begun = threading.Event(), threading.Event()

    @app.job()
    def work(job) -> None:
        begun.set()
        freed.wait(60)

    with running(app, "executor"):
        with connect() as connection:
            work.enqueue(connection)
        assert begun.wait(30)
        until = time.monotonic() + 2 * SILENT
        while time.monotonic() < until:
            assert ask() == (200, "live")
            time.sleep(0.2)
        freed.set()


@pytest.mark.slow
@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("O2", "J20")
def test_an_outage_does_not_fail_livez(serve, url, monkeypatch):
    with Proxy.before(url) as proxy:
        app, ask = serve(proxy.url(url))
        # A thread waits ten seconds for a new connection.
        monkeypatch.setattr("jobs_lib.service.service.SILENT", 20.0)

        @app.job()
        def work(job) -> None: ...

        app.topic("t", value=int)
        with running(app, "executor"):
            proxy.hold()
            until = time.monotonic() + 45
            while time.monotonic() < until:
                assert ask() == (200, "live")
                time.sleep(0.5)
            proxy.release()
