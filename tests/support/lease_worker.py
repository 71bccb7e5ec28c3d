"""An executor in a process of its own that notes each start in a file."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, cast

from jobs_lib.service.service import Service
from tests.support.apps import make_app
from tests.support.say import say

if TYPE_CHECKING:
    from jobs_lib import Job
    from jobs_lib.executor.lane import ClaimedJob

if __name__ == "__main__":
    url, pod, folder = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    app = make_app(url, pod=pod, workers=16)
    starts = os.open(Path(folder, "starts"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    may_end = Path(folder, f"{pod} may end")

    @app.job(group="group")
    def work(job: Job, group: str) -> None:
        epoch = cast("ClaimedJob", job).lane.epoch
        os.write(starts, f"{job.id} {epoch} {pod}\n".encode())
        say(f"started {job.id}")
        while not may_end.exists():
            threading.Event().wait(0.01)

    sys.exit(Service(app, ["executor"]).run())
