"""Old transactions, old releases and an old history exist beside the work."""

from __future__ import annotations

import psycopg
import pytest

from jobs_lib.operating.history import maintain
from tests.faults.helpers import attempts, count
from tests.support.apps import HOME, executing, heard, make_app

WAVE = 1_000


def blocks(admin) -> int:
    """How many blocks all sessions have read of the jobs and their indexes."""
    row = admin.execute(
        "select heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read"
        " from pg_statio_user_tables where relname = 'jobs'"
    ).fetchone()
    return int(row[0])


def settled_blocks(admin) -> int:
    """Return the same number, once the sessions have reported it: once a second."""
    admin.execute("select pg_sleep(1.4)")
    return blocks(admin)


@pytest.mark.guarantee("FP13", "J26")
@pytest.mark.slow
@pytest.mark.parametrize("groups", [0, 50], ids=["ungrouped", "grouped"])
def test_an_old_snapshot_does_not_make_claims_more_and_more_expensive(
    url, admin, app, connect, wait_for, groups
):
    @app.job(group="group")
    def work(job, group: str | None = None) -> None:
        ran.append(job.id)

    ran: list[int] = []
    admin.execute("alter table jobs_lib.jobs set (autovacuum_enabled = false)")
    holder = connect()
    holder.execute("set transaction isolation level repeatable read")
    holder.execute("select count(*) from jobs_lib.jobs")
    wave = [{"group": f"g{n % groups}"} if groups else {} for n in range(WAVE)]
    read = []
    with executing(app, HOME):
        for target in range(WAVE, 7 * WAVE, WAVE):
            before = settled_blocks(admin)
            with connect() as connection:
                work.enqueue_many(connection, wave)
            # A look into the table does not tell this: its reads would be counted, too.
            wait_for(lambda t=target: len(ran) == t, timeout=30, what="all ran")
            read.append(settled_blocks(admin) - before)
    dead = admin.execute(
        "select n_dead_tup from pg_stat_user_tables where relname = 'jobs'"
    ).fetchone()
    assert dead[0] >= 5 * WAVE
    # Each wave leaves a thousand dead rows behind the cursor, where no statement reads.
    # Only the youngest of a group are read past.
    assert max(read[2:]) < 1.5 * max(read[:2]), read


@pytest.mark.guarantee("FJ2")
def test_a_job_of_an_unknown_type_is_left_to_a_pod_that_knows_it(
    url, connect, wait_for
):
    old, new = make_app(url), make_app(url)

    @old.job(name="known")
    def known(job) -> None: ...

    @new.job(name="known")
    def known_too(job) -> None: ...

    @new.job(name="added")
    def added(job) -> None: ...

    with connect() as connection:
        added.enqueue_many(connection, [{}] * 5)
        known.enqueue_many(connection, [{}] * 5)
    with heard("jobs.unknown") as unknown, executing(old, HOME):
        wait_for(lambda: count(url) == 5 and unknown, what="only the known have run")
    assert {fields["type"] for _, fields in unknown} == {"added"}
    with psycopg.connect(url) as connection:
        left = connection.execute(
            "select distinct type, attempt, crashes, state from jobs_lib.jobs"
        ).fetchall()
    assert left == [("added", 0, 0, "available")]
    with executing(new, HOME):
        wait_for(lambda: count(url) == 0, what="the others have run")
    assert attempts(url) == {("completed", 1)}


@pytest.mark.guarantee("FJ16")
def test_removing_finished_jobs_holds_up_neither_claims_nor_completions(
    url, admin, app, database, connect, wait_for
):
    @app.job()
    def work(job) -> None: ...

    maintain(database, [1])
    admin.execute(
        "insert into jobs_lib.history (keep_until, id, origin, type, outcome, attempt,"
        " enqueued_at) select current_date - 3, n, 'local/0', 'work', 'completed', 1,"
        " now() from generate_series(1, 50000) n"
    )
    waited: list[object] = []
    with executing(app, HOME):
        for _ in range(20):
            with connect() as connection:
                work.enqueue_many(connection, [{}] * 50)
            maintain(database, [1])
            waited += admin.execute(
                "select query from pg_stat_activity where wait_event_type = 'Lock'"
                " and clock_timestamp() - query_start > interval '0.5 s'"
                " and application_name like 'jobs_lib executor %'"
            ).fetchall()
        wait_for(lambda: count(url) == 0, what="all have run")
    assert waited == []
    left = admin.execute(
        "select count(*), min(keep_until) >= current_date from jobs_lib.history"
    )
    assert left.fetchone() == (1_000, True)


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        (
            "jobs (origin, type, payload)",
            "select 'local/1', 'work', '{}' from generate_series(1, 2000)",
        ),
        (
            "claims (owner, seq, ids)",
            "select gen_random_uuid(), n, '{1}' from generate_series(1, 2000) n",
        ),
        (
            "outbox (shard, topic, key)",
            "select 1, 'orders', n from generate_series(1, 2000) n",
        ),
    ],
)
def test_an_ordinary_vacuum_does_not_truncate_the_busy_tables(admin, table, rows):
    name = f"jobs_lib.{table.partition(' ')[0]}"
    admin.execute(f"insert into jobs_lib.{table} {rows}")
    size = admin.execute("select pg_relation_size(%s)", (name,)).fetchone()
    admin.execute(f"delete from {name}")
    admin.execute(f"vacuum {name}")
    assert admin.execute("select pg_relation_size(%s)", (name,)).fetchone() == size
    # New rows use this space, and a truncating vacuum returns it.
    admin.execute(f"vacuum (truncate) {name}")
    assert admin.execute("select pg_relation_size(%s)", (name,)).fetchone() == (0,)
