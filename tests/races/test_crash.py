"""What a crash costs: nothing is lost, and no effect is there twice."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from tests.support.apps import executing, make_app

if TYPE_CHECKING:
    from jobs_lib import Job

pytestmark = pytest.mark.expects("fenced")


@pytest.mark.guarantee("FP1")
def test_the_jobs_of_a_killed_executor_run_elsewhere_and_once(
    database_url, connect, run_process, wait_for
):
    app = make_app(database_url)

    @app.job(group="group")
    def work(job: Job, n: int, group: str) -> None: ...

    admin = connect(autocommit=True)
    admin.execute(
        "create table effects (id bigserial, n int, job bigint, pod text,"
        " at timestamptz default clock_timestamp())"
    )
    with connect() as connection:
        work.enqueue_many(
            connection, [{"n": n, "group": f"g{n % 5}"} for n in range(50)]
        )
    doomed = run_process(
        "-m", "tests.support.executor_worker", database_url, "doomed", "hang"
    )
    doomed.wait_for_line("inside")
    # Killed in the middle of handlers, inside their transactions.
    doomed.kill()
    # What it had sent before may still be at work in the server.
    sessions = (
        "select from pg_stat_activity where datname = current_database()"
        " and application_name like 'jobs_lib %'"
    )
    wait_for(
        lambda: admin.execute(sessions).rowcount == 0, what="its sessions have ended"
    )
    running = admin.execute(
        "select count(*) from jobs_lib.job_states where derived_state = 'running'"
    )
    (cut_off,) = running.fetchone()
    assert 0 < cut_off < 20
    (killed_at,) = admin.execute("select clock_timestamp()").fetchone()
    heir = run_process("-m", "tests.support.executor_worker", database_url, "heir")
    wait_for(
        lambda: admin.execute("select count(*) from effects").fetchone()[0] == 50,
        timeout=60,
        what=lambda: f"the other pod ran them all\n{heir.output}",
    )
    rows = admin.execute("select n, pod, at from effects order by id").fetchall()
    assert sorted(n for n, _, _ in rows) == list(range(50))
    assert {pod for _, pod, _ in rows} == {"heir"}
    for group in range(5):
        of_group = [n for n, _, _ in rows if n % 5 == group]
        assert of_group == sorted(of_group)
    # The heartbeat counts as stale after a second; then the next look takes over.
    assert (rows[0][2] - killed_at).total_seconds() < 10
    # A crash counts as an attempt, but only for what may have been running.
    again = admin.execute("select count(*) from jobs_lib.history where attempt = 2")
    assert again.fetchone() == (cut_off,)
    rest = admin.execute("select count(*) from jobs_lib.history where attempt = 1")
    assert rest.fetchone() == (50 - cut_off,)
    assert admin.execute("select count(*) from jobs_lib.jobs").fetchone() == (0,)


def test_what_was_in_flight_when_a_process_died_comes_before_what_waits(
    database_url, admin, connect, wait_for
):
    app = make_app(database_url)
    begun: list[int] = []

    @app.job()
    def work(job: Job, n: int) -> None:
        begun.append(n)

    with connect() as connection:
        work.options(origin="local/1").enqueue_many(
            connection, [{"n": n} for n in range(40)]
        )
    dead = uuid4()
    admin.execute(
        "insert into jobs_lib.origins (role, origin, owner, epoch)"
        " values ('execute', 'local/1', %s, 1)",
        (dead,),
    )
    admin.execute(
        "insert into jobs_lib.claims (owner, seq, ids)"
        " select %s, 1, array_agg(id) from jobs_lib.jobs"
        " where payload->>'n' in ('17', '38')",
        (dead,),
    )
    with executing(app, ["local/1"], workers=1, batch=2):
        wait_for(lambda: len(begun) == 40, what="all have run")
    assert begun[:2] == [17, 38]
