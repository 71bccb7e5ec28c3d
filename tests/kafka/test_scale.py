"""Many partitions, many pods, and pods in several processes."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.apps import HOME, count, make_app, running
from tests.support.ordered import EFFECTS, add_ordered_job, read_order
from tests.support.pods import Pods, await_pods, read_owners

if TYPE_CHECKING:
    from jobs_lib import App
    from jobs_lib.jobs.type import JobType

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
    """A function that waits until pods share all origins evenly, in both roles.

    The group moves origins in several steps: until they are shared evenly, more move.
    """

    def await_all(pods: Pods, *names: str, timeout: float = 60) -> None:
        def shared() -> bool:
            executed = read_owners(admin, "execute")
            found = {origin for origins in executed.values() for origin in origins}
            sizes = [len(origins) for origins in executed.values()]
            return (
                {*executed} == {*names}
                and found == {*pods.origins}
                and max(sizes) - min(sizes) <= 1
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


class Rounds:
    """Enqueues one job in each of fifty groups at a time."""

    GROUPS = [f"g{n}" for n in range(50)]

    def __init__(self, work: JobType[...], connect: Any) -> None:
        self.sent = 0
        """How many jobs each group has."""
        self._work = work
        self._connect = connect

    def send(self) -> None:
        """Enqueue the next job of each group."""
        with self._connect() as connection:
            payloads = [{"group": group, "n": self.sent} for group in self.GROUPS]
            self._work.enqueue_many(connection, payloads)
        self.sent += 1


@pytest.mark.guarantee("S13", "I11")
def test_an_executor_becomes_five_and_one_again_under_load(
    database_url, admin, connect, wait_for
):
    def make(pod: str) -> App:
        app = make_app(database_url, pod=pod)
        add_ordered_job(app)
        return app

    def await_shared(count: int) -> None:
        await_pods(admin, {f"pod-{n}" for n in range(count)}, len(HOME))

    admin.execute(EFFECTS)
    rounds = Rounds(make("outside").jobs["work"], connect)
    with contextlib.ExitStack() as pods:
        stacks = []
        for n in range(5):
            stacks.append(pods.enter_context(contextlib.ExitStack()))
            stacks[-1].enter_context(running(make(f"pod-{n}"), "executor"))
            rounds.send()
            await_shared(n + 1)
            rounds.send()
        for n in reversed(range(1, 5)):
            rounds.send()
            stacks[n].close()
            rounds.send()
            await_shared(n)
        total = rounds.sent * len(rounds.GROUPS)
        wait_for(
            lambda: admin.execute("select from effects").rowcount == total,
            timeout=60,
            what="all have run",
        )
    for group in rounds.GROUPS:
        assert read_order(admin, group) == list(range(rounds.sent))


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
