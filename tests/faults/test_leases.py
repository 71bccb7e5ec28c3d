"""Jobs in a pod's memory do not begin once other pods may have taken them over."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jobs_lib import Item  # noqa: TC001 - read from the annotation
from jobs_lib.ownership import Source
from tests.faults.helpers import await_heartbeats
from tests.support.apps import HOME, executing, heard, make_app
from tests.support.proxy import Proxy


class ReadSource(Source):
    """Shows what its ownership has read last."""

    read: frozenset[str] = frozenset()

    @property
    def wanted(self) -> frozenset[str]:
        self.read = super().wanted
        return self.read


@pytest.mark.guarantee("I4", "FK19")
@pytest.mark.parametrize("kind", ["plain", "async", "batch"])
@pytest.mark.expects("loop.failed")
def test_a_pod_that_is_cut_off_from_its_database_begins_nothing_more(
    url, connect, wait_for, kind
):
    with Proxy.before(url) as proxy:
        app = make_app(proxy.url(url), database_timeout=2)
        begun: list[int] = []
        ended: list[int] = []
        gate = threading.Event()

        def handle(n: int) -> None:
            begun.append(n)
            gate.wait(30)
            ended.append(n)

        if kind == "plain":

            @app.job(group=lambda n: "g")
            def work(job, n: int) -> None:
                handle(n)

        elif kind == "async":

            @app.job(group=lambda n: "g")
            async def work(job, n: int) -> None:
                await asyncio.to_thread(handle, n)

        else:

            @app.batch(size=2, group=lambda payload: "g")
            def work(items: list[Item[int]]) -> None:
                for item in items:
                    handle(item.payload)

        with connect() as connection:
            name = "payload" if kind == "batch" else "n"
            work.enqueue_many(connection, [{name: n} for n in range(8)])
        with (
            heard("jobs.dropped") as dropped,
            executing(app, HOME, workers=16) as process,
        ):
            wait_for(lambda: begun, what="the first one runs")
            proxy.hold()
            wait_for(process.lease.is_over, what="others may take over")
            gate.set()
            wait_for(lambda: dropped, timeout=30, what="the others are dropped")
            assert len(begun) == (2 if kind == "batch" else 1)
            proxy.release()
            wait_for(lambda: len(ended) == 8, timeout=40, what="it goes on")
        # No other pod has taken over: jobs that had run are not repeated.
        assert ended == list(range(8))


@pytest.mark.guarantee("FP16", "I4")
@pytest.mark.expects("origins.lost", "jobs.fenced", "loop.failed")
def test_a_pod_that_was_frozen_begins_nothing_that_it_had_in_memory(
    url, connect, start_process, tmp_path, wait_for
):
    app = make_app(url)

    @app.job(group="group")
    def work(job, group: str) -> None: ...

    def enqueue(groups: list[str], times: int) -> None:
        with connect() as connection:
            work.enqueue_many(connection, [{"group": g} for g in groups] * times)

    def starts(pod: str) -> list[str]:
        lines = (tmp_path / "starts").read_text().splitlines()
        return [line.split()[0] for line in lines if line.endswith(f" {pod}")]

    def left() -> int:
        with connect(autocommit=True) as admin:
            return admin.execute("select count(*) from jobs_lib.jobs").fetchone()[0]

    def start(pod: str):
        return start_process("notes_starts", url, pod=pod, folder=str(tmp_path))

    frozen = start("frozen")
    enqueue(["a", "b"], 8)
    wait_for(
        lambda: len(frozen.lines) == 2,
        timeout=60,
        what=lambda: f"two run\n{frozen.output}",
    )
    frozen.pause()
    running = starts("frozen")
    (tmp_path / "heir may end").touch()
    heir = start("heir")
    wait_for(lambda: left() == 0, timeout=60, what=lambda: f"all ended\n{heir.output}")
    assert len(starts("heir")) == 16
    (tmp_path / "frozen may end").touch()
    frozen.resume()
    enqueue([f"new-{n}" for n in range(16)], 2)
    wait_for(lambda: left() == 0, timeout=60, what=lambda: f"all\n{frozen.output}")
    wait_for(
        lambda: "origins.lost" in frozen.output,
        timeout=30,
        what=lambda: f"it notices\n{frozen.output}",
    )
    first = {str(n) for n in range(1, 17)}
    assert [job for job in starts("frozen") if job in first] == running
    assert len(starts("frozen") + starts("heir")) == 16 + 2 + 32


@pytest.mark.guarantee("I4", "I11")
@pytest.mark.expects("origins.lost", "jobs.fenced")
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_pod_that_waits_for_a_hand_over_begins_nothing_that_others_have_taken(
    database_url, admin, connect, wait_for, kind
):
    leaving, taken = "local/1", "local/2"
    app = make_app(database_url, handover_timeout=60)
    begun: list[tuple[str, int]] = []
    gates = {leaving: threading.Event(), taken: threading.Event()}

    def handle(job, n: int) -> None:
        begun.append((job.origin, n))
        gates[job.origin].wait(30)

    if kind == "plain":

        @app.job(group=lambda n: "g")
        def work(job, n: int) -> None:
            handle(job, n)

    else:

        @app.job(group=lambda n: "g")
        async def work(job, n: int) -> None:
            await asyncio.to_thread(handle, job, n)

    with connect() as connection:
        for origin in gates:
            work.options(origin=origin).enqueue_many(
                connection, [{"n": n} for n in range(3)]
            )

    source = ReadSource()
    with (
        heard("jobs.fenced") as fenced,
        heard("origins.lost") as lost,
        executing(app, source) as process,
    ):
        source.assign(gates)
        wait_for(lambda: len(begun) == 2, what="one of each origin runs")
        source.revoke([leaving])
        wait_for(lambda: source.read == {taken}, what="the hand-over begins")
        admin.execute(
            "update jobs_lib.origins set owner = gen_random_uuid(), epoch = epoch + 1"
            " where role = 'execute' and origin = %s",
            (taken,),
        )
        # One that was sent after the take-over, and the one after that.
        await_heartbeats(admin, process, 2)
        gates[taken].set()
        wait_for(lambda: fenced, what="the handler that ran commits nothing")
        assert sorted(begun) == [(leaving, 0), (taken, 0)]
        assert not lost  # its own thread still waits
        gates[leaving].set()
        wait_for(lambda: lost, what="it gives the origin up")
