"""Jobs appear behind the cursor, committed late or due again, step by step."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from jobs_lib import Discard
from jobs_lib.executor.claiming import late_commits as module
from jobs_lib.executor.claiming.cursor import Cursor
from jobs_lib.executor.claiming.group_starts import GroupStarts
from jobs_lib.executor.claiming.in_flight import InFlight
from jobs_lib.executor.claiming.late_commits import LateCommits
from jobs_lib.executor.claiming.trail import Trail
from jobs_lib.jobs.job import RetryAfter
from tests.races.conftest import ORIGIN, run
from tests.support.clock import Clock

# Jobs that are committed late


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_a_job_that_is_committed_behind_the_cursor_runs(scene, group, commits):
    slow = scene.begin()
    late = scene.enqueue(slow, group=group, ordered=False)
    early = scene.enqueue(group=group, ordered=False)
    pod = scene.pod(ORIGIN)
    assert run(pod) == [early]
    assert late < early == pod.claimer.cursors[ORIGIN].at
    slow.commit() if commits else slow.rollback()
    assert run(pod) == ([late] if commits else [])


@pytest.mark.parametrize("between", [False, True], ids=["next", "behind another"])
def test_a_job_that_has_failed_gives_way_to_one_that_is_committed_late(scene, between):
    failed = scene.enqueue(type_="last", group="g", ordered=False)
    others = [scene.enqueue(group="g", ordered=False)] if between else []
    slow = scene.begin()
    late = scene.enqueue(slow, "last", "g", ordered=False)
    early = scene.enqueue(ordered=False)
    pod = scene.pod(ORIGIN)
    pod.round()
    for job in (pod.start(), pod.start()):
        pod.finish(job, RetryAfter(3600) if job.id == failed else None)
    pod.round()
    assert late < early == pod.claimer.cursors[ORIGIN].at
    assert run(pod) == []
    slow.commit()
    assert run(pod, 6) == [*others, late]
    assert scene.ends(failed) == ["superseded"]


def test_a_late_job_runs_if_nothing_is_left_behind_a_discarded_one(scene, monkeypatch):
    pod = scene.pod(ORIGIN)
    slow = scene.begin()
    late = scene.enqueue(slow, group="g", ordered=False)
    scene.enqueue(group="g", ordered=False)
    pod.rounds()
    pod.finish(pod.start(), Discard("it cannot be done"))
    pod.round()
    # The next claim asks for both: the group behind the discarded job, and this one.
    monkeypatch.setattr(pod.dispatcher._poller._late_commits, "is_due", lambda: False)
    slow.commit()
    pod.claimer.take_late({late: ORIGIN})
    assert run(pod) == [late]


def test_a_job_of_lower_id_waits_while_the_lane_of_its_group_is_in_flight(scene):
    slow = scene.begin()
    late = scene.enqueue(slow, group="g", ordered=False)
    first, second = (scene.enqueue(group="g", ordered=False) for _ in range(2))
    pod = scene.pod(ORIGIN)
    pod.round()
    running = pod.start()
    slow.commit()
    third = scene.enqueue(group="g", ordered=False)
    pod.rounds()
    # No job of the group starts beside the running one.
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
    # The job stands behind another row of its group, but the lane has read further.
    pod.rounds(10)
    pod.finish(running)
    assert running.id == first
    assert sorted(run(pod, 5)) == [late, second]


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize("place", ["before", "between"])
def test_a_late_job_met_while_its_group_was_in_flight_follows_the_lane(
    scene, monkeypatch, place, fails
):
    slow = scene.begin()
    late = scene.enqueue(slow, group="g", ordered=False) if place == "before" else 0
    first = scene.enqueue(group="g", ordered=False)
    late = late or scene.enqueue(slow, group="g", ordered=False)
    second = scene.enqueue(group="g", ordered=False)
    pod = scene.pod(ORIGIN)
    pod.round()
    running = pod.start()
    assert running.id == first
    slow.commit()
    pod.rounds(5)
    # A job that takes long gives back what waits behind it.
    pod.claimer.in_flight.shorten(running.lane)
    # No later sweep finds by chance what was met already.
    monkeypatch.setattr(pod.dispatcher._poller._late_commits, "is_due", lambda: False)
    pod.finish(running, RetryAfter(3600) if fails else None)
    expected = [late, second] if not fails else [late] if late < first else []
    assert run(pod, 5) == expected


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_the_second_transaction_of_a_group_draws_its_id_second(scene, commits):
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
    monkeypatch.setattr("jobs_lib.executor.claiming.late_commits.SLICE", 2)
    monkeypatch.setattr("jobs_lib.executor.claiming.late_commits._SPAN", 3)
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
    # Jobs behind their head fill the slices, and no claim asks for them.
    assert run(pod, 10) == []
    assert pod.claimer.wanted.extra == {}
    slow.commit()
    assert run(pod, 20) == [late]
    cursor = pod.claimer.cursors[ORIGIN]
    assert cursor.swept_below == cursor.at


@pytest.mark.parametrize("group", [None, "g"])
def test_a_late_job_far_down_waits_for_no_other_transaction(scene, monkeypatch, group):
    monkeypatch.setattr("jobs_lib.executor.claiming.late_commits._SPAN", 3)
    other, slow = scene.begin(), scene.begin()
    other.execute("select pg_current_xact_id()")
    late = scene.enqueue(slow, group=group, ordered=False)
    others = [scene.enqueue() for _ in range(20)]
    pod = scene.pod(ORIGIN)
    assert sorted(run(pod, 20)) == others
    pod.rounds(10)
    slow.commit()
    assert run(pod, 20) == [late]
    cursor = pod.claimer.cursors[ORIGIN]
    assert cursor.no_commits_below < late < cursor.at
    other.rollback()


def test_a_late_commit_is_found_during_a_long_descent(scene, monkeypatch):
    monkeypatch.setattr("jobs_lib.executor.claiming.late_commits.SLICE", 2)
    monkeypatch.setattr("jobs_lib.executor.claiming.late_commits._SPAN", 2)
    other, old = scene.begin(), scene.begin()
    other.execute("select pg_current_xact_id()")
    oldest = scene.enqueue(old)
    # Jobs behind a head fill the slices, and each look passes over them.
    waiting = [scene.enqueue(group="g") for _ in range(60)]
    pod = scene.pod(ORIGIN)
    pod.round()
    pod.finish(pod.start(), RetryAfter(3600))
    pod.rounds(100)
    new = scene.begin()
    late = scene.enqueue(new)
    scene.enqueue(group="g")
    pod.rounds(5)
    old.commit()
    pod.rounds(3)
    assert pod.claimer.cursors[ORIGIN].far.goes_on
    new.commit()
    # The newer job does not wait until the descent has reached the older one.
    assert run(pod, 10) == [late]
    assert pod.claimer.cursors[ORIGIN].far.goes_on
    assert run(pod, 100) == [oldest]
    assert waiting


def test_a_trail_yields_the_cursors_from_before_an_ended_transaction():
    trail = Trail()
    assert trail.note(0.0, {"o": 10}, 5, []) == [{}]
    # No transaction has ended.
    assert trail.note(1.0, {"o": 20}, 5, []) == []
    # A short transaction may have begun and ended unseen in between: no mark is old.
    assert trail.note(1.5, {"o": 30}, 6, []) == [{}]
    assert trail.note(5.0, {"o": 40}, 8, [6]) == [{}]
    assert trail.note(9.0, {"o": 50}, 9, [6, 8]) == [{"o": 30}]
    assert trail.note(50.0, {"o": 60}, 10, [6, 8]) == [{"o": 40}]
    # Each long transaction counts by itself, beside other open ones.
    assert trail.note(51.0, {"o": 70}, 11, [6]) == [{"o": 50}, {"o": 30}]
    assert trail.note(51.1, {"o": 80}, 11, []) == [{"o": 50}, {}]
    # When many transactions end together, each moment counts once.
    trail.note(60.0, {"o": 90}, 900, range(100, 900))
    assert trail.note(61.0, {"o": 99}, 901, []) == [{"o": 70}, {"o": 50}]


def test_a_long_answer_pauses_the_sweep_for_half_a_second_at_most():
    late_commits, cursors = LateCommits(), {ORIGIN: Cursor(1, at=9)}
    cursors[ORIGIN].near.want(0)
    for took, pause in ((4.0, 0.5), (0.001, 0.05), (0.02, 0.4)):
        assert late_commits.prepare(cursors, [], InFlight())
        before = time.monotonic()
        late_commits.read(
            [(None, int(took * 1e6), None, None)], {}, InFlight(), GroupStarts()
        )
        assert before + pause <= late_commits._next_at <= time.monotonic() + pause


def test_slices_shrink_where_sweeps_take_long_and_grow_again():
    late_commits, cursors = LateCommits(), {ORIGIN: Cursor(1, at=10**6)}
    cursor = cursors[ORIGIN]
    asked = []
    for took in [1.0] * 8 + [0.0] * 8:
        cursor.near.want(0)
        parameters = late_commits.prepare(cursors, [], InFlight())
        assert parameters
        asked.append(parameters["limit"])
        late_commits.read(
            [(None, int(took * 1e6), None, None)], cursors, InFlight(), GroupStarts()
        )
    assert asked[:3] == [1000, 500, 250]
    assert min(asked) == 15
    assert asked[-1] == 1000


def test_marks_do_not_pile_up_while_a_transaction_stays_open(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    late_commits, cursors = LateCommits(), {ORIGIN: Cursor(1)}
    for n in range(10_000):
        clock.now += 1.0
        cursors[ORIGIN].at = n
        late_commits.prepare(cursors, [], InFlight())
        late_commits.note_horizon(5, 10 + n, [5], cursors)
    assert len(late_commits._marks) <= 121
    assert cursors[ORIGIN].no_commits_below == 0
    clock.now += 1.0
    late_commits.prepare(cursors, [], InFlight())
    # The long one has ended, and one is open that began at once before the last mark.
    late_commits.note_horizon(10_008, 10_010, [10_008], cursors)
    assert 9_900 < cursors[ORIGIN].no_commits_below <= 9_998
    for _ in range(2):
        clock.now += 1.0
        late_commits.prepare(cursors, [], InFlight())
        late_commits.note_horizon(10_010, 10_010, [], cursors)
    assert cursors[ORIGIN].no_commits_below == 9_999


# The promotion of a retry


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
