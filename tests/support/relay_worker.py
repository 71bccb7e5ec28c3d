"""A relay in a process of its own; it may kill itself at an event."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any

from jobs_lib import telemetry
from jobs_lib.service.service import Service
from tests.support.apps import make_app

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    url, bootstrap_servers, topic, *events = sys.argv[1:]

    def die(event: str, fields: dict[str, Any]) -> None:
        if event in events:
            os.kill(os.getpid(), signal.SIGKILL)

    telemetry.listen(die)
    app = make_app(url, kafka_bootstrap_servers=bootstrap_servers)
    app.topic(topic)
    Service(app, ["relay"]).run()
