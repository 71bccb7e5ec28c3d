"""Claims and completions cost statements by the batch, and an idle executor few."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs_lib.executor.round_trip import RoundTrip
from jobs_lib.postgres.queries import load_queries
from tests.support.apps import HOME, count, executing, heard, make_app

if TYPE_CHECKING:
    from jobs_lib import Job
    from jobs_lib.executor.round_trip import Statement

JOBS = 5_000
SECONDS = 10


@pytest.fixture
def sent(monkeypatch):
    """The names of the statements of each round trip of the dispatchers."""
    trips: list[list[str]] = []
    exchange = RoundTrip.exchange

    def record(self, *batches, **options):
        trips.append([name for batch in batches for name, _ in batch])
        return exchange(self, *batches, **options)

    monkeypatch.setattr(RoundTrip, "exchange", record)
    return trips


@pytest.mark.guarantee("S20")
@pytest.mark.parametrize("group", [None, "group"], ids=["free", "groups"])
def test_a_batch_takes_one_claim_and_one_completion_and_starts_are_free(
    database_url, admin, connect, wait_for, sent, group, monkeypatch
):
    # On a busy machine jobs may wait for long, and none is to be claimed a second time.
    monkeypatch.setattr("jobs_lib.executor.dispatcher._HOARDED", 60.0)
    app = make_app(database_url, stale_after=60)

    @app.job(group=group)
    def work(job: Job, group: str) -> None: ...

    with connect() as connection:
        work.enqueue_many(connection, [{"group": f"g{n % 300}"} for n in range(JOBS)])
    with heard("jobs.claimed") as claimed, executing(app, HOME, batch=400):
        wait_for(lambda: count(admin, "jobs") == 0, timeout=60, what="all ran")
        # Handlers that need nothing cause no statement, and not even a connection.
        others = admin.execute(
            "select count(*) from pg_stat_activity"
            " where application_name like 'jobs_lib handlers%'"
            " and datname = current_database()"
        ).fetchone()
    assert others == (0,)
    assert sum(fields["count"] for _, fields in claimed) == JOBS
    trips = [
        Counter("claim" if name == "claim_plain" else name for name in trip)
        for trip in sent
    ]
    # A batch costs one statement of each kind; two that are due share a round trip.
    assert all(trip["claim"] <= 1 and trip["complete"] <= 1 for trip in trips)
    busy = [trip for trip in trips if trip["claim"] or trip["complete"]]
    assert any(trip["claim"] and trip["complete"] for trip in busy)
    assert len(busy) < JOBS / 10
    total = sum(trips, Counter())
    known = {"claim", "complete", "end_claims", "look", "horizon", "sweep", "promote"}
    known |= {"forget_claims", "trim_claims", "jump"}
    # These run once for each connection.
    known |= {"keep_claims", "find_overtaken", "read_server"}
    assert total.keys() <= known
    assert total["read_server"] < 5
    # The count follows batches, not jobs: each job costs a small part of a statement.
    assert total["claim"] + total["complete"] < JOBS / 10


def spread(admin, partitions: int) -> list[str]:
    """Give the home topic this many partitions, and return its origins."""
    admin.execute("update jobs_lib.topics set partitions = %s", (partitions,))
    return [f"local/{n}" for n in range(partitions)]


@pytest.mark.guarantee("S22")
@pytest.mark.parametrize("partitions", [1, None, 1_000])
def test_all_jobs_run_with_one_the_usual_hundred_or_a_thousand_partitions(
    database_url, admin, connect, wait_for, partitions
):
    app = make_app(database_url, home="work")
    topic = app.topic("work", partitions=partitions)
    assert topic.partitions == (partitions or 100)
    # A topic without work of this service does not get as many partitions.
    assert app.topic("state", compacted=True).partitions == 3
    assert app.topic("events").partitions == 3

    @app.job(group="group")
    def work(job: Job, group: str | None = None) -> None: ...

    origins = spread(admin, topic.partitions)
    with connect() as connection:
        work.enqueue_many(connection, [{"group": f"g{n}"} for n in range(2_000)])
        work.enqueue_many(connection, [{}] * 2_000)
    used = admin.execute("select count(distinct origin) from jobs_lib.jobs").fetchone()
    assert used[0] > topic.partitions * 0.8
    with heard("loop.failed") as failed, executing(app, origins):
        wait_for(lambda: count(admin, "jobs") == 0, timeout=60, what="all ran")
    assert failed == []


@pytest.mark.slow
@pytest.mark.guarantee("S22")
def test_idling_on_a_thousand_partitions_costs_next_to_nothing(
    database_url, admin, wait_for, start_process
):
    origins = spread(admin, 1_000)
    worker = start_process("idle", database_url)
    wait_for(
        lambda: (
            admin.execute(
                "select count(*) from jobs_lib.origins where owner is not null"
            ).fetchone()
            == (len(origins),)
        ),
        timeout=60,
        what=lambda: f"it owns them all\n{worker.output}",
    )
    threading.Event().wait(3)
    used = []
    for _ in range(3):
        before = cpu_seconds(worker.pid)
        threading.Event().wait(SECONDS)
        used.append(cpu_seconds(worker.pid) - before)
    # Other processes only add to it: they take the processor's cache.
    assert min(used) / SECONDS <= 0.02, f"{used} s of {SECONDS} s each"


def cpu_seconds(pid: int) -> float:
    """The CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("prepare", [True, False])
def test_an_exchange_calls_meanwhile_once(connect, prepare, count):
    calls: list[bool] = []
    with connect() as connection:
        connection.autocommit = True
        round_trip = RoundTrip(connection, load_queries("jobs_lib"), prepare=prepare)
        batches: list[list[Statement]] = [[("read_server", {})]] * count
        answers, failure = round_trip.exchange(
            *batches, meanwhile=lambda: calls.append(True)
        )
    assert failure is None
    assert len(answers) == count
    assert calls == [True]
