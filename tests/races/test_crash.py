"""A crash loses no job, and makes no effect twice."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import pytest

from jobs_lib.ownership import Source
from tests.support.apps import executing, make_app

if TYPE_CHECKING:
    from jobs_lib import Job

pytestmark = pytest.mark.expects("fenced")


@pytest.mark.guarantee("FP1")
def test_the_jobs_of_a_killed_executor_run_elsewhere_and_once(
    database_url, connect, start_process, wait_for
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
    doomed = start_process("effects", database_url, pod="doomed", hangs=True)
    doomed.wait_for_line("inside")
    # The process is killed inside the handlers' transactions.
    doomed.kill()
    # Statements that it has sent may still run in the server.
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
    heir = start_process("effects", database_url, pod="heir")
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
    # The heartbeat counts as stale after a second; then the next look takes over. The
    # start of Python does not count.
    (begun_at,) = admin.execute(
        "select started_at from jobs_lib.processes where pod = 'heir'"
    ).fetchone()
    assert (rows[0][2] - begun_at).total_seconds() < 10
    # A crash counts as an attempt, but only for jobs that may have been running.
    again = admin.execute("select count(*) from jobs_lib.history where attempt = 2")
    assert again.fetchone() == (cut_off,)
    rest = admin.execute("select count(*) from jobs_lib.history where attempt = 1")
    assert rest.fetchone() == (50 - cut_off,)
    assert admin.execute("select count(*) from jobs_lib.jobs").fetchone() == (0,)


@pytest.mark.guarantee("S14", "FP1")
def test_claimed_jobs_of_a_dead_process_run_before_waiting_ones(
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


@pytest.mark.guarantee("S14", "FP1")
def test_claimed_jobs_of_a_dead_process_run_next_although_slow_jobs_fill_all_workers(
    database_url, admin, connect, wait_for
):
    app = make_app(database_url)
    workers, own, dead = 4, ["local/0", "local/1"], ["local/2", "local/4"]
    begun: list[str] = []
    may_end = threading.Semaphore(0)

    @app.job()
    def work(job: Job, name: str) -> None:
        begun.append(name)
        assert may_end.acquire(timeout=60)

    with connect() as connection:
        for origin in own + dead:
            work.options(origin=origin).enqueue_many(
                connection, [{"name": f"{origin} {n}"} for n in range(20)]
            )
    owner = uuid4()
    cut_off = {f"{origin} {n}" for origin in dead for n in (7, 8)}
    for origin in dead:
        admin.execute(
            "insert into jobs_lib.origins (role, origin, owner, epoch)"
            " values ('execute', %s, %s, 1)",
            (origin, owner),
        )
    admin.execute(
        "insert into jobs_lib.claims (owner, seq, ids)"
        " select %s, 1, array_agg(id) from jobs_lib.jobs"
        " where payload->>'name' = any (%s)",
        (owner, [*cut_off]),
    )
    claimed = (
        "select c.owner, c.seq from jobs_lib.jobs j"
        " join jobs_lib.claims c on j.id = any (c.ids)"
        " where j.payload->>'name' = any (%s)"
    )

    def read_claims() -> set[tuple[UUID, int]]:
        """The claims of the running process that have them all; or nothing."""
        rows = admin.execute(claimed, ([*cut_off],)).fetchall()
        found = {(by, seq) for by, seq in rows if by != owner}
        return found if len(rows) == len(cut_off) else set()

    source = Source()
    with executing(app, source, workers=workers, batch=1000):
        source.replace(own)
        wait_for(lambda: len(begun) == workers, what="all workers are busy")
        source.replace(own + dead)
        # The jobs wait for a worker, are released after a second, and are claimed
        # again.
        first = wait_for(read_claims, what="they are claimed")
        wait_for(
            lambda: (found := read_claims()) and not found & first,
            what="they are given back and claimed again",
        )
        for turn in (2, 3):
            may_end.release(workers)
            wait_for(
                lambda turn=turn: len(begun) == turn * workers, what="others begin"
            )
        may_end.release(100)
        wait_for(lambda: len(begun) == 80, what="all have begun")
    # One turn would be enough if none of them was released at its begin.
    assert cut_off <= {*begun[workers : 3 * workers]}
    assert sorted(begun) == sorted({*begun})
