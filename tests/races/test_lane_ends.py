"""A lane ends while a claim is under way that passes over its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs_lib.executor.claiming.late_commits import LateCommits
from jobs_lib.jobs.job import RetryAfter
from tests.races.conftest import ORIGIN, run

if TYPE_CHECKING:
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
