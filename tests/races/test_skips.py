"""A claim skips an origin that another session has locked, and forgets nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.jobs.job import RetryAfter
from jobs_lib.operating import cancel
from tests.races.conftest import ORIGIN, run

if TYPE_CHECKING:
    import psycopg


@pytest.fixture
def lock(scene, monkeypatch):
    """A connection that locks the origin as a cancel does, when `lock()` is called."""
    monkeypatch.setattr("jobs_lib.executor.claiming.scope.SKIP_PAUSE", 0.0)

    def lock():
        holder = scene.begin()
        holder.execute(
            "select from jobs_lib.origins where origin = %s for no key update",
            (ORIGIN,),
        )
        return holder

    return lock


@pytest.fixture
def swept(monkeypatch):
    """After `swept()` no sweep finds by chance a job that a claim has forgotten."""

    def stop(pod):
        monkeypatch.setattr(
            pod.dispatcher._poller._late_commits, "is_due", lambda: False
        )

    return stop


@pytest.mark.guarantee("S1", "S10")
def test_a_group_that_goes_on_behind_its_lane_is_asked_for_again(scene, lock, swept):
    jobs = [scene.enqueue(group="g") for _ in range(20)]
    pod = scene.pod(ORIGIN)
    swept(pod)
    ran = [job.id for job in _finish_all(pod)]
    assert 0 < len(ran) < len(jobs)
    pod.round()  # settles them
    holder = lock()
    # The first claim that asks for the rest finds the origin locked.
    pod.rounds(4)
    assert pod.startable == []
    holder.rollback()
    assert ran + run(pod, 10) == jobs


def _finish_all(pod):
    pod.round()
    while pod.startable:
        if job := pod.start():
            pod.finish(job)
            yield job


@pytest.mark.guarantee("S1")
@pytest.mark.parametrize("plain", [True, False])
def test_a_claim_asks_again_for_a_skipped_new_job(scene, lock, swept, plain):
    pod = scene.pod(ORIGIN)
    swept(pod)
    holder = lock()
    job = scene.enqueue(group=None if plain else "g")
    pod.dispatcher.hint(ORIGIN)
    pod.rounds()
    assert pod.startable == []
    holder.rollback()
    # The claim also needs no look, which would report that there is a job.
    pod.dispatcher._poller.prepare = lambda **_: []
    assert run(pod) == [job]


def test_a_plain_claim_asks_again_for_a_skipped_origin(scene, lock):
    pod = scene.pod(ORIGIN)
    job = scene.enqueue()
    holder = lock()
    cursor = pod.claimer.cursors[ORIGIN]
    cursor.may_have_more = cursor.all_plain = True
    name, parameters = pod.claimer.prepare(4)
    assert name == "claim_plain"
    (row,) = scene.send(scene.connect(), name, parameters)
    assert row[0] == 5
    pod.claimer.read([row])
    assert cursor.may_have_more
    assert pod.claimer.scope.was_skipped
    holder.rollback()
    assert run(pod) == [job]


@pytest.mark.guarantee("S17")
def test_a_claim_asks_again_for_a_skipped_promoted_job(scene, lock, swept):
    job = scene.enqueue()
    pod = scene.pod(ORIGIN)
    swept(pod)
    pod.round()
    pod.finish(pod.start(), RetryAfter(0))
    holders: list[psycopg.Connection[Any]] = []

    def lock_promoted() -> None:
        if not holders and scene.state(job)[:2] == ("available", 1):
            holders.append(lock())

    for _ in range(3):
        if not holders:
            pod.round(after=lock_promoted)
    pod.rounds()
    assert pod.startable == []
    holders[0].rollback()
    assert run(pod) == [job]


def test_a_claim_asks_again_for_a_skipped_suspect(scene, lock, swept):
    job = scene.enqueue()
    for _ in range(2):
        dead = scene.pod(ORIGIN)
        dead.rounds()
        dead.abandon(dead.start())
    pod = scene.pod(ORIGIN)
    swept(pod)
    assert scene.state(job)[2] == 2
    pod.round()
    holder = lock()
    pod.rounds()
    assert pod.startable == []
    holder.rollback()
    assert run(pod, 5) == [job]


@pytest.mark.guarantee("J14", "S17")
@pytest.mark.parametrize("rounds", [1, 5], ids=["at once", "later"])
def test_a_group_goes_on_when_its_failing_head_is_cancelled(scene, swept, rounds):
    head, *others = [scene.enqueue(group="g") for _ in range(4)]
    pod = scene.pod(ORIGIN)
    swept(pod)
    pod.round()
    pod.finish(pod.start(), RetryAfter(3600))
    pod.rounds(rounds)
    assert run(pod) == []
    assert cancel(scene.database, [head]) == {head: "cancelled"}
    assert run(pod, 6) == others


@pytest.mark.guarantee("J14")
def test_a_cancel_moves_no_row_of_a_group_that_runs(scene):
    first, second, third = [scene.enqueue(group="g") for _ in range(3)]
    pod = scene.pod(ORIGIN)
    pod.round()
    running = pod.start()
    places = "select id, state, ctid from jobs_lib.jobs order by id"
    before = scene.admin.execute(places).fetchall()
    fourth = scene.enqueue(group="g")
    assert cancel(scene.database, [fourth]) == {fourth: "cancelled"}
    assert cancel(scene.database, [first, second]) == dict.fromkeys(
        [first, second], "requested"
    )
    assert scene.admin.execute(places).fetchall() == before
    pod.finish(running)
    assert third in run(pod, 5)


@pytest.mark.guarantee("J14")
def test_only_the_next_job_of_a_group_is_woken(scene, swept):
    jobs = [scene.enqueue(group=group) for group in "abcabcabc"]
    pod = scene.pod(ORIGIN)
    swept(pod)
    pod.round()
    for job in pod.start_all():
        pod.finish(job, RetryAfter(3600))
    pod.rounds(3)
    # These are the head of a, the job behind the head of b, and the first two jobs of
    # c.
    gone = [jobs[0], jobs[4], jobs[2], jobs[5]]
    cancel(scene.database, gone)
    woken = scene.admin.execute(
        "select id from jobs_lib.jobs where state = 'scheduled'"
        " and run_at <= clock_timestamp() order by id"
    )
    assert woken.fetchall() == [(jobs[3],), (jobs[8],)]
    assert sorted(run(pod, 6)) == [jobs[3], jobs[6], jobs[8]]
