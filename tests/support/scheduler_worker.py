"""A scheduler in a process of its own; it may kill itself inside its transaction."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from datetime import datetime  # noqa: TC003 - the payload's schema

from jobs_lib import Job  # noqa: TC001
from jobs_lib.service.scheduler import Scheduler
from tests.support.apps import make_app
from tests.support.say import say

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    url, cron, *options = sys.argv[1:]
    app = make_app(url)

    def choose_group(**_: object) -> str | None:
        # Asked for while the job is enqueued: the tick is moved, and not committed.
        if "die" in options:
            os.kill(os.getpid(), signal.SIGKILL)
        if "stop" in options:
            options.remove("stop")
            say("inside")
            os.kill(os.getpid(), signal.SIGSTOP)
        return None

    @app.periodic(cron, missed="all")
    @app.job(group=choose_group)
    def work(job: Job, tick: datetime) -> None: ...

    Scheduler(app.database(), app.schedules.values()).start()
    say(f"started at {time.time():.0f}")
    threading.Event().wait()
