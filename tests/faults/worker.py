"""An executor in a process of its own, with handlers for the tests of faults."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib import exponential, telemetry
from jobs_lib.service.service import Service
from tests.support.apps import make_app
from tests.support.say import say
from tests.support.signals import strike

if TYPE_CHECKING:
    from jobs_lib import Job

if __name__ == "__main__":
    url, settings = sys.argv[1], json.loads(sys.argv[2])
    # Handlers write here, outside the library's own connections.
    other = settings.pop("other", url)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    app = make_app(url, **settings)
    retry = exponential(first=0.05, cap=0.05)
    ADD = "insert into effects values (%s, %s, %s)"

    @app.job(retry=retry)
    def quick(job: Job, n: int) -> None:
        pass

    @app.job(retry=retry)
    def slow(job: Job, n: int) -> None:
        threading.Event().wait(0.05)

    @app.job(retry=retry)
    def add(job: Job, n: int) -> None:
        with job.transaction() as connection:
            connection.execute(ADD, (n, job.id, job.attempt))
            threading.Event().wait(0.02)

    @app.job(retry=retry)
    async def aadd(job: Job, n: int) -> None:
        async with job.transaction() as connection:
            await connection.execute(ADD, (n, job.id, job.attempt))

    @app.job(retry=retry)
    def fail_once(job: Job, n: int) -> None:
        if job.attempt == 1:
            raise ValueError(n)
        with job.transaction() as connection:
            connection.execute(ADD, (n, job.id, job.attempt))

    @app.job(retry=retry)
    def add_and_say(job: Job, n: int) -> None:
        say(f"begun {n} {job.attempt}")
        try:
            with job.transaction() as connection:
                connection.execute(ADD, (n, job.id, job.attempt))
        except BaseException as error:
            say(f"{type(error).__name__}: {error}")
            raise

    @app.job(retry=retry)
    async def aadd_and_say(job: Job, n: int) -> None:
        say(f"begun {n} {job.attempt}")
        try:
            async with job.transaction() as connection:
                await connection.execute(ADD, (n, job.id, job.attempt))
        except BaseException as error:
            say(f"{type(error).__name__}: {error}")
            raise

    @app.job(retry=retry)
    def call_then_die(job: Job, n: int) -> None:
        with psycopg.connect(other) as connection:
            connection.execute(
                "insert into calls values (%s, %s, %s)",
                (n, job.idempotency_key, job.attempt),
            )
        with job.transaction() as connection:
            connection.execute(ADD, (n, job.id, job.attempt))
            if "die" in os.environ:
                strike(signal.SIGKILL)

    @app.job(retry=retry)
    def add_then_die(job: Job, n: int) -> None:
        with job.transaction() as connection:
            connection.execute(ADD, (n, job.id, job.attempt))
        if "die" in os.environ:
            strike(signal.SIGKILL)

    def tell(event: str, fields: dict[str, Any]) -> None:
        # Print all failures; the log has only a few of them.
        if event == "loop.failed":
            print(f"alarm {fields['loop']} {fields['sqlstate']} {fields['error']}")

    if "tell" in os.environ:
        telemetry.listen(tell)
    service = Service(app, ["executor"])
    service.start()
    say("started")
    threading.Event().wait()
