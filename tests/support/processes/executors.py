"""Executors and a scheduler that need no Kafka."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import datetime  # noqa: TC003 - the payload's schema
from pathlib import Path
from typing import TYPE_CHECKING, cast

from jobs_lib import exponential
from jobs_lib.service.scheduler import Scheduler
from jobs_lib.settings import Settings
from tests.support.apps import QUICK
from tests.support.processes.kinds import die, kind
from tests.support.say import say
from tests.support.signals import strike

if TYPE_CHECKING:
    from jobs_lib import App, Job
    from jobs_lib.executor.lane import ClaimedJob

AT_ONCE = exponential(first=0.01, cap=0.01, max_attempts=3)
USUAL = {name: Settings.model_fields[name].default for name in QUICK}
"""The settings that shorten tests, with the defaults that users have."""


@kind("executor")
def effects(app: App, *, hangs: bool = False) -> None:
    """Each job has an effect in its own transaction, which may never end."""

    @app.job(group="group")
    def work(job: Job, n: int, group: str) -> None:
        with job.transaction() as connection:
            connection.execute(
                "insert into effects (n, job, pod) values (%s, %s, %s)",
                (n, job.id, app.settings.pod),
            )
            say(f"inside {n}")
            if hangs:
                threading.Event().wait()


@kind("executor", **USUAL)
def idle(app: App) -> None:
    """A job does nothing, and all settings are those of a user."""

    @app.job()
    def work(job: Job) -> None: ...


@kind("executor")
def killer(app: App) -> None:
    """Jobs of one type note that they ran; those of the other kill the process."""

    @app.job(retry=AT_ONCE)
    def work(job: Job) -> None:
        with job.transaction() as connection:
            connection.execute(
                "insert into runs (job, attempt) values (%s, %s)", (job.id, job.attempt)
            )

    @app.job(retry=AT_ONCE)
    def kill(job: Job) -> None:
        say(f"killing {job.attempt}")
        os._exit(9)


@kind("executor", workers=16)
def notes_starts(app: App, folder: str) -> None:
    """Each job notes its start in a file, and ends once another file exists."""
    pod = app.settings.pod
    starts = os.open(Path(folder, "starts"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    may_end = Path(folder, f"{pod} may end")

    @app.job(group="group")
    def work(job: Job, group: str) -> None:
        epoch = cast("ClaimedJob", job).lane.epoch
        os.write(starts, f"{job.id} {epoch} {pod}\n".encode())
        say(f"started {job.id}")
        while not may_end.exists():
            threading.Event().wait(0.01)


# A hand-over may take long, but a process that stops has its own limit.
@kind("executor", handover_timeout=600, workers=2)
def slow(app: App, seconds: float) -> None:
    """Each job takes a given time."""

    @app.job()
    def work(job: Job) -> None:
        say(f"started {job.id}")
        threading.Event().wait(seconds)
        say(f"ended {job.id}")


@kind()
def scheduler(app: App, cron: str, ends: str | None = None) -> None:
    """A scheduler that can be killed or stopped once, inside its transaction."""
    left = {ends}

    def choose_group(**_: object) -> str | None:
        # This runs while the job is enqueued: the tick is moved, and not committed.
        if "killed" in left:
            die()
        if "stopped" in left:
            left.clear()
            say("inside")
            strike(signal.SIGSTOP)
        return None

    @app.periodic(cron, missed="all")
    @app.job(group=choose_group)
    def work(job: Job, tick: datetime) -> None: ...

    Scheduler(app.database(), app.schedules.values()).start()
    say(f"started at {time.time():.0f}")
    threading.Event().wait()
