"""An executor in a process of its own, whose jobs take a given time."""

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
    url, seconds, grace = sys.argv[1:]
    # A hand-over may take long; the time of a process that stops is its own.
    app = make_app(url, shutdown_timeout=float(grace), handover_timeout=600, workers=2)

    @app.job()
    def work(job: Job) -> None:
        say(f"started {job.id}")
        threading.Event().wait(float(seconds))
        say(f"ended {job.id}")

    sys.exit(Service(app, ["executor"]).run())
