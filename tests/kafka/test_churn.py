"""Pods come and go all the time, and every job takes effect once, in order."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.apps import make_app, running

if TYPE_CHECKING:
    from jobs_lib import Job

PARTITIONS = 12
GROUPS = [f"g{n}" for n in range(24)]
SECONDS = 60.0


@pytest.fixture
def home(topic):
    """A topic of twelve partitions."""
    return topic(PARTITIONS)


@pytest.fixture
def make(database_url, bootstrap_servers, home):
    """A function that makes the app of a pod."""

    def make(pod: str, **settings):
        app = make_app(
            database_url,
            home=home,
            pod=pod,
            kafka_bootstrap_servers=bootstrap_servers,
            **settings,
        )

        @app.consumer(home, group=f"{home}-g")
        def handle(record, connection) -> None: ...

        @app.job(group="group")
        def work(job: Job, group: str, n: int) -> None:
            with job.transaction() as connection:
                connection.execute(
                    'insert into effects ("group", n) values (%s, %s)', (group, n)
                )

        return app

    return make


@pytest.mark.slow
@pytest.mark.guarantee("FK1", "S13", "I13")
@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
@pytest.mark.parametrize("sidecar", [False, True], ids=["member", "sidecar"])
def test_pods_come_and_go_under_load(
    make, home, admin, connect, wait_for, strategy, sidecar
):
    admin.execute(
        'create table effects ("group" text, n int,'
        " place bigint generated always as identity)"
    )
    outside = make("outside")
    counts = dict.fromkeys(GROUPS, 0)
    stop = threading.Event()

    def send() -> None:
        with connect() as connection:
            while not stop.wait(0.01):
                done = admin.execute("select count(*) from effects").fetchone()[0]
                # However slow the machine is, this ends soon after the last job.
                for group in GROUPS if sum(counts.values()) - done < 500 else ():
                    outside.jobs["work"].enqueue(
                        connection, group=group, n=counts[group]
                    )
                    counts[group] += 1
                connection.commit()

    @contextlib.contextmanager
    def pod(name: str):
        app = make(name, assignment_strategy=strategy)
        with contextlib.ExitStack() as parts:
            if sidecar:
                parts.enter_context(running(app, "consumers"))
                parts.enter_context(running(app, "executor", sidecar=True))
            else:
                parts.enter_context(running(app, "consumers", "executor"))
            yield

    def owning() -> dict[str, int]:
        rows = admin.execute(
            "select p.pod, count(*) from jobs_lib.origins o"
            " join jobs_lib.processes p on p.id = o.owner"
            " where o.role = 'execute' and o.origin like %s || '/%%' group by 1",
            (home,),
        )
        return dict(rows.fetchall())

    def await_pods(*names: str) -> None:
        wait_for(
            lambda: {*owning()} == {*names} and sum(owning().values()) == PARTITIONS,
            timeout=40,
            what=lambda: f"{names} share all: {owning()}",
        )

    sender = threading.Thread(target=send)
    until = time.monotonic() + SECONDS
    moves = 0
    with pod("pod-a"):
        await_pods("pod-a")
        sender.start()
        for number in itertools.count():
            if time.monotonic() > until:
                break
            with pod(f"pod-{number}"):
                await_pods("pod-a", f"pod-{number}")
            await_pods("pod-a")
            moves += 2
        stop.set()
        sender.join()
        wait_for(
            lambda: not admin.execute("select from jobs_lib.jobs limit 1").rowcount,
            timeout=40,
            what="all have run",
        )
    assert moves >= 10
    for group, count in counts.items():
        rows = admin.execute(
            'select n from effects where "group" = %s order by place', (group,)
        )
        assert [row[0] for row in rows] == list(range(count))
    # No pod was cut off: a pod that leaves properly costs no attempt.
    assert not admin.execute("select from jobs_lib.history where attempt > 1").rowcount
