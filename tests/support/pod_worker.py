"""A pod of a service in a process of its own, whose jobs wait until they may end."""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib.service.service import Service
from tests.support.apps import make_app
from tests.support.say import say

if TYPE_CHECKING:
    from jobs_lib import Job

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    url, bootstrap_servers, topic, pod, port = sys.argv[1:]
    app = make_app(
        url,
        kafka_bootstrap_servers=bootstrap_servers,
        home=topic,
        pod=pod,
        probes_port=int(port),
        workers=2,
        # Whoever leaves without a word is missed for so long.
        session_timeout=120,
        shutdown_timeout=600,
    )

    @app.consumer(topic, group=f"{topic}-g")
    def handle(record: Any, connection: Any) -> None: ...

    @app.job()
    def work(job: Job) -> None:
        say(f"started {job.id}")
        with psycopg.connect(url, autocommit=True) as connection:
            ask = "select from may_end where pod = %s"
            while not connection.execute(ask, (pod,)).rowcount:
                threading.Event().wait(0.05)
        say(f"ended {job.id}")

    sys.exit(Service(app).run())
