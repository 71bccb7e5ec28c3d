"""Commits that a pod has seen are lost: its knowledge of them must not count."""

from __future__ import annotations

import math

import psycopg
import pytest

from jobs_lib.errors import FencedError, UnknownCommitError
from jobs_lib.executor.lane import Result
from jobs_lib.executor.round_trip import RoundTrip
from jobs_lib.jobs.job import Discard, RetryAfter
from tests.races.conftest import ORIGIN, run
from tests.races.test_interleavings import effect

ELSEWHERE = 1
"""The mark of another server: no server started one microsecond after the epoch."""


@pytest.fixture
def pod(scene):
    """A pod that knows which server it asks."""
    pod = scene.pod()
    pod.dispatcher._recover(pod.round_trip)
    pod.take_over(ORIGIN)
    return pod


def reconnect(pod) -> None:
    """Do what a dispatcher does with a new connection."""
    pod.dispatcher._recover(pod.round_trip)


def lose(scene, *jobs: int) -> None:
    """Bring ended jobs back, as on a server that lacks the last commits."""
    scene.admin.execute(
        'insert into jobs_lib.jobs (origin, id, type, "group", payload, enqueued_at)'
        " select origin, id, type, \"group\", '{}', enqueued_at"
        " from jobs_lib.history where id = any (%s)",
        ([*jobs],),
    )
    scene.admin.execute("delete from jobs_lib.history where id = any (%s)", ([*jobs],))


def replace_job(scene, job: int) -> None:
    """Give the job's id to another job, as a server does that lacks the first one."""
    scene.admin.execute(
        "update jobs_lib.jobs set enqueued_at = clock_timestamp() where id = %s", (job,)
    )


@pytest.mark.expects("jobs.fenced")
@pytest.mark.guarantee("FP7", "I9")
@pytest.mark.parametrize("known", [True, False], ids=["noticed", "not noticed"])
def test_a_handler_commits_nothing_while_jobs_before_its_own_are_back(
    scene, pod, known
):
    jobs = [scene.enqueue(group="g") for _ in range(4)]
    pod.rounds()
    for _ in range(2):
        ended = pod.start()
        pod.begin(ended)
        pod.commit(ended)
    pod.round()
    running = pod.start()
    lose(scene, *jobs[:2])
    if known:
        reconnect(pod)
    else:
        running.lane.server = ELSEWHERE
    effect(pod.begin(running), pod, running)
    assert pod.commit(running).result is Result.FENCED
    assert scene.effects() == []
    reconnect(pod)
    assert run(pod, rounds=5) == jobs


@pytest.mark.expects("jobs.fenced")
@pytest.mark.guarantee("FP7", "I9")
@pytest.mark.parametrize("error", [None, RetryAfter(0), Discard()])
def test_an_end_that_preceded_a_lost_commit_is_not_written_after_it(scene, pod, error):
    jobs = [scene.enqueue(group="g") for _ in range(3)]
    pod.rounds()
    pod.finish(pod.start())
    pod.round()
    pod.finish(pod.start(), error)
    lose(scene, jobs[0])
    reconnect(pod)
    assert run(pod, rounds=5) == jobs
    assert [scene.ends(job) for job in jobs] == [["completed"]] * 3


@pytest.mark.expects("jobs.fenced")
@pytest.mark.guarantee("FP7", "I1")
@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("error", [None, RetryAfter(99), Discard()])
def test_a_job_that_has_the_id_of_a_lost_one_is_neither_ended_nor_put_off(
    scene, pod, group, error
):
    job = scene.enqueue(group=group)
    pod.rounds()
    running = pod.start()
    replace_job(scene, job)
    reconnect(pod)
    pod.finish(running, error)
    pod.round()
    assert scene.state(job) == ("available", 0, 0)
    assert run(pod, rounds=5) == [job]


