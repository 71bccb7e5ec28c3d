"""A pod in a process of its own whose handlers hold their transactions open."""

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
    url, bootstrap_servers, topic, pod = sys.argv[1:]
    app = make_app(
        url,
        kafka_bootstrap_servers=bootstrap_servers,
        home=topic,
        pod=pod,
        workers=2,
        assignment_strategy="range",
    )

    @app.consumer(topic, group=f"{topic}-g")
    def handle(record: Any, connection: Any) -> None:
        connection.execute("insert into read values (%s, %s)", (record.value, pod))

    @app.job(group="key")
    def work(job: Job, key: str) -> None:
        with job.transaction() as connection:
            connection.execute("update keys set seen = seen + 1 where key = %s", (key,))
            connection.execute("insert into effects values (%s, %s)", (job.id, pod))
            say(f"started {job.id}")
            with psycopg.connect(url, autocommit=True) as other:
                ask = "select from may_end where pod = %s"
                while not other.execute(ask, (pod,)).rowcount:
                    threading.Event().wait(0.05)
        say(f"ended {job.id}")

    sys.exit(Service(app, ("consumers", "executor")).run())
