"""Cancel, pause and resume with the operator's functions, while two pods run."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack

import pytest

from jobs_lib import Cancel, Job
from jobs_lib.operating import cancel, pause, resume
from tests.support.apps import HOME, executing, make_app
from tests.support.waiting import least

pytestmark = pytest.mark.expects("fenced")

PODS = [[f"local/{n}" for n in range(8)], [f"local/{n}" for n in range(8, 16)]]
TWO = ["local/1", "local/9"]
"""One origin of each pod."""
WITHIN = 1.0


@pytest.fixture
def app(database_url):
    """An app without Kafka that looks at the usual pace."""
    return make_app(database_url, poll_interval=0.05)


@pytest.fixture
def pods(app):
    """A context manager in which two executors run, with half of the origins each."""

    def start() -> ExitStack:
        stack = ExitStack()
        for origins in PODS:
            stack.enter_context(executing(app, origins))
        return stack

    return start


def outcomes(admin) -> dict[int, str]:
    return dict(admin.execute("select id, outcome from jobs_lib.history").fetchall())


@pytest.mark.guarantee("J14")
def test_a_pending_job_is_cancelled_and_a_running_one_stops_within_a_second(
    app, admin, connect, database, wait_for, pods
):
    inside = threading.Semaphore(0)
    told: list[str] = []

    @app.job(name="async")
    async def waiting(job: Job) -> None:
        inside.release()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    @app.job(name="plain")
    def plain(job: Job) -> None:
        inside.release()
        wait_for(lambda: job.cancel_requested, what="the flag is up")
        told.append("flag")
        raise Cancel("as asked")

    @app.job()
    def never(job: Job) -> None:
        told.append("ran")

    cancelled: list[int] = []

    def cancel_some() -> float:
        """Cancel four jobs that run and two that wait; return the seconds it took."""
        with connect() as connection:
            running = [
                app.jobs[kind].options(origin=origin).enqueue(connection)
                for kind in ("async", "plain")
                for origin in TWO
            ]
        for _ in running:
            assert inside.acquire(timeout=30)
        # While its type is paused, the job is pending for certain.
        pause(database, "type", "never")
        threading.Event().wait(0.6)
        with connect() as connection:
            pending = [never.options(origin=o).enqueue(connection) for o in TWO]
        cancelled.extend([*running, *pending])
        asked_at = time.monotonic()
        became = cancel(database, [*running, *pending, 10**9])
        assert became == {
            **dict.fromkeys(running, "requested"),
            **dict.fromkeys(pending, "cancelled"),
            10**9: "missing",
        }
        wait_for(
            lambda: len(outcomes(admin)) == len(cancelled),
            timeout=30,
            what="all have ended",
        )
        took = time.monotonic() - asked_at
        resume(database, "type", "never")
        return took

    with pods():
        assert least(cancel_some, WITHIN) < WITHIN
        # A further poll finds nothing left to run.
        with connect() as connection:
            last = [never.options(origin=o).enqueue(connection) for o in TWO]
        wait_for(
            lambda: len(outcomes(admin)) == len(cancelled) + 2,
            timeout=30,
            what="later ones run",
        )
    ends = outcomes(admin)
    assert {ends[job] for job in cancelled} == {"cancelled"}
    assert {ends[job] for job in last} == {"completed"}
    each = len(cancelled) // 3
    assert sorted(told) == ["cancelled"] * each + ["flag"] * each + ["ran"] * 2


@pytest.mark.guarantee("J15")
@pytest.mark.parametrize("kind", ["type", "origin", "group"])
def test_a_pause_holds_on_all_pods_within_a_second_until_resumed(
    app, admin, connect, database, wait_for, pods, kind
):
    ran: list[tuple[float, str, str]] = []

    @app.job(group="group")
    def work(job: Job, group: str) -> None:
        ran.append((time.monotonic(), job.origin, group))

    @app.job(group="group")
    def other(job: Job, group: str) -> None:
        ran.append((time.monotonic(), job.origin, group))

    held = {"type": ["work"], "origin": TWO, "group": ["held-1", "held-9"]}[kind]
    free_origins = ["local/3", "local/11"] if kind == "origin" else TWO

    def send() -> None:
        with connect() as connection:
            for origin, free in zip(TWO, free_origins, strict=True):
                name = f"held-{origin.rpartition('/')[2]}"
                work.options(origin=origin).enqueue(connection, group=name)
                other.options(origin=free).enqueue(connection, group=f"free {free}")

    def runs(word: str) -> int:
        return sum(group.startswith(word) for _, _, group in ran)

    def pause_and_resume() -> float:
        """Return the seconds from the resume to the start of the last held job."""
        ran.clear()
        send()
        wait_for(lambda: len(ran) == 4, timeout=30, what="nothing is paused yet")
        for name in held:
            assert pause(database, kind, name).changed
        # This is the longest time between looks of an idle pod that gets no hints.
        threading.Event().wait(WITHIN)
        for n in range(5):
            send()
            wait_for(
                lambda n=n: runs("free") == 2 * n + 4,
                timeout=30,
                what="the others run",
            )
        assert runs("held") == 2
        resumed_at = time.monotonic()
        for name in held:
            assert resume(database, kind, name).changed
        wait_for(lambda: runs("held") == 12, timeout=30, what="what was held runs")
        return max(at for at, _, _ in ran) - resumed_at

    with pods():
        assert least(pause_and_resume, WITHIN) < WITHIN


@pytest.mark.guarantee("J15")
@pytest.mark.parametrize("kind", ["group", "type"])
def test_a_pause_also_stops_what_a_busy_pod_has_claimed_before(
    app, admin, connect, database, wait_for, kind
):
    begun: list[int] = []
    quick: list[int] = []
    gate = threading.Event()

    @app.job(group="group")
    def work(job: Job, group: str) -> None:
        begun.append(job.id)
        gate.wait(60)

    # The loop runs these at once, while the others wait for a thread.
    @app.job()
    async def other(job: Job) -> None:
        quick.append(job.id)

    def run_another() -> None:
        with connect() as connection:
            last = other.options(origin="local/1").enqueue(connection)
        wait_for(lambda: last in quick, timeout=30, what="the pod is busy")

    def claimed() -> set[int]:
        run_another()
        rows = admin.execute("select unnest(ids) from jobs_lib.claims").fetchall()
        return {job_id for (job_id,) in rows} & set(jobs)

    # One lane of one group, or lanes that wait for a thread.
    groups = ["held"] * 8 if kind == "group" else [f"g{n}" for n in range(8)]
    with connect() as connection:
        held = work.options(origin="local/1")
        jobs = [held.enqueue(connection, group=name) for name in groups]
    with executing(app, HOME, workers=1):
        wait_for(lambda: len(claimed() - {*begun}) > 1, what="some wait")
        assert pause(database, kind, "held" if kind == "group" else "work").changed
        wait_for(lambda: claimed() == {*begun}, timeout=30, what="they are released")
        gate.set()
        wait_for(lambda: claimed() == set(), timeout=30, what="the first one ends")
        for _ in range(5):
            run_another()
        assert len(begun) == 1
        assert resume(database, kind, "held" if kind == "group" else "work").changed
        wait_for(lambda: len(begun) == 8, timeout=30, what="the others run")
    assert sorted(begun) == jobs
