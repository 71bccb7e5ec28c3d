"""A pod that loses only Kafka begins nothing that another pod has taken over."""

from __future__ import annotations

import threading
import time

import pytest

from jobs_lib.coordination.log_topic import WANTED
from tests.support.apps import count, make_app, running
from tests.support.pods import await_shares

PARTITIONS = 4
JOBS = 60
WORKERS = 4


@pytest.fixture
def begun() -> dict[str, list[tuple[int, float]]]:
    """The jobs that each pod has begun, and when."""
    return {"cut off": [], "other": []}


@pytest.fixture(params=["database", "coordination"])
def ownership(request) -> str:
    """The setting: in a group of Kafka, or in a coordination log."""
    return request.param


@pytest.fixture
def make(ownership, database_url, own_broker, begun):
    """A function that makes the app of a pod with a way to Kafka."""
    home = own_broker.create(PARTITIONS)
    log = own_broker.create(2, WANTED)
    lock = threading.Lock()

    def make(pod: str, servers: str):
        app = make_app(
            database_url,
            home=home,
            pod=pod,
            kafka_bootstrap_servers=servers,
            workers=WORKERS,
            ownership=ownership,
            coordination_topic=log,
            coordination_interval=1.0,
        )

        @app.consumer(home, group=f"{home}-g")
        def handle(record, connection) -> None: ...

        @app.job(group="key")
        def work(job, key: str) -> None:
            with lock:
                begun[pod].append((job.id, time.time()))
            threading.Event().wait(0.1)

        return app

    return make


@pytest.mark.slow
@pytest.mark.expects("jobs.fenced", "loop.failed", "origins.lost")
@pytest.mark.guarantee("I4", "M24")
def test_jobs_in_the_memory_of_a_pod_without_kafka_do_not_run_twice(
    make, begun, ownership, own_broker, admin, connect, wait_for
):
    cut_off = make("cut off", own_broker.proxied)
    other = make("other", own_broker.bootstrap_servers)
    with (
        running(cut_off, "consumers", "executor"),
        running(other, "consumers", "executor"),
    ):
        await_shares(admin, {"cut off": 2, "other": 2})
        with connect() as connection:
            for n in range(16):
                cut_off.jobs["work"].enqueue_many(connection, [{"key": f"k{n}"}] * JOBS)
        wait_for(lambda: len(begun["cut off"]) > 20, what="both work")
        own_broker.proxy.hold()
        await_shares(admin, {"other": 4})
        (taken_at,) = admin.execute(
            "select extract(epoch from max(since))::float8 from jobs_lib.origins"
            " where role = 'execute'"
        ).fetchone()
        wait_for(lambda: count(admin, "jobs") == 0, timeout=120, what="all have ended")
        own_broker.proxy.release()
    earlier, later = dict(begun["cut off"]), dict(begun["other"])
    twice = earlier.keys() & later.keys()
    # Each begins there once it begins nothing more here.
    last = max((earlier[job] for job in twice), default=0.0)
    assert last < min((later[job] for job in twice), default=1.0)
    if ownership == "database":
        # At most the jobs that ran there, one for each worker: a group's member knows
        # when its session is over. Over a log it goes on until it hears of the loss.
        assert len(twice) <= WORKERS
        assert all(earlier[job] < taken_at for job in twice)
