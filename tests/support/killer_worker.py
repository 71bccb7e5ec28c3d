"""An executor in a process of its own, one of whose jobs kills the process."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from jobs_lib import exponential
from jobs_lib.service.service import Service
from tests.support.apps import make_app
from tests.support.say import say

if TYPE_CHECKING:
    from jobs_lib import Job

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    url, pod = sys.argv[1:]
    app = make_app(url, pod=pod)

    @app.job(retry=exponential(first=0.01, cap=0.01, max_attempts=3))
    def work(job: Job) -> None:
        with job.transaction() as connection:
            connection.execute(
                "insert into runs (job, attempt) values (%s, %s)", (job.id, job.attempt)
            )

    @app.job(retry=exponential(first=0.01, cap=0.01, max_attempts=3))
    def kill(job: Job) -> None:
        say(f"killing {job.attempt}")
        os._exit(9)

    Service(app, ["executor"]).run()
