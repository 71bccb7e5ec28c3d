"""A job that kills its process is found, and nobody else pays for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.apps import make_app

if TYPE_CHECKING:
    from jobs_lib import Job
    from tests.support import Worker


def test_a_job_that_kills_its_process_is_discarded_and_its_neighbours_finish(
    database_url, connect, run_process, wait_for
):
    app = make_app(database_url)

    @app.job()
    def work(job: Job) -> None: ...

    @app.job()
    def kill(job: Job) -> None: ...

    admin = connect(autocommit=True)
    admin.execute("create table runs (job bigint, attempt int)")
    with connect() as connection:
        work.enqueue_many(connection, [{}] * 10)
        killer = kill.enqueue(connection)
        work.enqueue_many(connection, [{}] * 10)
    pods: list[Worker] = []
    while len(pods) < 8:
        pod = run_process(
            "-m", "tests.support.killer_worker", database_url, f"pod-{len(pods)}"
        )
        pods.append(pod)
        wait_for(
            lambda pod=pod: not pod.running or not _count(admin, "jobs"),
            timeout=60,
            what=lambda pod=pod: f"the process died, or all is done\n{pod.output}",
        )
        if pod.running:
            break
    # Once as a neighbour of many, then alone among the suspects, and so on.
    assert len(pods) < 8
    assert _count(admin, "runs") == 20
    row = admin.execute("select id, type, errors from jobs_lib.discarded").fetchone()
    assert row is not None
    assert row[:2] == (killer, "kill")
    assert "the process died" in row[2][-1]["error"]
    # Nobody else has a failure on record.
    outcomes = admin.execute(
        "select distinct outcome from jobs_lib.history where type = 'work'"
    )
    assert outcomes.fetchall() == [("completed",)]


def _count(admin, table: str) -> int:
    schema = "jobs_lib." if table != "runs" else ""
    return admin.execute(f"select count(*) from {schema}{table}").fetchone()[0]
