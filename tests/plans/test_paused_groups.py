"""Very many groups are paused: looks and claims cost what they did before."""

from __future__ import annotations

import pytest

from tests.plans.test_old_snapshots import count_pages

PAUSED = 10_000
ADD = (
    'insert into jobs_lib.jobs (origin, type, "group", payload)'
    " select 'local/3', 'work', name, '{}' from unnest(%s::text[]) as g(name)"
)


@pytest.mark.guarantee("FP25")
def test_a_poll_and_a_claim_do_not_grow_with_the_number_of_paused_groups(owner, admin):
    admin.execute(
        "insert into jobs_lib.pauses select 'group', 'paused' || n"
        " from generate_series(1, %s) n",
        (PAUSED,),
    )
    admin.execute("analyze jobs_lib.pauses")
    admin.execute(ADD, (["a", "paused1", "b"],))
    assert owner.look() < 50
    query, parameters = owner.claimer.prepare(100)
    assert len(str(parameters)) < 5_000
    with owner.connection.transaction(force_rollback=True):
        pages = count_pages(owner.connection, owner.queries[query], parameters)
    assert pages < 100
    assert owner.take((query, parameters)) == ["a", "b"]


def test_a_group_is_paused_as_soon_as_that_is_committed(owner, admin):
    owner.look()
    admin.execute(ADD, (["a", "b"],))
    owner.claimer.windows.hint("local/3")
    admin.execute("insert into jobs_lib.pauses values ('group', 'a')")
    assert owner.claim() == ["b"]


def test_a_pause_between_two_polls_loses_no_job(owner, admin):
    owner.look()
    admin.execute(ADD, (["a", "b"],))
    owner.claimer.windows.hint("local/3")
    admin.execute("insert into jobs_lib.pauses values ('group', 'a')")
    assert owner.claim() == ["b"]
    admin.execute("delete from jobs_lib.pauses")
    admin.execute(ADD, (["c"],))
    owner.look()
    assert owner.claim() == ["a", "c"]


def test_a_claim_takes_no_more_jobs_of_a_paused_group_after_its_lane_ended(
    owner, admin
):
    admin.execute(ADD, (["a"] * 3,))
    owner.look()
    claimer = owner.claimer
    assert owner.claim() == ["a"] * 3
    admin.execute("insert into jobs_lib.pauses values ('group', 'a')")
    admin.execute(ADD, (["a"] * 2,))
    owner.look()
    assert owner.claim() == []
    for job in list(claimer.in_flight.jobs.values()):
        claimer.in_flight.remove(job)
    for lane in list(claimer.in_flight.lanes.values()):
        claimer.in_flight.end_lane(lane)
    admin.execute(
        "delete from jobs_lib.jobs where id in"
        " (select id from jobs_lib.jobs order by id limit 3)"
    )
    assert claimer.in_flight.behind
    assert owner.claim() == []
    admin.execute("delete from jobs_lib.pauses")
    owner.look()
    assert owner.claim() == ["a"] * 2
