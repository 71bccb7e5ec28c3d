"""Pods come and go all the time, and every job takes effect once, in order."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.apps import make_app, running
from tests.support.beside import beside
from tests.support.ordered import EFFECTS, add_ordered_job, read_order
from tests.support.pods import await_pods

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from jobs_lib import App

PARTITIONS = 12
GROUPS = [f"g{n}" for n in range(24)]
SECONDS = 60.0


@pytest.fixture
def make(database_url, bootstrap_servers, topic):
    """A function that makes the app of a pod; the home topic has twelve partitions."""
    home = topic(PARTITIONS)

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

        add_ordered_job(app)
        return app

    return make


@contextlib.contextmanager
def running_pod(app: App, *, sidecar: bool) -> Iterator[None]:
    """Run a pod, whose executor is in its service or in a sidecar."""
    with contextlib.ExitStack() as parts:
        if sidecar:
            parts.enter_context(running(app, "consumers"))
            parts.enter_context(running(app, "executor", sidecar=True))
        else:
            parts.enter_context(running(app, "consumers", "executor"))
        yield


@contextlib.contextmanager
def enqueuing(app: App, admin: Any, connect: Any) -> Iterator[dict[str, int]]:
    """Enqueue jobs in all groups meanwhile; yield how many each group has."""
    counts = dict.fromkeys(GROUPS, 0)

    def enqueue(stop: threading.Event) -> None:
        with connect() as connection:
            while not stop.wait(0.01):
                done = admin.execute("select count(*) from effects").fetchone()[0]
                # However slow the machine is, this ends soon after the last job.
                for group in GROUPS if sum(counts.values()) - done < 500 else ():
                    app.jobs["work"].enqueue(connection, group=group, n=counts[group])
                    counts[group] += 1
                connection.commit()

    with beside(enqueue):
        yield counts


@pytest.mark.slow
@pytest.mark.guarantee("FK1", "S13", "I13")
@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
@pytest.mark.parametrize("sidecar", [False, True], ids=["member", "sidecar"])
def test_pods_come_and_go_under_load(make, admin, connect, wait_for, strategy, sidecar):
    def pod(name: str):
        return running_pod(make(name, assignment_strategy=strategy), sidecar=sidecar)

    admin.execute(EFFECTS)
    until = time.monotonic() + SECONDS
    moves = 0
    with pod("pod-a"):
        await_pods(admin, {"pod-a"}, PARTITIONS)
        with enqueuing(make("outside"), admin, connect) as counts:
            for number in itertools.count():
                if time.monotonic() > until:
                    break
                with pod(f"pod-{number}"):
                    await_pods(admin, {"pod-a", f"pod-{number}"}, PARTITIONS)
                await_pods(admin, {"pod-a"}, PARTITIONS)
                moves += 2
        wait_for(
            lambda: not admin.execute("select from jobs_lib.jobs limit 1").rowcount,
            timeout=40,
            what="all have run",
        )
    assert moves >= 10
    for group, count in counts.items():
        assert read_order(admin, group) == list(range(count))
    # No pod was cut off: a pod that leaves properly costs no attempt.
    assert not admin.execute("select from jobs_lib.history where attempt > 1").rowcount
