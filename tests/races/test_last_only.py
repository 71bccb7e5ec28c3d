"""Only-the-last jobs against their enqueuers, step by step, in both orders."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import TYPE_CHECKING

import psycopg
import pytest

from jobs_lib.jobs.job import RetryAfter
from tests.races.conftest import ORIGIN, run

if TYPE_CHECKING:
    from tests.races.conftest import Scene


def last(scene: Scene, connection=None, **options) -> int:
    return scene.enqueue(connection, "last", "g", **options)


def test_the_newest_of_five_waiting_jobs_runs_and_supersedes_the_others(scene):
    jobs = [last(scene) for _ in range(5)]
    assert run(scene.pod(ORIGIN)) == jobs[-1:]
    ends = [scene.ends(job) for job in jobs]
    assert ends == [["superseded"]] * 4 + [["completed"]]


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_a_job_uncommitted_at_the_claim_does_not_supersede_a_running_one(
    scene, commits
):
    older = last(scene)
    open_one = scene.begin()
    newer = last(scene, open_one)
    pod = scene.pod(ORIGIN)
    pod.rounds()
    running = pod.start()
    assert running.id == older
    open_one.commit() if commits else open_one.rollback()
    pod.rounds()
    assert pod.startable == []  # never two at once
    pod.finish(running)
    # The last enqueue counts: a run follows after its commit.
    assert run(pod) == ([newer] if commits else [])
    assert scene.ends(older) == ["completed"]


def test_a_rolled_back_job_leaves_the_pending_one_as_it_was(scene):
    older = last(scene)
    open_one = scene.begin()
    last(scene, open_one)
    open_one.rollback()
    assert run(scene.pod(ORIGIN)) == [older]
    assert scene.ends(older) == ["completed"]


def test_jobs_enqueued_while_one_runs_become_one_run_after_it(scene):
    pod = scene.pod(ORIGIN)
    first = last(scene)
    pod.rounds()
    running = pod.start()
    assert running.id == first
    second, third = last(scene), last(scene)
    pod.rounds()
    assert pod.startable == []
    pod.finish(running)
    assert run(pod) == [third]
    assert scene.ends(second) == ["superseded"]


@pytest.mark.parametrize("settled", [True, False], ids=["after", "before"])
def test_a_job_enqueued_while_the_last_one_fails_supersedes_it(scene, settled):
    pod = scene.pod(ORIGIN)
    failing = last(scene)
    pod.rounds()
    running = pod.start()
    if not settled:
        newer = last(scene)
    pod.finish(running, RetryAfter(0))
    pod.round()
    if settled:
        newer = last(scene)
    assert run(pod, 6) == [newer]
    assert scene.ends(failing) == ["superseded"]
    assert scene.ends(newer) == ["completed"]


def test_a_failed_last_job_without_a_newer_one_runs_again(scene):
    pod = scene.pod(ORIGIN)
    failing = last(scene)
    pod.rounds()
    pod.finish(pod.start(), RetryAfter(0))
    assert run(pod) == [failing]


def test_a_job_that_is_just_being_retried_is_superseded_all_the_same(scene, wait_for):
    connection = scene.connect()
    connection.execute("set lock_timeout = 0")
    pod = scene.pod(ORIGIN, connection=connection)
    failing = last(scene)
    pod.rounds()
    pod.finish(pod.start(), RetryAfter(3_600))
    pod.round()
    newer = last(scene)
    # An operator retries it: the row moves once that is committed.
    retrying = scene.begin()
    retrying.execute(
        "update jobs_lib.jobs set run_at = clock_timestamp() where id = %s", (failing,)
    )
    waiting = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
    place = (connection.info.backend_pid,)
    with ThreadPoolExecutor(1) as thread:
        ran = thread.submit(run, pod, 6)
        wait_for(
            lambda: scene.admin.execute(waiting, place).rowcount,
            timeout=30,
            what="its end waits for the retry",
        )
        retrying.commit()
        assert ran.result(30) == [newer]
    assert scene.ends(failing) == ["superseded"]
    assert run(pod, 6) == []


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_the_second_of_two_enqueues_waits_and_its_job_is_the_newer(scene, commits):
    first, second = scene.begin(), scene.begin()
    older = last(scene, first)
    with pytest.raises(psycopg.errors.LockNotAvailable):
        last(scene, second)
    second.rollback()
    first.commit() if commits else first.rollback()
    newer = last(scene)
    assert newer > older
    assert run(scene.pod(ORIGIN)) == [newer]
    assert scene.ends(older) == (["superseded"] if commits else [])


def test_an_older_id_that_commits_last_is_still_followed_by_a_run(scene):
    slow = scene.begin()
    older = last(scene, slow, ordered=False)
    newer = last(scene, ordered=False)
    pod = scene.pod(ORIGIN)
    pod.rounds()
    running = pod.start()
    assert running.id == newer
    slow.commit()
    pod.rounds()
    assert pod.startable == []
    pod.finish(running)
    assert run(pod) == [older]


@pytest.mark.expects("jobs.fenced")
def test_a_superseding_that_comes_after_a_take_over_changes_nothing(scene):
    jobs = [last(scene) for _ in range(3)]
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.round()
    if not pod.dispatcher._settler.early:
        pod.round()
    assert len(pod.dispatcher._settler.early) == 2
    heir.take_over(ORIGIN)
    pod.rounds()
    # The old owner ended none of them; a job that it still starts cannot commit.
    assert all(scene.state(job) for job in jobs)
    assert jobs[-1] in run(heir, 8)
    assert all(len(scene.ends(job)) == 1 for job in jobs)


STEPS = sorted(set(permutations(["first"] * 2 + ["second"] * 2 + ["pod"] * 2)))


@pytest.mark.guarantee("FJ17", "I15", "I17")
@pytest.mark.parametrize("fails", [False, True], ids=["runs", "fails"])
@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_every_interleaving_of_two_enqueues_and_a_pod_ends_right(scene, commits, fails):
    # One job exists already. The second enqueuer always commits, and the first may roll
    # back. The pod starts a job and ends it.
    pod = scene.pod(ORIGIN)
    enqueuers = {name: scene.connect() for name in ("first", "second")}
    for number, steps in enumerate(STEPS):
        for connection in enqueuers.values():
            connection.execute("begin")
        play(scene, pod, enqueuers, f"g{number}", steps, commits, fails)


def play(scene, pod, enqueuers, group, steps, commits, fails) -> None:
    committed = [scene.enqueue(None, "last", group)]
    drawn: dict[str, int] = {}
    running, seen = None, 0
    ran: Counter[int] = Counter()

    def start():
        nonlocal seen
        pod.rounds(4)
        (job,) = pod.start_all() or [None]  # never two at once
        if job is not None:
            assert job.id in committed
            seen = len(committed)
        return job

    def finish(job, error=None):
        pod.finish(job, error)
        pod.round()
        ran[job.id] += error is None

    for step in steps:
        if step == "pod" and running is None:
            running = start()
            assert running is not None
        elif step == "pod":
            finish(running, RetryAfter(0) if fails else None)
            running = None
        elif step in drawn:
            ends = step == "second" or commits
            connection = enqueuers[step]
            connection.commit() if ends else connection.rollback()
            committed += [drawn[step]] if ends else []
        else:
            drawn[step] = enqueue_after(scene, enqueuers, step, group, drawn)
    while job := start():
        finish(job)
    # After the last commit a job started that saw all committed jobs.
    assert seen == len(committed), steps
    assert set(ran) <= set(committed), steps
    assert 1 <= ran.total() <= len(committed), steps
    assert max(ran.values()) == 1, steps
    assert all(len(scene.ends(job)) == 1 for job in committed), steps


def enqueue_after(scene, enqueuers, who, group, drawn) -> int:
    """Enqueue; without the group's lock if the other transaction is open."""
    (other,) = enqueuers.keys() - {who}
    waits = other in drawn and enqueuers[other].info.transaction_status == 2
    return scene.enqueue(enqueuers[who], "last", group, ordered=not waits)
