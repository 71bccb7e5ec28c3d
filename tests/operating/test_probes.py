"""The probes give fixed answers on IPv4 and IPv6 to every client."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest
from prometheus_client import REGISTRY

from jobs_lib.errors import ConfigurationError
from jobs_lib.service import probes
from jobs_lib.service.probes import Probes
from jobs_lib.telemetry.metrics import Metrics
from tests.support.apps import heard

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

V4, V6 = "127.0.0.1", "::1"


def has_ipv6() -> bool:
    """Tell whether this machine has IPv6 enabled."""
    try:
        socket.create_server((V6, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def answering(find_unready=lambda: None, **more):
    """Answer probes on some free port; yield the port."""
    # For port 0 the kernel chooses a port that is free for all addresses.
    one = Probes(0, find_unready, **more)
    one.start()
    try:
        yield one._server.socket.getsockname()[1]
    finally:
        one.stop()


def ask(port: int, path: str, host: str = V4, method: str = "GET") -> tuple[int, str]:
    """The status and the text of an answer."""
    where = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(f"http://{where}:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def is_heard(port: int) -> bool:
    """Tell whether a client gets an answer now."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return ask(port, "/livez") == (200, "live")
    return False


def test_the_probes_answer_live_and_ready():
    reasons = ["starting or stopping"]
    with answering(lambda: reasons[0] if reasons else None) as port:
        assert ask(port, "/livez") == (200, "live")
        assert ask(port, "/readyz") == (503, "starting or stopping")
        reasons.clear()
        assert ask(port, "/readyz?verbose") == (200, "ready")
        assert ask(port, "/readyz", method="HEAD") == (200, "")
        assert ask(port, "/other")[0] == 404
        assert ask(port, "/livez", method="POST")[0] == 501


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_the_probes_listen_on_ipv4_and_ipv6():
    with answering() as port:
        for host in (V4, V6):
            assert ask(port, "/livez", host) == (200, "live")


def test_a_machine_without_ipv6_is_served_by_ipv4(monkeypatch):
    real = socket.create_server

    def create(address, *, family=socket.AF_INET, **options):
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", create)
    with answering() as port:
        assert ask(port, "/livez") == (200, "live")


def test_silent_clients_do_not_delay_the_probes():
    with answering() as port, contextlib.ExitStack() as clients:
        for _ in range(probes._AT_ONCE - 2):
            clients.enter_context(socket.create_connection((V4, port)))
        assert ask(port, "/livez") == (200, "live")


def test_a_crowd_of_silent_clients_is_dropped_and_leaves_no_thread(
    monkeypatch, wait_for
):
    monkeypatch.setattr(probes._Handler, "timeout", 0.5)
    before = threading.active_count()
    with answering() as port:
        silent = [socket.create_connection((V4, port)) for _ in range(200)]
        try:
            wait_for(
                lambda: is_heard(port),
                timeout=30,
                what="those that do not speak are given up",
            )
            wait_for(
                lambda: threading.active_count() <= before + 1,
                timeout=30,
                what="their threads have ended",
            )
        finally:
            for one in silent:
                one.close()


def test_probes_that_got_no_thread_leave_their_places_to_later_ones(monkeypatch):
    class Refusing(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with answering() as port:
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Thread", Refusing)
            for _ in range(probes._AT_ONCE):
                assert not is_heard(port)
        assert ask(port, "/livez") == (200, "live")


def test_a_readiness_check_that_raises_is_reported_and_not_ready():
    def find_unready() -> str | None:
        raise RuntimeError("no answer")

    with heard("loop.failed") as failed, answering(find_unready) as port:
        assert ask(port, "/readyz")[0] == 503
        assert ask(port, "/livez") == (200, "live")
    ((_, fields),) = failed
    assert (fields["loop"], fields["error"]) == ("probes", "RuntimeError: no answer")


@pytest.mark.parametrize(
    ("path", "given"), [("/metrics", "render"), ("/livez", "find_silent")]
)
def test_what_raises_is_reported_and_answered_with_500(path, given):
    def fail() -> list[str]:
        raise RuntimeError("no answer")

    with heard("loop.failed") as failed, answering(**{given: fail}) as port:
        assert ask(port, path) == (500, "it failed to find out")
        assert ask(port, "/readyz") == (200, "ready")
    ((_, fields),) = failed
    assert (fields["loop"], fields["error"]) == ("probes", "RuntimeError: no answer")


class Broken:
    """A collector of the application that has lost what it measures."""

    def describe(self) -> list[Metric]:
        """Nothing, so that it is not asked before the first scrape."""
        return []

    def collect(self) -> list[Metric]:
        """Raise an error."""
        raise LookupError("no pool")


def test_a_collector_of_the_application_that_raises_leaves_the_other_metrics():
    metrics = Metrics()
    broken = Broken()
    REGISTRY.register(broken)
    try:
        with (
            heard("loop.failed") as failed,
            answering(render=metrics.render) as port,
        ):
            status, text = ask(port, "/metrics")
    finally:
        REGISTRY.unregister(broken)
    assert status == 200
    assert "jobs_lib_jobs_claimed_total" in text
    ((_, fields),) = failed
    assert (fields["loop"], fields["error"]) == ("probes", "LookupError: no pool")


def test_a_port_that_is_taken_is_refused_and_one_that_was_stopped_is_free():
    with (
        answering() as port,
        pytest.raises(ConfigurationError, match=rf"port {port} .*another one"),
    ):
        Probes(port, lambda: None)
    never_started = Probes(port, lambda: None)
    never_started.stop()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((V4, port))


RSS = """
import sys
from jobs_lib import App
from jobs_lib.service.service import Service
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
before = rss()
from jobs_lib.service.probes import Probes
probes = Probes(0, lambda: True)
probes.start()
probes.stop()
assert not {"starlette", "uvicorn"} & sys.modules.keys()
print(rss() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_probes_cost_few_megabytes():
    run = subprocess.run(
        [sys.executable, "-c", RSS], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    # With a web framework it was 17.
    assert float(run.stdout) < 4


def test_a_port_beyond_the_highest_is_refused():
    with pytest.raises(ConfigurationError, match="no port 65536 for the probes"):
        Probes(65_536, lambda: None)
