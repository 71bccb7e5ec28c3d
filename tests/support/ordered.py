"""Jobs that note in which order those of a group took effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs_lib import App, Job
    from jobs_lib.jobs.type import JobType

EFFECTS = """
create table effects ("group" text, n int, place bigint generated always as identity)
"""
"""What the jobs `work` have done."""


def add_ordered_job(app: App) -> JobType[...]:
    """Give an app the job type `work`, which notes its number in its group."""

    @app.job(group="group")
    def work(job: Job, group: str, n: int) -> None:
        with job.transaction() as connection:
            connection.execute(
                'insert into effects ("group", n) values (%s, %s)', (group, n)
            )

    return work


def read_order(admin: Any, group: str) -> list[int]:
    """The numbers of a group's jobs, in the order in which they took effect."""
    rows = admin.execute(
        'select n from effects where "group" = %s order by place', (group,)
    )
    return [n for (n,) in rows]
