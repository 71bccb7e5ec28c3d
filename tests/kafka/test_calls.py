"""When a fault hits a pod, only the calls under way are made twice."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.apps import count, make_app
from tests.support.pods import read_owners
from tests.support.proxy import Proxy

PARTITIONS, WORKERS = 4, 4
KEYS = [f"key-{n}" for n in range(24)]


class Calls:
    """A server that counts the calls for each job, and holds those of one pod."""

    def __init__(self, held: str) -> None:
        self.held = held
        self.let_go = threading.Event()
        self.made: list[tuple[str, int]] = []
        """The pod and the job of each call, in order."""
        calls = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                _, pod, job = self.path.split("/")
                calls.made.append((pod, int(job)))
                if pod == calls.held:
                    calls.let_go.wait(60)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of(self, pod: str) -> list[int]:
        """The jobs for which a pod has called."""
        return [job for caller, job in list(self.made) if caller == pod]

    def close(self) -> None:
        """Release all calls, and stop."""
        self.let_go.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def calls():
    """The server that handlers call."""
    calls = Calls("struck")
    yield calls
    calls.close()


@pytest.mark.expects("fenced", "loop.failed")
@pytest.mark.guarantee("I4", "FP16")
@pytest.mark.parametrize("fault", ["frozen", "without database", "without kafka"])
def test_only_calls_under_way_at_a_fault_are_made_twice(
    database_url, own_broker, admin, connect, start_process, wait_for, calls, fault
):
    home = own_broker.create(PARTITIONS)

    def start(pod: str, url: str, servers: str):
        return start_process(
            "calls",
            url,
            server=calls.url,
            home=home,
            pod=pod,
            kafka_bootstrap_servers=servers,
            workers=WORKERS,
            give_up_after=2,
            database_timeout=2,
        )

    def shares() -> dict[str, int]:
        return {p: len(o) for p, o in read_owners(admin, "execute").items()}

    app = make_app(database_url, home=home)

    @app.job(group="key")
    def work(job, key: str) -> None: ...

    with Proxy.before(database_url) as proxy:
        struck = start("struck", proxy.url(database_url), own_broker.proxied)
        other = start("other", database_url, own_broker.bootstrap_servers)

        def output() -> str:
            return f"{shares()}\n{struck.output}\n{other.output}"

        even = {"struck": 2, "other": 2}
        wait_for(lambda: shares() == even, timeout=60, what=output)
        with connect() as connection:
            work.enqueue_many(connection, [{"key": key} for key in KEYS] * 4)
        wait_for(lambda: len(calls.of("struck")) == WORKERS, what=output)
        if fault == "frozen":
            struck.pause()
        elif fault == "without database":
            proxy.hold()
        else:
            own_broker.proxy.hold()
        wait_for(lambda: shares().get("other") == PARTITIONS, timeout=60, what=output)
        # A living owner learns of it by its next heartbeat, and the new owner begins
        # then.
        wait_for(
            lambda: {*calls.of("struck")} <= {*calls.of("other")},
            timeout=60,
            what=output,
        )
        under_way = {*calls.of("struck")}
        calls.let_go.set()
        if fault == "frozen":
            struck.resume()
        wait_for(lambda: count(admin, "jobs") == 0, timeout=60, what=output)
        # Until it is back, its memory still holds jobs that others took.
        proxy.release()
        own_broker.proxy.release()
        wait_for(lambda: shares() == even, timeout=60, what=output)
    made = Counter(job for _, job in calls.made)
    assert len(made) == len(KEYS) * 4
    assert len(under_way) == WORKERS
    repeated = {job for job, times in made.items() if times > 1}
    assert repeated <= under_way, f"{calls.made}\n{struck.output}\n{other.output}"
    assert max(made.values()) == 2
