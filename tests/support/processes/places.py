"""A service whose records become jobs, which tells how far these are done."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from jobs_lib import exponential
from jobs_lib.kafka.outside import OutsideCommitter
from tests.support.processes.kinds import die, home_of, kind

if TYPE_CHECKING:
    from jobs_lib import App, Job

EFFECTS = "create table effects (partition int, n int)"
"""The table in which the last job of each record notes it."""
AT_ONCE = exponential(first=0.05, cap=0.05)


@kind("consumers", "executor")
def fans_out(app: App, *, dies_before_commit: bool = False) -> None:
    """Each record leads to a job, enqueued in one of several ways, and that to another.

    With ``dies_before_commit`` the process kills itself before it tells Kafka.
    """
    home = home_of(app)
    if dies_before_commit:
        OutsideCommitter.commit = lambda *_: die()  # type: ignore[method-assign]

    @app.job(retry=AT_ONCE)
    def first(job: Job, partition: int, n: int) -> None:
        with job.transaction() as conn:
            second.enqueue(conn, partition, n)

    @app.job(group=lambda partition, n: f"{partition}-{n % 4}", retry=AT_ONCE)
    def second(job: Job, partition: int, n: int) -> None:
        if job.attempt == 1 and n % 7 == 0:
            raise RuntimeError("not yet")
        with job.transaction() as conn:
            conn.execute("insert into effects values (%s, %s)", (partition, n))

    @app.consumer(home, group=f"{home}-g", block=10, done=True)
    def handle(record: Any, conn: Any) -> None:
        values = {"partition": record.partition, "n": record.offset}
        if record.value % 3 == 0:
            first.enqueue(conn, **values)
        elif record.value % 3 == 1:
            first.enqueue_many(conn, [values])
        else:
            in_sql = "select jobs_lib.enqueue('first', %s::jsonb)"
            conn.execute(in_sql, (json.dumps(values),))
