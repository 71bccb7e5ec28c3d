"""A part of a pod in a process of its own: the service, or the sidecar beside it."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from jobs_lib.service.service import Service
from tests.support.apps import make_app
from tests.support.say import say

if TYPE_CHECKING:
    from jobs_lib import Job

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    url, bootstrap_servers, topic, pod, part = sys.argv[1:]
    app = make_app(url, kafka_bootstrap_servers=bootstrap_servers, home=topic, pod=pod)

    @app.consumer(topic, group=f"{topic}-service")
    def handle(record: Any, connection: Any) -> None: ...

    @app.job()
    def work(job: Job) -> None:
        say(f"ran {job.origin}")

    is_sidecar = part == "sidecar"
    parts = ["executor"] if is_sidecar else ["consumers"]
    sys.exit(Service(app, parts, sidecar=is_sidecar).run())
