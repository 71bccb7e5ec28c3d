"""All that the library does, through PgBouncer with two server connections."""

from __future__ import annotations

import psycopg
import pytest

from jobs_lib import exponential
from tests.faults.helpers import attempts, count, effects, enqueue
from tests.operating import faults
from tests.support.apps import heard, make_app, running
from tests.support.records import produce

pytestmark = pytest.mark.skipif(
    faults.PGBOUNCER is None, reason="pgbouncer is not installed"
)


@pytest.fixture
def bounced(url, tmp_path_factory):
    """The URL through PgBouncer in transaction mode, with a pool of two."""
    folder = tmp_path_factory.mktemp("pgbouncer")
    with faults.pgbouncer(folder, url, "transaction", size=2) as bounced:
        yield bounced


@pytest.mark.parametrize("direct", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_executor_works_behind_it(url, bounced, start_worker, wait_for, direct):
    options = {"direct_url": url} if direct else {}
    worker = start_worker(
        bounced, pgbouncer=True, workers=4, async_workers=20, **options
    )
    for name in ("quick", "slow", "add", "aadd"):
        enqueue(bounced, name, 200)
    wait_for(
        lambda: count(url) == 0,
        timeout=30,
        what=lambda: f"all have run\n{worker.output}",
    )
    assert effects(url) == sorted([*range(200)] * 2)
    assert attempts(url) == {("completed", 1)}
    assert "loop.failed" not in worker.output


@pytest.mark.guarantee("J21", "FP10")
def test_enqueue_retry_groups_and_schedules_work_behind_it(url, bounced, wait_for):
    app = make_app(bounced, pgbouncer=True, workers=4)
    ran: list[tuple[str, int, int]] = []

    @app.job(group="group", retry=exponential(first=0.01, cap=0.01))
    def work(job, n: int, group: str) -> None:
        if n % 10 == 0 and job.attempt == 1:
            raise ValueError(n)
        with job.transaction() as connection:
            connection.execute("insert into effects values (%s, %s, 1)", (n, job.id))
        ran.append((group, n, job.attempt))

    @app.job()
    def alone(job) -> None:
        ran.append(("alone", 0, job.attempt))

    @app.job()
    def large(job, text: str) -> None:
        ran.append((f"large {len(text)}", 0, job.attempt))

    @app.periodic("* * * * * *")
    @app.job()
    def tick(job) -> None:
        ran.append(("tick", 0, job.attempt))

    with heard("loop.failed") as failures, running(app, "executor"):
        for start in range(0, 100, 20):
            with app.transaction() as connection:
                work.enqueue_many(
                    connection,
                    [{"n": n, "group": f"g{n % 5}"} for n in range(start, start + 20)],
                )
                alone.options(unique="alone").enqueue(connection)
        with psycopg.connect(bounced) as connection:
            large.enqueue(connection, text="x" * 20_000)
            later = work.enqueue(connection, n=101, group="g1")
        wait_for(lambda: len(effects(url)) == 101, what="all have run")
        wait_for(lambda: ("tick", 0, 1) in ran, what="the clock has ticked")
        wait_for(lambda: ("large 20000", 0, 1) in ran, what="the large one has run")
    assert later
    for group in range(5):
        of_group = [n for g, n, _ in ran if g == f"g{group}"]
        assert of_group == sorted(of_group)
    assert {a for g, n, a in ran if g[0] == "g" and n % 10 == 0} == {2}
    assert ("alone", 0, 1) in ran
    assert failures == []


def test_consumers_work_behind_it(
    url, bounced, admin, bootstrap_servers, topic, wait_for
):
    name = topic(4)
    app = make_app(
        bounced,
        pgbouncer=True,
        home=name,
        kafka_bootstrap_servers=bootstrap_servers,
        consumer_block=20,
    )

    @app.job(group="key")
    def later(job, key: str, n: int) -> None:
        with job.transaction() as connection:
            connection.execute("insert into effects values (%s, %s)", (n, job.id))

    @app.consumer(name, group=f"{name}-service")
    def handle(record, connection) -> None:
        connection.execute("insert into calls values (%s, %s, 1)", (0, record.key))
        later.enqueue(connection, key=record.key, n=record.value)

    produce(bootstrap_servers, name, [(f"k{n % 20}", n) for n in range(400)])
    with heard("loop.failed", "record.failed") as failures, running(app):
        wait_for(lambda: len(effects(url)) >= 400, timeout=40, what="all have run")
    assert effects(url) == [*range(400)]
    assert count(url, "calls") == 400
    assert failures == []
