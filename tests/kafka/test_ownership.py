"""Ownership on the real broker: executors claim what their pod is assigned."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.support.apps import make_app, running
from tests.support.pods import Pods, read_owners

if TYPE_CHECKING:
    from jobs_lib import Job

pytestmark = pytest.mark.expects("fenced")


@pytest.fixture
def pods(database_url, bootstrap_servers, topic):
    """Pods of a service; its home topic has 12 partitions."""
    return Pods(database_url, bootstrap_servers, topic(12), 12)


def owned_by(admin, pod: str) -> int:
    return len(read_owners(admin, "execute").get(pod, ()))


def shares(admin, role: str, consumer_role: str) -> list[int]:
    """Count each pod's origins once its executor owns those of its consumer."""
    executed, consumed = read_owners(admin, role), read_owners(admin, consumer_role)
    return sorted(map(len, executed.values())) if executed == consumed else []


@pytest.mark.guarantee("S12")
@pytest.mark.parametrize("sidecar", [False, True], ids=["in process", "sidecar"])
def test_two_pods_claim_only_what_each_is_assigned(
    sidecar, pods, admin, connect, wait_for
):
    consuming = f"consume:{pods.home}-service"

    def pod(stack: contextlib.ExitStack, name: str) -> None:
        if sidecar:
            stack.enter_context(running(pods.make(name), "consumers"))
            stack.enter_context(running(pods.make(name), "executor", sidecar=True))
        else:
            stack.enter_context(running(pods.make(name), "consumers", "executor"))

    def settled(*sizes: int) -> None:
        wait_for(
            lambda: shares(admin, "execute", consuming) == list(sizes),
            timeout=60,
            what=lambda: (
                f"pods own {sizes}: {read_owners(admin, 'execute')} of "
                f"{read_owners(admin, consuming)}"
            ),
        )

    def check(times: int) -> None:
        before = len(pods.runs)
        with connect() as connection:
            pods.enqueue(connection, times)
        assigned = read_owners(admin, consuming)
        wait_for(
            lambda: len(pods.runs) == before + 12 * times, timeout=60, what="all ran"
        )
        for name, origin in pods.runs[before:]:
            assert origin in assigned[name]

    with contextlib.ExitStack() as both:
        with contextlib.ExitStack() as first:
            pod(first, "pod-a")
            settled(12)
            check(5)
            pod(both, "pod-b")
            settled(6, 6)
            check(5)
        # In the other direction: pod-b has the origins that pod-a gave back.
        settled(12)
        check(5)
    assert read_owners(admin, "execute") == {}


def test_a_sidecar_never_joins_the_group(pods, kafka_admin, admin, wait_for):
    consuming = f"consume:{pods.home}-service"
    with (
        running(pods.make("pod-a"), "consumers"),
        running(pods.make("pod-a"), "executor", sidecar=True),
    ):
        wait_for(
            lambda: shares(admin, "execute", consuming) == [12],
            timeout=60,
            what="the sidecar owns what the service has",
        )
        group = f"{pods.home}-service"
        described = kafka_admin.describe_consumer_groups([group])[group].result()
        assert [member.client_id for member in described.members] == ["pod-a"]


def test_executors_without_kafka_share_the_origins_by_heartbeat(
    database_url, admin, connect, wait_for
):
    ran: list[str] = []

    def make(pod: str):
        # Neither dies, however late its heartbeats come.
        app = make_app(database_url, pod=pod, stale_after=30.0)

        @app.job(group="group")
        def work(job: Job, group: str) -> None:
            ran.append(pod)

        return app

    with running(make("pod-a"), "executor") as first:
        wait_for(
            lambda: owned_by(admin, "pod-a") == 16,
            timeout=60,
            what="one has all",
        )
        with running(make("pod-b"), "executor"):
            wait_for(
                lambda: (
                    len(shared := read_owners(admin, "execute")) == 2
                    and sum(map(len, shared.values())) == 16
                ),
                timeout=60,
                what="two share them",
            )
            with connect() as connection:
                work = first.app.jobs["work"]
                work.enqueue_many(connection, [{"group": f"g{n}"} for n in range(100)])
            wait_for(lambda: len(ran) == 100, timeout=60, what="all ran")
            assert set(ran) == {"pod-a", "pod-b"}
        wait_for(
            lambda: owned_by(admin, "pod-a") == 16,
            timeout=60,
            what="all again",
        )
