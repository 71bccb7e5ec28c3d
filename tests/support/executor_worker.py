"""An executor in a process of its own, whose handler may never end."""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING

from jobs_lib.service.service import Service
from tests.support.apps import make_app
from tests.support.say import say

if TYPE_CHECKING:
    from jobs_lib import Job

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    url, pod, *options = sys.argv[1:]
    app = make_app(url, pod=pod)

    @app.job(group="group")
    def work(job: Job, n: int, group: str) -> None:
        with job.transaction() as connection:
            connection.execute(
                "insert into effects (n, job, pod) values (%s, %s, %s)",
                (n, job.id, pod),
            )
            say(f"inside {n}")
            if "hang" in options:
                threading.Event().wait()

    Service(app, ["executor"]).run()
