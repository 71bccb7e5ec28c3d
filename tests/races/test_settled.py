"""An attempt, a crash and a pause leave the right rows behind, step by step."""

from __future__ import annotations

from unittest.mock import Mock

import psycopg
import pytest

from jobs_lib import Snooze
from jobs_lib.executor.batch import Batch
from jobs_lib.executor.lane import Lane, Outcome, Result
from jobs_lib.executor.settling.completer import Completer
from jobs_lib.jobs.job import RetryAfter
from tests.races.conftest import ORIGIN, run

pytestmark = pytest.mark.expects("fenced")

# The cost of a lost answer


def test_a_failure_that_is_written_again_counts_once(scene):
    job = scene.enqueue()
    pod = scene.pod(ORIGIN)
    pod.round()
    completer = Completer(pod.id, scene.app.jobs)
    outcome = Outcome(pod.start(), Result.RETRIED, "no", 3600.0)
    (settlement,) = completer.prepare([], [outcome], pod.claimer.epochs)
    for written in ([(job,)], []):
        assert scene.send(scene.admin, "retry", settlement.parameters) == written
        assert scene.state(job) == ("scheduled", 1, 0)


# The cost of a crash


@pytest.mark.parametrize("group", [None, "g"])
def test_a_job_claimed_anew_pays_its_crash_though_its_first_claim_ends_late(
    scene, group
):
    scene.enqueue(group=group)
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.round()
    # No worker takes them before their origin is given back and taken again.
    stale, pod.hands.ready = pod.hands.ready, []
    pod.leave(ORIGIN, hurried=True)
    pod.take_over(ORIGIN)
    pod.round()
    running = pod.start()
    for item in stale:
        if isinstance(item, Lane):
            item.finished.add_lane(item)
        else:
            item.lane.finished.drop(item)
    pod.rounds()
    heir.take_over(ORIGIN)
    assert scene.state(running.id) == ("available", 0, 1)


def test_a_retried_job_pays_no_crash_of_the_process_that_claimed_it(scene):
    failed, running = scene.enqueue(), scene.enqueue()
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.round()
    pod.finish(pod.start(), RetryAfter(3600))
    pod.start()
    pod.round()
    heir.take_over(ORIGIN)
    assert scene.state(failed) == ("scheduled", 1, 0)
    assert scene.state(running) == ("available", 0, 1)


def test_a_snoozed_job_found_again_in_flight_pays_no_crash(scene):
    snoozed = scene.enqueue()
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.round()
    started = pod.start()
    scene.admin.execute("insert into jobs_lib.pauses values ('type', 'work')")
    pod.round()
    running = scene.enqueue()
    scene.admin.execute("delete from jobs_lib.pauses")
    pod.rounds()  # the look starts from the beginning, and finds both
    assert pod.start().id == running
    pod.finish(started, Snooze(3600))
    pod.round()
    heir.take_over(ORIGIN)
    assert scene.state(snoozed) == ("scheduled", 0, 0)
    assert scene.state(running) == ("available", 0, 1)


def test_a_group_goes_on_behind_a_job_that_may_have_crashed_its_process(scene):
    first = scene.enqueue(group="g")
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.round()
    pod.start()
    second = scene.enqueue(group="g")
    late_commits = heir.dispatcher._poller._late_commits
    late_commits.is_due = lambda: False  # as if the low mark has passed the second one
    heir.take_over(ORIGIN)
    assert run(heir, 8) == [first, second]


def test_three_crashes_are_three_attempts(scene):
    job = scene.enqueue()
    for attempt in (1, 2, 3):
        pod = scene.pod(ORIGIN)
        pod.rounds()
        assert pod.start().attempt == attempt
    pod = scene.pod(ORIGIN)
    pod.rounds(5)
    assert pod.start().attempt == 4
    assert scene.state(job) == ("available", 3, 0)
    (error,) = scene.admin.execute("select errors from jobs_lib.jobs").fetchone()
    assert [one["attempt"] for one in error] == [3]


# Pauses, and jobs that are settled together


def test_a_pod_with_all_origins_paused_sees_one_resumed(scene):
    scene.admin.execute("insert into jobs_lib.pauses values ('origin', %s)", (ORIGIN,))
    job = scene.enqueue()
    pod = scene.pod(ORIGIN)
    assert run(pod) == []
    scene.admin.execute("delete from jobs_lib.pauses")
    assert run(pod) == [job]


def test_opened_jobs_are_looked_for_only_where_they_may_start(scene, monkeypatch):
    pod = scene.pod(ORIGIN)
    prepare = Mock(return_value=Batch())
    gated = pod.claimer.gated
    for name, value in (("gate", Mock()), ("look", Mock()), ("prepare", prepare)):
        monkeypatch.setattr(gated, name, value)
    pod.round()
    assert [*prepare.call_args.args[0]] == [ORIGIN]
    scene.admin.execute("insert into jobs_lib.pauses values ('origin', %s)", (ORIGIN,))
    pod.rounds(2)
    assert [*prepare.call_args.args[0]] == []


def test_a_hint_right_after_the_take_over_starts_no_paused_job(scene):
    job = scene.enqueue()
    scene.admin.execute("insert into jobs_lib.pauses values ('type', 'work')")
    pod = scene.pod()
    pod._ownership._take(scene.connect(), frozenset({ORIGIN}))
    pod.dispatcher.hint("")
    pod.rounds()
    assert pod.startable == []
    scene.admin.execute("delete from jobs_lib.pauses")
    assert run(pod) == [job]


def test_whole_and_broken_numbers_of_seconds_are_settled_together(scene):
    first, second = scene.enqueue(), scene.enqueue()
    pod = scene.pod(ORIGIN)
    pod.round()
    pod.finish(pod.start(), Snooze(3600))
    pod.finish(pod.start(), Snooze(0.5))
    pod.round()
    assert scene.state(first)[0] == scene.state(second)[0] == "scheduled"


def test_an_error_of_the_connection_is_told_while_only_claims_are_to_be_removed(scene):
    scene.enqueue()
    pod = scene.pod(ORIGIN)
    pod.round()
    pod.finish(pod.start())
    pod.round()
    # The job is settled; the next round removes its claim.
    scene.admin.execute(
        "select pg_terminate_backend(%s::int, 10000)",
        (pod._connection.info.backend_pid,),
    )
    with pytest.raises(psycopg.OperationalError):
        pod.round()
