"""A lane ends while a claim is under way that passes over its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs_lib.executor.claiming.late_commits import LateCommits
from jobs_lib.executor.lane import Lane
from jobs_lib.jobs.job import RetryAfter
from tests.races.conftest import ORIGIN, run

if TYPE_CHECKING:
    from jobs_lib.executor.lane import Item
    from tests.support.stepping import Pod


@pytest.fixture(autouse=True)
def unswept(monkeypatch):
    """Sweeps find nothing by chance: only claims do."""
    monkeypatch.setattr(LateCommits, "is_due", lambda self: False)


@pytest.fixture
def pod(scene) -> Pod:
    """A pod that owns the origin."""
    return scene.pod(ORIGIN)


def start(pod):
    """Start the only job that can start."""
    pod.rounds()
    (job,) = pod.start_all()
    return job


def end_lane_late(pod, job, error=None):
    """Let a job end, and its lane a round later, as a slow worker's thread does."""
    finished = job.lane.finished
    outcome = pod.runner._explain(job, error) if error else None
    job.lane.failed = not finished.add(job, pod.runner._finish(job, outcome))
    pod.running.remove(job)
    pod.round()
    finished.add_lane(job.lane)


@pytest.mark.guarantee("S1", "S10")
@pytest.mark.parametrize("own", [True, False], ids=["own", "executor's"])
def test_a_job_that_comes_as_its_groups_lane_ends_runs(scene, pod, own):
    scene.enqueue(group="g")
    job = start(pod)
    if own:
        pod.begin(job)
        pod.commit(job)
    else:
        end_lane_late(pod, job)
    pod.claimer.windows.hint(ORIGIN)
    newer: list[int] = []
    pod.round(before=lambda: newer.append(scene.enqueue(group="g")))
    assert run(pod) == newer


@pytest.mark.guarantee("S10")
@pytest.mark.parametrize("between", [False, True], ids=["next", "behind another"])
def test_a_newer_job_that_comes_as_a_failed_ones_lane_ends_runs(scene, pod, between):
    failing = scene.enqueue(type_="last", group="g")
    end_lane_late(pod, start(pod), RetryAfter(3600))
    jobs: list[int] = []
    if between:
        jobs.append(scene.enqueue(group="g"))
    pod.claimer.windows.hint(ORIGIN)
    pod.round(before=lambda: jobs.append(scene.enqueue(type_="last", group="g")))
    assert run(pod, 6) == jobs
    assert scene.ends(failing) == ["superseded"]


@pytest.mark.guarantee("S10")
def test_a_lane_that_is_taken_back_as_its_job_ends_goes_on(scene, pod, monkeypatch):
    first, second = scene.enqueue(group="g"), scene.enqueue(group="g")
    waiting = scene.enqueue()
    pod.rounds()
    job = pod.start([isinstance(one, Lane) for one in pod.startable].index(True))
    dispatcher = pod.dispatcher
    dispatcher._aged = pod.claimer.seq
    dispatcher._aged_at = 0.0

    def end_job() -> None:
        # As a batch's worker does, which leaves the rest of the lane to another one.
        monkeypatch.undo()
        monkeypatch.setattr(LateCommits, "is_due", lambda self: False)
        pod.finish(job)
        pod._begun.remove(job.lane)
        pod.hands.put([job.lane])

    # Old jobs wait: in this moment their dispatcher takes back all that do.
    take_back = pod.hands.take_back

    def take_back_then(ended: object) -> list[Item]:
        end_job()
        return take_back(ended)

    monkeypatch.setattr(pod.hands, "take_back", take_back_then)
    pod.round()
    assert job.id == first
    assert sorted(run(pod)) == [second, waiting]
