"""Many partitions, many pods, and pods in several processes."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.support.apps import count, make_app, running
from tests.support.pods import Pods, read_owners

if TYPE_CHECKING:
    from jobs_lib import Job

pytestmark = pytest.mark.expects("fenced")

SESSION = 6.0


@pytest.fixture
def make_pods(database_url, bootstrap_servers, topic):
    """A function that makes the pods of a service with this many partitions."""

    def make(partitions: int) -> Pods:
        home = topic(partitions)
        return Pods(database_url, bootstrap_servers, home, partitions)

    return make


@pytest.fixture
def await_all(admin, wait_for):
    """A function that waits until pods share all origins, in both roles."""

    def await_all(pods: Pods, *names: str, timeout: float = 60) -> None:
        def shared() -> bool:
            executed = read_owners(admin, "execute")
            found = {origin for origins in executed.values() for origin in origins}
            return (
                {*executed} == {*names}
                and found == {*pods.origins}
                and executed == read_owners(admin, f"consume:{pods.group}")
            )

        wait_for(
            shared,
            timeout=timeout,
            what=lambda: f"{names} share all: {read_owners(admin, 'execute')}",
        )

    return await_all


@pytest.mark.guarantee("S22", "S12")
@pytest.mark.parametrize(
    ("partitions", "count"),
    [(1, 1), (100, 3), pytest.param(1_000, 1, marks=pytest.mark.slow)],
)
def test_pods_share_partitions_evenly_and_run_the_jobs_of_their_own(
    make_pods, admin, connect, wait_for, await_all, partitions, count
):
    pods = make_pods(partitions)
    names = [f"pod-{n}" for n in range(count)]
    with contextlib.ExitStack() as all_pods:
        for name in names:
            app = pods.make(name)
            all_pods.enter_context(running(app, "consumers", "executor"))
        await_all(pods, *names)
        owners = read_owners(admin, "execute")
        with connect() as connection:
            pods.enqueue(connection, 3)
        wait_for(
            lambda: len(pods.runs) == 3 * partitions, timeout=60, what="all have run"
        )
    assert Counter(pods.runs) == {
        (pod, origin): 3 for pod, origins in owners.items() for origin in origins
    }
    sizes = [len(origins) for origins in owners.values()]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.guarantee("S13", "I11")
def test_an_executor_becomes_five_and_one_again_under_load(
    database_url, admin, connect, wait_for
):
    admin.execute(
        'create table effects ("group" text, n int,'
        " place bigint generated always as identity)"
    )
    app = make_app(database_url)

    @app.job(group="group")
    def work(job: Job, group: str, n: int) -> None:
        with job.transaction() as connection:
            connection.execute(
                'insert into effects ("group", n) values (%s, %s)', (group, n)
            )

    def make(pod: str):
        other = make_app(database_url, pod=pod)
        other.jobs.update(app.jobs)
        return other

    def owning() -> set[str]:
        owners = read_owners(admin, "execute")
        return {*owners} if sum(map(len, owners.values())) == 16 else set()

    def await_pods(count: int) -> None:
        names = {f"pod-{n}" for n in range(count)}
        wait_for(lambda: owning() == names, timeout=30, what=f"{count} pods share all")

    sent = 0

    def send() -> None:
        nonlocal sent
        with connect() as connection:
            payloads = [{"group": f"g{g}", "n": sent} for g in range(50)]
            work.enqueue_many(connection, payloads)
        sent += 1

    with contextlib.ExitStack() as pods:
        stacks = []
        for n in range(5):
            stacks.append(pods.enter_context(contextlib.ExitStack()))
            stacks[-1].enter_context(running(make(f"pod-{n}"), "executor"))
            send()
            await_pods(n + 1)
            send()
        for n in reversed(range(1, 5)):
            send()
            stacks[n].close()
            send()
            await_pods(n)
        total = sent * 50
        wait_for(
            lambda: admin.execute("select from effects").rowcount == total,
            timeout=60,
            what="all have run",
        )
    for group in range(50):
        rows = admin.execute(
            'select n from effects where "group" = %s order by place', (f"g{group}",)
        )
        assert [n for (n,) in rows] == list(range(sent))


@pytest.mark.slow
@pytest.mark.guarantee("S14", "I14")
def test_service_and_sidecar_of_one_pod_are_two_processes(
    make_pods,
    database_url,
    bootstrap_servers,
    start_process,
    admin,
    connect,
    await_all,
    wait_for,
):
    pods = make_pods(6)

    def start(pod: str, part: str):
        return start_process(
            part,
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            home=pods.home,
            pod=pod,
        )

    def enqueue_and_await(*sidecars) -> None:
        before = sum(len(sidecar.lines) for sidecar in sidecars)
        with connect() as connection:
            pods.enqueue(connection)
        wait_for(
            lambda: sum(len(s.lines) for s in sidecars) == before + 6,
            timeout=SESSION + 30,
            what="each job runs in a sidecar",
        )
        # A job that ran, and whose end was not committed, would run again after a kill.
        wait_for(lambda: not count(admin, "jobs"), what="all have ended")

    first, beside_first = start("pod-a", "beside_sidecar"), start("pod-a", "sidecar")
    await_all(pods, "pod-a")
    second, beside_second = start("pod-b", "beside_sidecar"), start("pod-b", "sidecar")
    await_all(pods, "pod-a", "pod-b")
    enqueue_and_await(beside_first, beside_second)
    assert len(beside_first.lines) == len(beside_second.lines) == 3
    assert not first.lines
    assert not second.lines

    # Only the sidecar is replaced: its service has the partitions all the time.
    beside_first.kill()
    replaced = start("pod-a", "sidecar")
    await_all(pods, "pod-a", "pod-b")
    enqueue_and_await(replaced, beside_second)

    killed = time.monotonic()
    for process in (first, replaced):
        process.kill()
    enqueue_and_await(beside_second)
    over = time.monotonic() - killed - SESSION
    print(f"taken over {over:.2f} s after the session's end")
    # This allows for the rebalance, two reads of the follower and a claim, if busy.
    assert over < 10
