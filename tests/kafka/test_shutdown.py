"""A stopping pod turns its probe, ends its jobs, and leaves its group."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from jobs_lib.devstack.ports import free_port
from jobs_lib.errors import ConfigurationError
from jobs_lib.service.service import Service
from jobs_lib.service.supervisor import CUT_OFF, SHARE
from tests.support.apps import make_app
from tests.support.pods import await_shares
from tests.support.processes.pods import MAY_END
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from tests.support import Worker

pytestmark = pytest.mark.expects("fenced")

PARTITIONS = 4
JOBS = 5
"""In each partition."""


def ask(port: int, path: str) -> int:
    """Return the status of a probe; 0 without an answer."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}{path}", timeout=5
        ) as page:
            return page.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


class Pod:
    """A pod in a process of its own."""

    def __init__(self, worker: Worker, port: int) -> None:
        self.worker = worker
        self._port = port

    def ask(self, path: str) -> int:
        """Return the status of one of its probes; 0 without an answer."""
        return ask(self._port, path)

    def stop_twice(self) -> None:
        """Ask it to stop, and again once it has heard that."""
        self.worker.signal(signal.SIGTERM)
        wait_for(
            lambda: self.ask("/readyz") == 503, timeout=60, what="it has heard that"
        )
        self.worker.signal(signal.SIGTERM)
        assert self.worker.wait() == CUT_OFF

    def said(self, word: str) -> set[str]:
        """Return the jobs that it has reported with this word."""
        lines = list(self.worker.lines)
        return {line.split()[1] for line in lines if line.startswith(word)}


@pytest.fixture
def home(topic) -> str:
    """The topic of the pods."""
    return topic(PARTITIONS)


@pytest.fixture
def start_pods(admin, database_url, bootstrap_servers, home, start_process):
    """A function that starts pods, and waits until they share the partitions evenly.

    Their jobs end when the test lets them.
    """
    admin.execute(MAY_END)

    def start(pod: str) -> Pod:
        port = free_port()
        worker = start_process(
            "pod",
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            home=home,
            pod=pod,
            probes_port=port,
        )
        return Pod(worker, port)

    def start_pods(*names: str) -> list[Pod]:
        pods = [start(name) for name in names]
        await_shares(admin, dict.fromkeys(names, PARTITIONS // len(names)))
        return pods

    return start_pods


@pytest.fixture
def put_to_work(connect, database_url, home, wait_for):
    """A function that enqueues jobs in each partition, and waits until all pods run."""
    app = make_app(database_url)

    @app.job()
    def work(job) -> None: ...

    def put_to_work(*pods: Pod) -> None:
        with connect() as connection:
            for n in range(PARTITIONS):
                for _ in range(JOBS):
                    work.options(origin=f"{home}/{n}").enqueue(connection)
        wait_for(
            lambda: all(len(pod.said("started")) == 2 for pod in pods),
            timeout=60,
            what=lambda: "\n".join(["all work", *(pod.worker.output for pod in pods)]),
        )

    return put_to_work


def check_left(admin, ended: set[str]) -> None:
    """Check that all other jobs are there, and that no attempt or crash was counted."""
    left = admin.execute("select id::text, attempt, crashes from jobs_lib.jobs")
    rows = left.fetchall()
    assert {row[0] for row in rows}.isdisjoint(ended)
    assert len(rows) == PARTITIONS * JOBS - len(ended)
    assert {row[1:] for row in rows} == {(0, 0)}


@pytest.mark.guarantee("J19")
def test_a_stopping_pod_finishes_its_running_jobs_and_leaves_the_rest_to_others(
    admin, home, kafka_admin, start_pods, put_to_work
):
    first, second = start_pods("first", "second")
    put_to_work(first, second)
    assert first.ask("/readyz") == first.ask("/livez") == 200
    first.worker.signal(signal.SIGTERM)
    wait_for(lambda: first.ask("/readyz") == 503, timeout=60, what="it is not ready")
    assert first.ask("/livez") == 200
    admin.execute("insert into may_end values ('first')")
    assert first.worker.wait() == 0
    ended = first.said("ended")
    assert ended == first.said("started")
    assert len(ended) < PARTITIONS // 2 * JOBS
    groups = kafka_admin.describe_consumer_groups([f"{home}-service"])
    members = groups[f"{home}-service"].result().members
    assert [member.client_id for member in members] == ["second"]
    # This is long before the group would have missed it.
    await_shares(admin, {"second": PARTITIONS})
    check_left(admin, ended)
    # What it has taken over survives that it is cut off, too.
    second.stop_twice()
    check_left(admin, ended)


@pytest.mark.guarantee("J19")
def test_a_pod_that_is_asked_twice_to_stop_ends_at_once(admin, start_pods, put_to_work):
    (pod,) = start_pods("first")
    put_to_work(pod)
    pod.stop_twice()
    assert pod.said("ended") == set()
    check_left(admin, ended=set())


def test_a_pod_that_waits_for_kafka_is_live_and_not_ready(
    database_url, wait_for, start_process
):
    port = free_port()
    start_process(
        "pod",
        database_url,
        kafka_bootstrap_servers="127.0.0.1:1",
        home="nowhere",
        pod="first",
        probes_port=port,
    )
    wait_for(lambda: ask(port, "/livez") == 200, timeout=60, what="it lives")
    assert ask(port, "/readyz") == 503


@pytest.mark.expects("loop.failed")  # the relay has no Kafka
def test_a_port_that_is_taken_is_named_with_the_way_out(database_url):
    port = free_port()
    one = make_app(database_url, probes_port=port)
    one.topic("states", compacted=True)
    service = Service(one, ["relay"])
    service.start()
    try:
        with pytest.raises(
            ConfigurationError, match=f"port {port} .*PROBES_PORT to an"
        ):
            Service(one, ["relay"]).start()
        assert ask(port, "/readyz") == 200
    finally:
        service.stop()
    assert ask(port, "/livez") == 0


@pytest.mark.expects("loop.failed")  # the relay has no Kafka
def test_each_process_of_a_pod_has_a_port_of_its_own(database_url, monkeypatch):
    port = free_port()
    monkeypatch.setenv(SHARE, "2/4")
    app = make_app(database_url, probes_port=port - 1)
    app.topic("states", compacted=True)
    service = Service(app, ["relay"])
    service.start()
    try:
        assert ask(port, "/readyz") == 200
    finally:
        service.stop()
