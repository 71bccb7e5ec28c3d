"""An executor in a process of its own that has the default settings."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from jobs_lib import App
from jobs_lib.service.service import Service
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from jobs_lib import Job

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    app = App("test", settings=load_settings(database_url=sys.argv[1]))

    @app.job()
    def work(job: Job) -> None: ...

    Service(app, ["executor"]).run()
