"""Everything that the histories of one test share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib.backoff import Retry
from tests.support.apps import make_app

if TYPE_CHECKING:
    from jobs_lib import Job
    from jobs_lib.postgres.database import Database

TABLES = [
    "jobs", "claims", "discarded", "history", "pauses", "cancellations", "origins",
    "processes",
]  # fmt: skip


class Bench:
    """The database, connections and two job types for the histories of a test."""

    def __init__(self, database: Database) -> None:
        self.database = database
        app = make_app(database.url, notify=False)
        for name in ("work", "other"):
            app.job(
                name=name, group="group", retry=Retry(1e-6, cap=1e-6), time_limit=60
            )(handle)
        self.types: Any = app.jobs
        self.admin = database.connect("admin")
        self.admin.execute("create table effects (job bigint primary key)")
        self.pods = [database.connect("pod") for _ in range(3)]
        self.enqueuers = [database.connect("enqueuer") for _ in range(3)]
        self.handlers = database.pool("handlers", 30)

    def close(self) -> None:
        """Close all connections."""
        self.handlers.close()
        for connection in (self.admin, *self.pods, *self.enqueuers):
            connection.close()

    def clear(self) -> None:
        """Delete the history before."""
        for table in TABLES:
            self.admin.execute(f"delete from jobs_lib.{table}")
        self.admin.execute("delete from effects")


def handle(job: Job, group: str | None = None) -> None:
    """Never called: the machine decides how the job ends."""
