"""A process is killed at the worst moments: just before a commit and just after it."""

from __future__ import annotations

import psycopg
import pytest

from tests.faults.helpers import attempts, count, effects, enqueue

pytestmark = pytest.mark.expects("fenced")


@pytest.mark.guarantee("FP2", "J7", "I4", "S14")
def test_an_outside_effect_is_repeated_with_the_same_key(url, start_worker, wait_for):
    doomed = start_worker(url, env={"die": "1"}, pod="doomed", workers=1)
    enqueue(url, "call_then_die", 1)
    doomed.wait()
    # The other jobs are called once, since no fault touches them.
    enqueue(url, "call_then_die", 3)
    start_worker(url, pod="heir")
    wait_for(lambda: count(url) == 0, timeout=60, what="all have run")
    with psycopg.connect(url) as connection:
        calls = connection.execute(
            "select count(*), count(distinct key), max(attempt) from calls"
            " group by key order by 1"
        ).fetchall()
        keys = connection.execute("select count(distinct key) from calls").fetchone()
    assert calls == [(1, 1, 1)] * 3 + [(2, 1, 2)]
    assert keys == (4,)
    assert effects(url) == [0, 0, 1, 2]


@pytest.mark.guarantee("FP3")
def test_a_job_is_not_run_again_after_its_commit(url, start_worker, wait_for):
    doomed = start_worker(url, env={"die": "1"}, pod="doomed", workers=1)
    enqueue(url, "add_then_die", 1)
    doomed.wait()
    assert effects(url) == [0]
    assert count(url) == 0
    start_worker(url, pod="heir")
    # This job is enqueued later, so it runs after the jobs of the dead process.
    enqueue(url, "add", 1)
    wait_for(lambda: count(url) == 0, timeout=60, what="the other one has run")
    assert effects(url) == [0, 0]
    assert attempts(url) == {("completed", 1)}


@pytest.mark.guarantee("FP5")
@pytest.mark.parametrize(("point", "kept"), [("before", []), ("after", [1])])
def test_a_kill_leaves_the_change_and_its_job_or_neither(
    url, admin, run_process, wait_for, point, kept
):
    process = run_process("-m", "tests.faults.enqueuer", url, point)
    process.wait_for_line("inside")
    process.kill()
    wait_for(
        lambda: (
            admin.execute(
                "select count(*) from pg_stat_activity where datname ="
                " current_database() and backend_type = 'client backend'"
            ).fetchone()
            == (1,)
        ),
        what="the server has noticed",
    )
    assert effects(url) == kept
    assert count(url) == len(kept)
