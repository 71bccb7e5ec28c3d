"""A pod in a process of its own whose jobs call an HTTP server, and nothing else."""

from __future__ import annotations

import json
import logging
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

from jobs_lib.service.service import Service
from tests.support.apps import make_app

if TYPE_CHECKING:
    from jobs_lib import Job

if __name__ == "__main__":
    url, server, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    app = make_app(url, **settings)

    @app.consumer(settings["home"], group=f"{settings['home']}-g")
    def handle(record: Any, connection: Any) -> None: ...

    @app.job(group="key")
    def work(job: Job, key: str) -> None:
        with urllib.request.urlopen(f"{server}/{app.settings.pod}/{job.id}") as answer:
            answer.read()

    sys.exit(Service(app, ("consumers", "executor")).run())