@pytest.mark.expects("jobs.fenced")
def test_a_job_that_has_the_id_of_a_carried_one_is_not_ended_with_another(scene, pod):
    jobs = [scene.enqueue(group="g") for _ in range(2)]
    pod.rounds()
    pod.finish(pod.start())  # its end is not written yet
    running = pod.start()
    running.lane.server = ELSEWHERE
    scene.admin.execute(
        'update jobs_lib.jobs set "group" = null, enqueued_at = clock_timestamp()'
        " where id = %s",
        (jobs[0],),
    )
    pod.begin(running)
    assert pod.commit(running).result is Result.FENCED
    reconnect(pod)
    assert sorted(run(pod, rounds=5)) == jobs


@pytest.mark.guarantee("FP6", "I7")
def test_a_restart_without_a_loss_costs_no_run(scene, pod):
    jobs = [scene.enqueue(group="g") for _ in range(3)]
    pod.rounds()
    pod.finish(pod.start())  # its end is not written yet
    running = pod.start()
    running.lane.server = ELSEWHERE
    effect(pod.begin(running), pod, running)
    assert pod.commit(running) is not None
    reconnect(pod)
    assert run(pod, rounds=5) == jobs[2:]
    assert scene.effects() == [running.id]
    assert [scene.ends(job) for job in jobs] == [["completed"]] * 3


def test_a_lost_claim_of_a_running_job_is_written_again(scene, pod):
    scene.enqueue()
    pod.rounds()
    running = pod.start()
    scene.admin.execute("delete from jobs_lib.claims")
    reconnect(pod)
    claims = scene.admin.execute("select owner, ids from jobs_lib.claims").fetchall()
    assert claims == [(pod.id, [running.id])]


@pytest.mark.guarantee("FP7")
def test_another_server_behind_pgbouncer_refuses_all_until_the_pod_has_noticed(
    scene, pod
):
    job = scene.enqueue()
    queries = scene.database.queries
    bouncing = RoundTrip(scene.connect(), queries, prepare=False)
    bouncing.server = ELSEWHERE
    pod.claimer.windows.hint(ORIGIN)
    with pytest.raises(psycopg.DataError, match="another server, started at"):
        pod.dispatcher._round(bouncing)
    assert scene.admin.execute("select from jobs_lib.claims").fetchall() == []
    pod.round_trip = RoundTrip(scene.connect(), queries, prepare=False)
    reconnect(pod)
    pod.rounds()
    assert pod.start().id == job


def test_each_transaction_behind_pgbouncer_asks_for_its_server(scene, pod):
    scene.enqueue()
    pod.rounds()
    running = pod.start()
    pod._connections._keeps_server = False
    connection = pod.begin(running)
    assert connection.server == running.lane.server
    connection.server = ELSEWHERE
    assert pod.commit(running) is not None
    asking = pod._connections.opening(connection, running)
    running.lane.server = 0
    assert asking.startswith(
        pod._connections.opening(connection, running) + b"; select"
    )


@pytest.mark.expects("jobs.fenced")
def test_the_error_of_a_fenced_transaction_names_the_job_and_the_reason(scene, pod):
    job = scene.enqueue()
    pod.rounds()
    running = pod.start()
    running.lane.server = ELSEWHERE
    transaction = running.transaction()
    transaction.__enter__()
    scene.admin.execute("delete from jobs_lib.jobs")
    with pytest.raises(FencedError, match=f"job {job} was claimed on"):
        transaction.__exit__(None, None, None)


@pytest.mark.expects("jobs.fenced")
@pytest.mark.guarantee("FP9")
def test_a_group_goes_on_when_a_commit_arrived_and_its_answer_was_lost(scene, pod):
    jobs = [scene.enqueue(group="g") for _ in range(3)]
    pod.rounds()
    first = pod.start()
    transaction = first.transaction()
    effect(transaction.__enter__(), pod, first)
    transaction.__exit__(None, None, None)
    # The transaction is committed, and this process has not heard of it.
    first.completed = False
    pod.finish(first, UnknownCommitError("the connection was lost"))
    newer = scene.enqueue(group="g")
    # Some seconds later no sweep looks at these ids so soon.
    pod.dispatcher._poller._late_commits._next_at = math.inf
    ran = []
    for _ in range(5):
        pod.dispatcher._round(pod.round_trip)
        while pod.startable:
            job = pod.start()
            ran.append(job.id)
            pod.finish(job)
    assert ran == [*jobs[1:], newer]
    assert scene.effects() == jobs[:1]
