"""A pod that loses only Kafka begins nothing that another pod has taken over."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.apps import make_app, running

PARTITIONS = 4
JOBS = 60


@pytest.mark.slow
@pytest.mark.expects("jobs.fenced", "loop.failed")
@pytest.mark.guarantee("I4")
def test_jobs_in_the_memory_of_a_pod_without_kafka_do_not_run_twice(
    database_url, own_broker, admin, connect, wait_for
):
    home = own_broker.create(PARTITIONS)
    begun: dict[str, list[tuple[int, int, float]]] = {"cut off": [], "other": []}
    lock = threading.Lock()

    def make(pod: str, servers: str):
        app = make_app(
            database_url,
            home=home,
            pod=pod,
            kafka_bootstrap_servers=servers,
            workers=4,
        )

        @app.consumer(home, group=f"{home}-g")
        def handle(record, connection) -> None: ...

        @app.job(group="key")
        def work(job, key: str) -> None:
            with lock:
                begun[pod].append((job.id, job.lane.epoch, time.time()))
            threading.Event().wait(0.1)

        return app

    def owned() -> dict[str, int]:
        rows = admin.execute(
            "select p.pod, count(*) from jobs_lib.origins o"
            " join jobs_lib.processes p on p.id = o.owner"
            " where o.role = 'execute' group by 1"
        )
        return dict(rows.fetchall())

    cut_off = make("cut off", own_broker.proxied)
    other = make("other", own_broker.bootstrap_servers)
    with (
        running(cut_off, "consumers", "executor"),
        running(other, "consumers", "executor"),
    ):
        wait_for(
            lambda: owned() == {"cut off": 2, "other": 2},
            timeout=60,
            what=lambda: f"both have a share: {owned()}",
        )
        with connect() as connection:
            for n in range(16):
                cut_off.jobs["work"].enqueue_many(connection, [{"key": f"k{n}"}] * JOBS)
        wait_for(lambda: len(begun["cut off"]) > 20, what="both work")
        own_broker.proxy.hold()
        wait_for(
            lambda: owned() == {"other": 4},
            timeout=60,
            what=lambda: f"the other has all: {owned()}",
        )
        (taken_at,) = admin.execute(
            "select extract(epoch from max(since))::float8 from jobs_lib.origins"
            " where role = 'execute'"
        ).fetchone()
        wait_for(
            lambda: (
                admin.execute("select count(*) from jobs_lib.jobs").fetchone() == (0,)
            ),
            timeout=120,
            what="all have ended",
        )
        own_broker.proxy.release()
    ids = {job for job, _, _ in begun["cut off"]}
    twice = [job for job, _, _ in begun["other"] if job in ids]
    # At most the jobs that ran there, one for each worker; it begins only new jobs
    # later.
    assert len(twice) <= 4
    assert all(at < taken_at or job not in twice for job, _, at in begun["cut off"])
