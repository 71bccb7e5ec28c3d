"""A job begins only while no other process can own it, and never beside itself."""

from __future__ import annotations

import math
import time

import pytest

from jobs_lib.ownership.lease import Lease
from tests.races.conftest import ORIGIN, run
from tests.support.apps import heard

OVER = -math.inf


@pytest.mark.guarantee("FP16", "I4")
@pytest.mark.parametrize("group", [None, "g"], ids=["no group", "group"])
def test_jobs_whose_lease_ran_out_are_dropped_and_claimed_again(scene, group):
    jobs = [scene.enqueue(group=group) for _ in range(3)]
    pod = scene.pod(ORIGIN)
    pod.rounds()
    first = pod.start()
    pod.lease.until = OVER
    pod.finish(first)
    with heard("jobs.dropped") as dropped:
        assert pod.start_all() == []
        pod.rounds()
    assert {i for _, fields in dropped for i in fields["ids"]} == {*jobs[1:]}
    assert pod.startable == []  # nothing is claimed in vain
    pod.lease = Lease()
    assert run(pod, 6) == jobs[1:]
    assert scene.admin.execute("select * from jobs_lib.jobs").fetchall() == []
    assert scene.admin.execute("select * from jobs_lib.claims").fetchall() == []


@pytest.mark.guarantee("FP16")
def test_a_claim_answered_under_the_next_lease_begins_nothing(scene):
    scene.enqueue()
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.round()
    pod.hands.ready.clear()
    pod.claimer.windows.rewind()
    pod.claimer.in_flight.jobs.clear()

    def freeze() -> None:
        pod.lease.until = OVER
        heir.take_over(ORIGIN)
        pod.lease = Lease()  # the next heartbeat comes before all else

    pod.round(after=freeze)
    assert pod.hands.ready
    assert pod.start_all() == []


@pytest.mark.guarantee("I8")
@pytest.mark.expects("jobs.fenced")
def test_a_group_that_comes_back_waits_for_the_handler_that_runs_still(scene):
    first, second = (scene.enqueue(group="g") for _ in range(2))
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.rounds()
    old = pod.start()
    assert old.id == first
    heir.take_over(ORIGIN)
    pod.leave(ORIGIN, hurried=True)
    pod.take_over(ORIGIN)
    other = scene.enqueue(group="h")
    assert run(pod) == [other]
    pod.finish(old)
    assert scene.state(first) is not None  # it is refused
    assert run(pod, 6) == [first, second]


@pytest.mark.expects("jobs.fenced")
def test_an_origin_that_comes_back_twice_still_waits_for_the_first_handler(scene):
    first = scene.enqueue(group="g")
    alone = scene.enqueue()
    pod = scene.pod(ORIGIN)
    pod.rounds()
    old = pod.start_all()
    for _ in range(2):
        pod.leave(ORIGIN, hurried=True)
        pod.take_over(ORIGIN)
        pod.rounds()
        assert pod.startable == []
    for job in old:
        pod.finish(job)
    assert sorted(run(pod, 6)) == [first, alone]
    assert scene.admin.execute("select * from jobs_lib.claims").fetchall() == []


@pytest.mark.guarantee("FP16")
@pytest.mark.expects("jobs.fenced")
@pytest.mark.parametrize("group", [None, "g"], ids=["no group", "group"])
def test_jobs_of_a_lost_origin_are_reported_as_dropped_once(scene, group):
    jobs = [scene.enqueue(group=group) for _ in range(4)]
    pod = scene.pod(ORIGIN)
    pod.rounds()
    running = pod.start()
    assert running.id == jobs[0]
    pod.lease.until = OVER
    if group is None:
        assert pod.start() is None  # its lease alone drops one of them
    with heard("jobs.dropped") as dropped:
        for _ in range(2):
            pod.dispatcher.lose(frozenset({ORIGIN}))
            pod.round(before=lambda: pod.dispatcher.lose(frozenset({ORIGIN})))
            assert pod.start_all() == []
    assert sorted(i for _, fields in dropped for i in fields["ids"]) == jobs[1:]
    with heard("jobs.dropped") as dropped:
        pod.finish(running)
        pod.leave(ORIGIN, hurried=True)
    assert not dropped


def test_jobs_that_are_handed_over_are_not_reported_as_dropped(scene):
    scene.enqueue()
    pod = scene.pod(ORIGIN)
    pod.rounds()
    with heard("jobs.dropped") as dropped:
        pod.leave(ORIGIN)
    assert not dropped


def test_jobs_of_a_released_origin_do_not_begin_before_the_next_round(scene):
    scene.enqueue()
    pod = scene.pod(ORIGIN)
    pod.rounds()
    # No round follows, as when the database does not answer.
    pod.dispatcher.release(frozenset({ORIGIN}), 0.0)
    assert pod.start_all() == []


@pytest.mark.guarantee("I4", "I11")
@pytest.mark.parametrize("group", [None, "g"], ids=["no group", "group"])
def test_jobs_of_an_origin_released_while_a_claim_is_read_do_not_begin(
    scene, monkeypatch, group
):
    scene.enqueue(group=group)
    pod = scene.pod(ORIGIN)
    real = pod.claimer._open_lane

    def open_lane(*at):
        lane = real(*at)
        # The heartbeat's thread calls this, and finds no job of it in flight.
        assert pod.claimer.stop_claiming([ORIGIN]) == []
        return lane

    monkeypatch.setattr(pod.claimer, "_open_lane", open_lane)
    pod.rounds()
    assert pod.hands.ready
    assert pod.start_all() == []


def test_a_lease_is_counted_from_when_the_heartbeat_was_sent():
    lease = Lease(OVER)
    sent_at = time.monotonic() - 100
    late = lease.renew(sent_at, stale_after=50)
    assert late is not lease
    assert late.is_over()
    fresh = late.renew(time.monotonic(), stale_after=50)
    assert fresh is not late
    assert not fresh.is_over()
    until = fresh.until
    assert fresh.renew(time.monotonic() + 1, stale_after=50) is fresh
    assert until < fresh.until < time.monotonic() + 50
