"""An executor whose job changes an entity and tells it; it dies at a step of that."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from jobs_lib.service.service import Service
from tests.support.apps import make_app
from tests.support.dying_worker import die, watch

if TYPE_CHECKING:
    from jobs_lib import App, Job

TABLE = "create table entities (key text primary key, n int not null)"
_CHANGE = "update entities set n = n + 1 where key = %s returning n"


def make(url: str, topic: str, **settings: Any) -> App:
    """An app with the topic ``events`` and the job ``change``."""
    app = make_app(url, **settings)
    events = app.topic(topic, value=int)

    @app.job(group="key")
    def change(job: Job, key: str) -> None:
        with job.transaction() as connection:
            die("begun")
            row = connection.execute(_CHANGE, (key,)).fetchone()
            assert row is not None
            die("changed")
            events.send(connection, key=key, value=row[0], version=row[0])
            die("written")
        die("committed")

    return app


if __name__ == "__main__":
    url, pod, last, topic = sys.argv[1:]
    watch(last)
    sys.exit(Service(make(url, topic, pod=pod), ["executor"]).run())
