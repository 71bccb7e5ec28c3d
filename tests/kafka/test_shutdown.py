"""A stopping pod turns its probe, ends its jobs, and leaves its group."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request

import pytest

from jobs_lib.devstack.ports import free_port
from jobs_lib.errors import ConfigurationError
from jobs_lib.service.service import Service
from jobs_lib.service.supervisor import CUT_OFF, SHARE
from tests.support.apps import make_app
from tests.support.processes.pods import MAY_END

pytestmark = pytest.mark.expects("fenced")

PARTITIONS = 4


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


def said(worker, word: str) -> set[str]:
    """Return the jobs that the worker has reported with this word."""
    return {line.split()[1] for line in list(worker.lines) if line.startswith(word)}


@pytest.mark.guarantee("J19")
def test_a_pod_finishes_its_running_jobs_and_ends_at_once_when_asked_twice(
    admin, connect, database_url, bootstrap_servers, kafka_admin, topic, start_process,
    wait_for,
):  # fmt: skip
    home = topic(PARTITIONS)
    admin.execute(MAY_END)
    ports = {pod: free_port() for pod in ("first", "second")}
    first, second = (
        start_process(
            "pod",
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            home=home,
            pod=pod,
            probes_port=ports[pod],
        )
        for pod in ports
    )

    def owned(pod: str) -> int:
        return admin.execute(
            "select count(*) from jobs_lib.origins o join jobs_lib.processes p"
            " on p.id = o.owner where o.role = 'execute' and p.pod = %s",
            (pod,),
        ).fetchone()[0]

    wait_for(
        lambda: owned("first") == owned("second") == PARTITIONS // 2,
        timeout=60,
        what="each has half of the partitions",
    )
    app = make_app(database_url)

    @app.job()
    def work(job) -> None: ...

    with connect() as connection:
        for n in range(PARTITIONS):
            for _ in range(5):
                work.options(origin=f"{home}/{n}").enqueue(connection)
    wait_for(
        lambda: len(said(first, "started")) == len(said(second, "started")) == 2,
        timeout=60,
        what=lambda: f"both are at work\n{first.output}\n{second.output}",
    )
    assert ask(ports["first"], "/readyz") == ask(ports["first"], "/livez") == 200

    first.signal(signal.SIGTERM)
    wait_for(lambda: ask(ports["first"], "/readyz") == 503, what="it is not ready")
    assert ask(ports["first"], "/livez") == 200
    admin.execute("insert into may_end values ('first')")
    assert first.wait() == 0
    assert said(first, "ended") == said(first, "started")
    assert len(said(first, "ended")) < PARTITIONS // 2 * 5
    groups = kafka_admin.describe_consumer_groups([f"{home}-service"])
    members = groups[f"{home}-service"].result().members
    assert [member.client_id for member in members] == ["second"]
    # This is long before the group would have missed it.
    wait_for(
        lambda: owned("second") == PARTITIONS, timeout=40, what="the other has it all"
    )

    second.signal(signal.SIGTERM)
    wait_for(lambda: ask(ports["second"], "/readyz") == 503, what="it has heard that")
    second.signal(signal.SIGTERM)
    assert second.wait() == CUT_OFF
    assert said(second, "ended") == set()
    left = admin.execute("select id::text, attempt, crashes from jobs_lib.jobs")
    rows = left.fetchall()
    assert {row[0] for row in rows}.isdisjoint(said(first, "ended"))
    assert len(rows) == PARTITIONS * 5 - len(said(first, "ended"))
    assert {row[1:] for row in rows} == {(0, 0)}


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
    wait_for(lambda: ask(port, "/livez") == 200, what="it lives")
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
