"""A job that kills its process is found, and no other job pays for it."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import pytest

from jobs_lib.executor.claiming.suspects import Suspects
from jobs_lib.executor.section import Section
from jobs_lib.jobs.limit import Limit
from tests.operating.helpers import add_job
from tests.races.conftest import ORIGIN, run
from tests.support.apps import HOME, executing, make_app

if TYPE_CHECKING:
    from jobs_lib import Job
    from tests.support import Worker

pytestmark = pytest.mark.expects("fenced")


def test_a_job_that_kills_its_process_is_discarded_and_its_neighbours_finish(
    database_url, connect, start_process, wait_for
):
    app = make_app(database_url)

    @app.job()
    def work(job: Job) -> None: ...

    @app.job()
    def kill(job: Job) -> None: ...

    admin = connect(autocommit=True)
    admin.execute("create table runs (job bigint, attempt int)")
    with connect() as connection:
        work.enqueue_many(connection, [{}] * 10)
        killer = kill.enqueue(connection)
        work.enqueue_many(connection, [{}] * 10)
    pods: list[Worker] = []
    while len(pods) < 8:
        pod = start_process("killer", database_url, pod=f"pod-{len(pods)}")
        pods.append(pod)
        wait_for(
            lambda pod=pod: not pod.running or not _count(admin, "jobs"),
            timeout=60,
            what=lambda pod=pod: f"the process died, or all is done\n{pod.output}",
        )
        if pod.running:
            break
    # It ran twice beside many jobs, and then alone among the suspects.
    assert len(pods) < 8
    assert _count(admin, "runs") == 20
    row = admin.execute("select id, type, errors from jobs_lib.discarded").fetchone()
    assert row is not None
    assert row[:2] == (killer, "kill")
    assert "the process died" in row[2][-1]["error"]
    # No other job has a recorded failure.
    outcomes = admin.execute(
        "select distinct outcome from jobs_lib.history where type = 'work'"
    )
    assert outcomes.fetchall() == [("completed",)]


def _count(admin, table: str) -> int:
    schema = "jobs_lib." if table != "runs" else ""
    return admin.execute(f"select count(*) from {schema}{table}").fetchone()[0]


@pytest.mark.guarantee("FP1")
@pytest.mark.parametrize("grouped", [False, True], ids=["no group", "groups"])
def test_the_jobs_of_a_dead_process_run_side_by_side(
    database_url, admin, wait_for, grouped
):
    app = make_app(database_url)
    together = threading.Barrier(8)
    ended: list[int] = []

    @app.job()
    def work(job: Job) -> None:
        together.wait(30)
        ended.append(job.id)

    for n in range(8):
        group = f"g{n}" if grouped else None
        add_job(admin, origin=f"local/{n % 4}", crashes=1, group=group)
    with executing(app, HOME, workers=8):
        wait_for(lambda: len(ended) == 8, what="all have run at once")


def test_the_suspects_of_two_crashes_run_one_after_the_other(scene):
    jobs = [scene.enqueue() for _ in range(3)]
    fresh = scene.enqueue()
    crash(scene, 2, *jobs)
    pod = scene.pod(ORIGIN)
    pod.rounds()
    started = {job.id: job for job in pod.start_all()}
    assert started.keys() == {jobs[0], fresh}
    pod.finish(started[jobs[0]])
    pod.rounds()
    (second,) = pod.start_all()
    assert second.id == jobs[1]


@pytest.mark.guarantee("FP1")
def test_no_two_suspects_of_two_crashes_run_at_once_in_one_executor(
    database_url, admin, wait_for
):
    app = make_app(database_url)
    running: set[int] = set()
    most: list[int] = []

    @app.job()
    def work(job: Job) -> None:
        running.add(job.id)
        most.append(len(running))
        threading.Event().wait(0.05)
        running.discard(job.id)

    # The jobs are in origins of all dispatchers, which share the right to run one.
    for n in range(8):
        add_job(admin, origin=f"local/{n}", crashes=2)
    with executing(app, HOME, workers=8):
        wait_for(lambda: len(most) == 8, what="all have run")
    assert most == [1] * 8


@pytest.mark.guarantee("J15")
def test_a_suspect_of_a_paused_origin_waits_and_holds_up_no_other(scene):
    suspect, other = scene.enqueue(), scene.enqueue()
    elsewhere = "local/2"
    scene.admin.execute(
        "update jobs_lib.jobs set origin = %s where id = %s", (elsewhere, other)
    )
    crash(scene, 2, suspect, other)
    scene.admin.execute("insert into jobs_lib.pauses values ('origin', %s)", (ORIGIN,))
    pod = scene.pod(ORIGIN, elsewhere)
    pod.claimer._suspects.add(suspect, ORIGIN)  # the pod saw it before the pause
    pod.claimer._suspects.add(other, elsewhere)
    assert run(pod) == [other]
    scene.admin.execute("delete from jobs_lib.pauses")
    assert run(pod) == [suspect]


@pytest.mark.parametrize("group", [None, "g"], ids=["no group", "a group"])
@pytest.mark.parametrize("unknown", [False, True], ids=["paused", "unknown"])
def test_a_suspect_whose_type_may_not_run_is_not_asked_for_all_the_time(
    scene, unknown, group
):
    suspect = scene.enqueue(group=group)
    crash(scene, 2, suspect)
    if unknown:
        scene.admin.execute("update jobs_lib.jobs set type = 'gone'")
    else:
        scene.admin.execute("insert into jobs_lib.pauses values ('type', 'work')")
    pod = scene.pod(ORIGIN)
    pod.rounds()
    seq = pod.claimer.seq
    pod.rounds()
    assert pod.claimer.seq == seq
    assert pod.startable == []
    if not unknown:
        scene.admin.execute("delete from jobs_lib.pauses")
        assert run(pod) == [suspect]


def test_a_suspect_of_a_value_with_a_limit_waits_for_room_and_then_runs(scene):
    suspect, *behind = (scene.enqueue() for _ in range(6))
    crash(scene, 2, suspect)
    by_value = Section(frozenset({"work"}), frozenset({"last"}), limit=Limit(1, "n"))
    pod = scene.pod(section=by_value)
    passed = pod.claimer.passed
    room = {"": 0}  # by the value of jobs that lack the parameter
    passed.room = lambda value: room[value]
    passed.full = lambda: [value for value, left in room.items() if not left]
    pod.take_over(ORIGIN)
    pod.rounds()
    seq = pod.claimer.seq
    pod.rounds()
    assert pod.claimer.seq == seq
    assert pod.startable == []
    # Jobs of the value are passed over all the time, and it is not one of them again.
    room[""] = 1
    passed.hungry.add("")
    pod.rounds()
    assert suspect in {job.id for job in pod.start_all()}
    pod.rounds(6)
    assert {job.id for job in pod.start_all()} <= {*behind}
    assert pod.claimer.in_flight.jobs.keys() == {suspect, *behind}


def test_a_suspect_of_an_origin_that_is_about_to_leave_is_not_begun(scene):
    running, suspect = scene.enqueue(), scene.enqueue()
    crash(scene, 2, suspect)
    pod = scene.pod(ORIGIN)
    pod.claimer.stop_claiming([ORIGIN])
    pod.claimer._suspects.add(suspect, ORIGIN)
    assert run(pod) == []
    assert scene.state(running) == ("available", 0, 0)


def crash(scene, crashes: int, *jobs: int) -> None:
    """Pretend that the processes that claimed these jobs have died."""
    scene.admin.execute(
        "update jobs_lib.jobs set crashes = %s where id = any(%s)",
        (crashes, list(jobs)),
    )


def test_a_suspect_that_has_ended_keeps_no_other_back_while_nothing_is_claimed(scene):
    job = scene.enqueue()
    scene.admin.execute("update jobs_lib.jobs set crashes = 2")
    alone = threading.Lock()
    pod = scene.pod()
    pod.claimer._suspects = Suspects(alone)
    pod.take_over(ORIGIN)
    pod.rounds()
    suspect = pod.start()
    assert suspect.id == job
    pod.lease.until = -math.inf  # as if there were no room
    pod.round()
    assert alone.locked()
    pod.finish(suspect)
    pod.round()
    assert not alone.locked()
