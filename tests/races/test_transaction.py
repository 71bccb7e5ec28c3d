"""After kill -9 at any step of a job's transaction, the effect is there once."""

from __future__ import annotations

import pytest

from tests.support.apps import make_app
from tests.support.processes.dying import STEPS

JOBS = 3 * (len(STEPS) + 1)


@pytest.fixture
def admin(connect):
    """A connection for the test to look with, and a table for the effects."""
    admin = connect(autocommit=True)
    admin.execute("create table effects (id bigserial, job bigint, pod text)")
    return admin


@pytest.fixture
def enqueue(database_url, connect):
    """A function that enqueues this many jobs of a kind."""
    app = make_app(database_url)

    @app.job(name="plain", group="group")
    def plain(job, group: str) -> None: ...

    @app.job(name="async", group="group")
    async def waiting(job, group: str) -> None: ...

    def enqueue(kind: str, count: int) -> None:
        with connect() as connection:
            app.jobs[kind].enqueue_many(
                connection, [{"group": f"g{n % 3}"} for n in range(count)]
            )

    return enqueue


def count(admin, table: str) -> int:
    return admin.execute(f"select count(*) from {table}").fetchone()[0]


@pytest.mark.guarantee("J6")
@pytest.mark.parametrize(
    "kind", ["plain", pytest.param("async", marks=pytest.mark.slow)]
)
def test_a_kill_at_any_step_leaves_each_effect_once(
    admin, database_url, enqueue, start_process, wait_for, kind
):
    enqueue(kind, JOBS)
    for step in STEPS:
        doomed = start_process("dies", database_url, pod=f"dies-{step}", step=step)
        doomed.wait_for_line(f"dying: {step}")
        assert doomed.wait() == -9
        assert count(admin, "jobs_lib.jobs") > 0, "nothing was left to cut off"
    heir = start_process("dies", database_url, pod="heir")
    wait_for(
        lambda: count(admin, "jobs_lib.jobs") == 0,
        timeout=60,
        what=lambda: f"the rest has run\n{heir.output}",
    )
    effects = admin.execute("select job, count(*) from effects group by job").fetchall()
    assert len(effects) == JOBS
    assert {times for _, times in effects} == {1}
    # In each group the order is that of enqueue, through all the deaths.
    rows = admin.execute(
        'select h."group", e.job from effects e join jobs_lib.history h on h.id = e.job'
        " order by e.id"
    ).fetchall()
    for group in ("g0", "g1", "g2"):
        of_group = [job for name, job in rows if name == group]
        assert len(of_group) == JOBS / 3
        assert of_group == sorted(of_group)


def test_a_commit_on_its_way_when_the_process_dies_counts_once(
    admin, connect, database_url, enqueue, start_process, wait_for
):
    admin.execute(
        "create function hold() returns trigger language plpgsql as $$ begin"
        " perform pg_advisory_xact_lock_shared(42); return null; end $$;"
        " create constraint trigger hold after insert on effects"
        " deferrable initially deferred for each row execute function hold()"
    )
    gate = connect(autocommit=True)
    gate.execute("select pg_advisory_lock(42)")
    enqueue("plain", 1)
    doomed = start_process("dies", database_url, pod="doomed")
    # The server is inside the commit, and no client will get its answer.
    wait_for(
        lambda: count(admin, "pg_locks where not granted and locktype = 'advisory'"),
        timeout=60,
        what=lambda: f"the commit is on its way\n{doomed.output}",
    )
    doomed.kill()
    start_process("dies", database_url, pod="heir")
    gate.execute("select pg_advisory_unlock(42)")
    wait_for(
        lambda: count(admin, "jobs_lib.jobs") == 0, timeout=60, what="it has ended"
    )
    assert admin.execute("select pod from effects").fetchall() == [("doomed",)]
    assert count(admin, "jobs_lib.history") == 1
