"""At the end of every history each job must come to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.model.world import ORIGINS

if TYPE_CHECKING:
    from tests.model.machine import Jobs


def drain(machine: Jobs) -> None:
    """Commit, resume, make due and own everything: then all jobs must end."""
    admin = machine.bench.admin
    for through in list(machine.drafts):
        machine.end_transaction(through, commit=True)
    admin.execute("delete from jobs_lib.pauses")
    machine.world.pauses.clear()
    for origin in ORIGINS:
        owner = machine.world.owners.get(origin)
        if owner is None or owner[0] not in machine.world.pods:
            machine.take(machine.world.pods[0], origin)
    for _ in range(100):
        machine.the_table_is_as_the_model_says()
        if all(k.end for k in machine.world.jobs.values()):
            break
        while machine.scheduled:
            machine.time_passes(0)
        for pod in machine.world.pods:
            pod.round()
            while pod.startable:
                machine.start_one(pod, 0)
            for job in list(pod.running):
                if job.id in pod.open:
                    machine.commit_own(pod, job)
                else:
                    pod.note_end(job, pod.finish(job), due=True)
    left = [k for k in machine.world.jobs.values() if not k.end]
    assert not left, f"stranded: {left}"
    ended = admin.execute("select id, outcome from jobs_lib.history").fetchall()
    assert sorted(ended) == sorted(
        (known.id, known.end) for known in machine.world.jobs.values()
    )
    discarded = admin.execute(
        "select id from jobs_lib.discarded where errors <> '[]'"
    ).fetchall()
    assert sorted(i for (i,) in discarded) == sorted(
        known.id for known in machine.world.jobs.values() if known.end == "discarded"
    )
    # Only jobs whose own transaction was committed are here; each is a key.
    effects = admin.execute("select job from effects").fetchall()
    assert {i for (i,) in effects} == machine.world.effects
    for pod in machine.world.pods:
        pod.rounds(2)
        assert not pod.claimer.in_flight.jobs
        assert not pod.claimer.in_flight.lanes
    claims = admin.execute(
        "select * from jobs_lib.claims where owner = any (%s)",
        ([pod.id for pod in machine.world.pods],),
    ).fetchall()
    assert claims == []
