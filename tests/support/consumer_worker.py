"""A consumer in a process of its own; it may kill itself at the n-th event."""

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
    url, bootstrap_servers, topic, *death = sys.argv[1:]
    left = int(death[1]) if death else 0

    def die(event: str, fields: dict[str, Any]) -> None:
        global left
        if death and event == death[0]:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    telemetry.listen(die)
    # A short session: the group waits that long for a member that was killed.
    app = make_app(
        url,
        kafka_bootstrap_servers=bootstrap_servers,
        consumer_block=7,
        session_timeout=2,
    )

    @app.consumer(topic, group=f"{topic}-g")
    def add(record: Any, connection: Any) -> None:
        connection.execute(
            "insert into sums as s values (%s, %s)"
            " on conflict (partition) do update set n = s.n + excluded.n",
            (record.partition, record.value),
        )

    Service(app, ["consumers"]).run()
