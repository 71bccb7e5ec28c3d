"""What appears behind the cursor: committed late, or due again; step by step."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from jobs_lib.jobs.model import RetryAfter
from tests.races.conftest import ORIGIN, run

# What is committed late


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_a_job_that_is_committed_behind_the_cursor_runs(scene, group, commits):
    slow = scene.begin()
    late = scene.enqueue(slow, group=group, ordered=False)
    early = scene.enqueue(group=group, ordered=False)
    pod = scene.pod(ORIGIN)
    assert run(pod) == [early]
    assert late < early == pod.claimer.positions[ORIGIN].cursor
    slow.commit() if commits else slow.rollback()
    assert run(pod) == ([late] if commits else [])


def test_a_lower_id_comes_into_a_group_whose_lane_is_in_flight(scene):
    slow = scene.begin()
    late = scene.enqueue(slow, group="g", ordered=False)
    first, second = (scene.enqueue(group="g", ordered=False) for _ in range(2))
    pod = scene.pod(ORIGIN)
    pod.round()
    running = pod.start()
    slow.commit()
    third = scene.enqueue(group="g", ordered=False)
    pod.rounds()
    # Nothing of the group starts beside what runs.
    assert pod.startable == []
    assert running.id == first
    pod.finish(running)
    ran = run(pod, 5)
    assert sorted(ran) == [late, second, third]
    assert ran.index(second) < ran.index(third)


def test_a_late_job_between_two_of_a_lane_in_flight_is_not_forgotten(scene):
    first = scene.enqueue(group="g", ordered=False)
    slow = scene.begin()
    late = scene.enqueue(slow, group="g", ordered=False)
    second = scene.enqueue(group="g", ordered=False)
    pod = scene.pod(ORIGIN)
    pod.round()
    running = pod.start()
    slow.commit()
    # It stands behind another row of its group; but the lane has read on already.
    pod.rounds(10)
    pod.finish(running)
    assert running.id == first
    assert sorted(run(pod, 5)) == [late, second]


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_who_enqueues_into_a_group_second_draws_its_id_second(scene, commits):
    first, second = scene.begin(), scene.begin()
    early = scene.enqueue(first, group="g")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        scene.enqueue(second, group="g")
    second.rollback()
    between = scene.enqueue(first, group="g")
    first.commit() if commits else first.rollback()
    late = scene.enqueue(group="g")
    assert early < between < late
    assert run(scene.pod(ORIGIN)) == ([early, between] if commits else []) + [late]


@pytest.mark.parametrize("place", range(7))
def test_a_late_job_is_found_among_more_than_a_sweep_looks_at(
    scene, monkeypatch, place
):
    monkeypatch.setattr("jobs_lib.jobs.sweep.SLICE", 2)
    monkeypatch.setattr("jobs_lib.jobs.sweep._SPAN", 3)
    slow = scene.begin()
    head = scene.enqueue(group="g")
    late = None
    for n in range(7):
        if n == place:
            late = scene.enqueue(slow)
        scene.enqueue(group="g")
    pod = scene.pod(ORIGIN)
    pod.round()
    job = pod.start()
    assert job.id == head
    pod.finish(job, RetryAfter(3600))
    # What waits behind its head fills the slices, and nobody asks for it.
    assert run(pod, 10) == []
    assert pod.claimer.extra == {}
    slow.commit()
    assert run(pod, 20) == [late]
    position = pod.claimer.positions[ORIGIN]
    assert position.low == position.cursor


# A retry's promotion


def test_a_group_waits_for_its_failed_head_until_that_is_due_again(scene):
    first, second = scene.enqueue(group="g"), scene.enqueue(group="g")
    pod = scene.pod(ORIGIN)
    pod.round()
    pod.finish(pod.start(), RetryAfter(3600))
    assert run(pod) == []
    third = scene.enqueue(group="g")
    assert run(pod) == []
    scene.admin.execute(
        "update jobs_lib.jobs set run_at = clock_timestamp() where id = %s", (first,)
    )
    assert run(pod, 5) == [first, second, third]


def test_a_lane_ends_before_a_job_that_is_for_later(scene):
    first = scene.enqueue(group="g")
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)
    second = scene.enqueue(group="g", run_at=in_an_hour)
    third = scene.enqueue(group="g")
    pod = scene.pod(ORIGIN)
    assert run(pod, 5) == [first]
    scene.admin.execute(
        "update jobs_lib.jobs set run_at = now() where id = %s", (second,)
    )
    assert run(pod, 5) == [second, third]


def test_a_job_that_is_promoted_and_swept_at_once_starts_once(scene):
    job = scene.enqueue()
    pod = scene.pod(ORIGIN)
    pod.round()
    pod.finish(pod.start(), RetryAfter(0))
    pod.round()  # writes the failure, and may promote it in the same round trip
    pod.rounds()
    assert len(pod.startable) == 1
    assert run(pod) == [job]
    assert scene.ends(job) == ["completed"]
