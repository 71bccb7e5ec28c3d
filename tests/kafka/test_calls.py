"""When a fault hits a pod, only the calls under way are made twice."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import wait_for
from tests.support.apps import count, make_app
from tests.support.pods import await_shares
from tests.support.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.jobs.type import JobType
    from tests.support import Worker

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


@pytest.fixture
def home(own_broker) -> str:
    """The topic of the pods."""
    return own_broker.create(PARTITIONS)


@dataclass
class TwoPods:
    """Two pods, and the proxies by which one of them reaches its servers."""

    struck: Worker
    other: Worker
    to_database: Proxy
    to_kafka: Proxy
    admin: Any

    def strike(self, fault: str) -> None:
        """Stop one pod, or cut it off from a server."""
        if fault == "frozen":
            self.struck.pause()
        elif fault == "without database":
            self.to_database.hold()
        else:
            self.to_kafka.hold()

    def await_shares(self, **expected: int) -> None:
        """Wait until each pod owns this number of partitions."""
        await_shares(self.admin, expected, self.describe)

    def describe(self) -> str:
        """Return all that the pods have written."""
        return f"{self.struck.output}\n{self.other.output}"


@pytest.fixture
def pods(
    database_url, own_broker, home, admin, start_process, calls
) -> Iterator[TwoPods]:
    """Two pods that share the partitions evenly."""

    def start(pod: str, url: str, servers: str) -> Worker:
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

    with Proxy.before(database_url) as proxy:
        pods = TwoPods(
            start("struck", proxy.url(database_url), own_broker.proxied),
            start("other", database_url, own_broker.bootstrap_servers),
            proxy,
            own_broker.proxy,
            admin,
        )
        pods.await_shares(struck=2, other=2)
        yield pods


@pytest.fixture
def work(database_url, home) -> JobType[...]:
    """The job type of the pods, for the test to enqueue."""

    @make_app(database_url, home=home).job(group="key")
    def work(job, key: str) -> None: ...

    return work


@pytest.mark.expects("fenced", "loop.failed")
@pytest.mark.guarantee("I4", "FP16")
@pytest.mark.parametrize("fault", ["frozen", "without database", "without kafka"])
def test_only_calls_under_way_at_a_fault_are_made_twice(
    pods, work, calls, admin, connect, fault
):
    with connect() as connection:
        work.enqueue_many(connection, [{"key": key} for key in KEYS] * 4)
    wait_for(lambda: len(calls.of("struck")) == WORKERS, timeout=60, what=pods.describe)
    pods.strike(fault)
    pods.await_shares(other=PARTITIONS)
    # A living owner learns of it by its next heartbeat, and the new owner begins then.
    wait_for(
        lambda: {*calls.of("struck")} <= {*calls.of("other")},
        timeout=60,
        what=pods.describe,
    )
    under_way = {*calls.of("struck")}
    calls.let_go.set()
    if fault == "frozen":
        pods.struck.resume()
    wait_for(lambda: count(admin, "jobs") == 0, timeout=60, what=pods.describe)
    # Until it is back, its memory still holds jobs that others took.
    pods.to_database.release()
    pods.to_kafka.release()
    pods.await_shares(struck=2, other=2)
    made = Counter(job for _, job in calls.made)
    assert len(made) == len(KEYS) * 4
    assert len(under_way) == WORKERS
    repeated = {job for job, times in made.items() if times > 1}
    assert repeated <= under_way, f"{calls.made}\n{pods.describe()}"
    assert max(made.values()) == 2
