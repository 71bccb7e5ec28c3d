"""Metrics: their totals equal those of the database, and labels are few."""

from __future__ import annotations

import re
import urllib.request
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jobs_lib import Discard, Job, telemetry
from jobs_lib.devstack.ports import free_port
from jobs_lib.operating.depths import Depths
from jobs_lib.service import metrics as service_metrics
from jobs_lib.service.metrics import describe_depths, describe_jobs
from jobs_lib.service.probes import NO_METRICS
from jobs_lib.telemetry.metrics import COUNTED, PREFIX
from tests.support.apps import count, make_app, running
from tests.support.records import produce

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

NAME = re.compile(r"jobs_lib(_[a-z]+)+")
LABELS = {"type", "result", "state", "role", "schedule", "topic", "group", "loop"}
LABELS |= {"sqlstate", "le", "version"}


def scrape(port: int) -> dict[str, Metric]:
    """Return the metrics of a process by their names."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        families = text_string_to_metric_families(answer.read().decode())
        return {family.name: family for family in families}


def read(found: dict[str, Metric], name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric, by its labels' values in the order of their names."""
    return {
        tuple(sample.labels.values()): sample.value
        for sample in found[name].samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.guarantee("O3")
def test_totals_equal_what_the_database_has_counted(
    database_url, admin, connect, wait_for, monkeypatch
):
    # On a busy machine jobs may wait for long, and none is to be claimed a second time.
    monkeypatch.setattr("jobs_lib.executor.dispatcher._HOARDED", 60.0)
    port = free_port()
    app = make_app(database_url, probes_port=port, stale_after=60)

    @app.job(retry=2)
    def charge(job: Job, n: int) -> None:
        if n % 10 == 0:
            raise LookupError(n)

    @app.job(group="g")
    def store(job: Job, g: str) -> None:
        with job.transaction() as connection:
            connection.execute("select 1")

    @app.job()
    async def mail(job: Job, n: int) -> None:
        if n == 3:
            raise Discard("no address")

    with connect() as connection:
        charge.enqueue_many(connection, [{"n": n} for n in range(100)])
        store.enqueue_many(connection, [{"g": f"g{n % 5}"} for n in range(50)])
        mail.enqueue_many(connection, [{"n": n} for n in range(20)])
    with running(app, "executor"):
        wait_for(lambda: count(admin, "jobs") == 0, timeout=60, what="all have ended")
        rows = admin.execute(
            "select outcome, type, count(*) from jobs_lib.history group by 1, 2"
        )
        expected = {(outcome, type_): number for outcome, type_, number in rows}

        # The totals change after the table, and one after the other.
        finished = {**expected, ("retried", "charge"): 10}
        failed = {("charge",): 20, ("mail",): 1}

        def find_all() -> dict[str, Metric] | None:
            found = scrape(port)
            ended = read(found, "jobs_lib_jobs_finished")
            failures = read(found, "jobs_lib_job_failures")
            return found if (ended, failures) == (finished, failed) else None

        found = wait_for(
            find_all, timeout=30, what=lambda: f"all is counted: {scrape(port)}"
        )
    assert expected == {
        ("completed", "charge"): 90,
        ("discarded", "charge"): 10,
        ("completed", "store"): 50,
        ("completed", "mail"): 19,
        ("discarded", "mail"): 1,
    }
    assert sum(read(found, "jobs_lib_jobs_claimed").values()) == 180
    for name in ("job_duration_seconds", "job_start_delay_seconds"):
        counts = {
            sample.labels["type"]: sample.value
            for sample in found[PREFIX + name].samples
            if sample.name.endswith("_count")
        }
        assert counts == {"charge": 110, "store": 50, "mail": 20}
    assert read(found, "jobs_lib_owned_origins")["execute",] == 16
    assert read(found, "jobs_lib_build_info") != {}
    for family in found.values():
        if family.name.startswith(PREFIX):
            assert NAME.fullmatch(family.name), family.name
            assert all({*s.labels} <= LABELS for s in family.samples), family.name


def test_scrapes_show_the_depths_and_rarely_query_them(
    database_url, admin, connect, wait_for, monkeypatch
):
    looks = []

    def look(_):
        looks.append(1)
        return Depths(jobs={("work", "available"): 3}, outbox=5)

    monkeypatch.setattr(service_metrics, "read_depths", look)
    port = free_port()
    app = make_app(database_url, probes_port=port)
    app.job(name="work")(lambda job: None)
    with running(app, "executor"):
        # The first scrape requests the first look.
        assert not looks
        scrape(port)
        wait_for(
            lambda: read(scrape(port), "jobs_lib_queue_depth"),
            timeout=30,
            what="it has looked",
        )
        for _ in range(5):
            found = scrape(port)
    assert read(found, "jobs_lib_queue_depth") == {("available", "work"): 3}
    assert read(found, "jobs_lib_outbox_backlog") == {(): 5}
    assert len(looks) == 1


def test_metrics_can_be_left_out(database_url, wait_for):
    port = free_port()
    app = make_app(database_url, probes_port=port, metrics=False)
    app.job(name="work")(lambda job: None)
    with running(app, "executor"), pytest.raises(urllib.error.HTTPError) as refused:
        scrape(port)
    assert refused.value.code == 404
    assert refused.value.read().decode() == NO_METRICS


def test_each_counter_counts_a_known_event_under_its_own_name():
    assert {one.event for one in COUNTED} <= telemetry.EVENTS
    assert len({one.name for one in COUNTED}) == len(COUNTED)


def test_unknown_depths_and_jobs_have_no_samples():
    assert not [s for family in describe_depths(None) for s in family.samples]
    assert not [s for family in describe_jobs([]) for s in family.samples]


def test_a_relay_counts_the_rows_that_it_has_relayed(
    database_url, bootstrap_servers, topic, connect, wait_for
):
    port = free_port()
    app = make_app(
        database_url,
        probes_port=port,
        kafka_bootstrap_servers=bootstrap_servers,
        # The half of it is what a transaction may wait for a busy broker.
        session_timeout=60.0,
    )
    events = app.topic(topic(4), value=int, partitions=4)
    with connect() as connection:
        for n in range(7):
            events.send(connection, key=str(n), value=n)

    def relayed() -> float:
        return sum(read(scrape(port), "jobs_lib_outbox_relayed").values())

    with running(app, "relay"):
        wait_for(lambda: relayed() == 7, timeout=40, what="all are counted")


@pytest.mark.guarantee("O3")
def test_a_consumer_counts_the_records_that_it_has_applied(
    database_url, bootstrap_servers, topic, wait_for
):
    port, name = free_port(), topic(2)
    app = make_app(
        database_url, probes_port=port, kafka_bootstrap_servers=bootstrap_servers
    )
    # The first failure may be that of a block, and name no record.
    failures = iter([LookupError("not yet")] * 2)

    @app.consumer(name, group=f"{name}-g")
    def store(record, connection) -> None:
        if error := next(failures, None):
            raise error

    def counted(what: str) -> dict[tuple[str, ...], float]:
        return read(scrape(port), f"jobs_lib_{what}")

    with running(app, "consumers"):
        produce(bootstrap_servers, name, [("k", n) for n in range(7)])
        wait_for(
            lambda: counted("records_applied").get((f"{name}-g",)) == 7,
            timeout=40,
            what="all are counted",
        )
        assert counted("record_failures")[f"{name}-g",] >= 1
