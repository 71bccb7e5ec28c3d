"""A scene for races: the test makes every step of pods and connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from jobs_lib.backoff import Retry
from jobs_lib.executor.settling.completer import Completer
from tests.support.apps import make_app
from tests.support.stepping import Pod

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jobs_lib import Job
    from jobs_lib.executor.lane import ClaimedJob
    from jobs_lib.executor.section import Section
    from jobs_lib.postgres.database import Database

ORIGIN = "local/1"


class Scene:
    """One origin, the types `work` and `last`, and all the pods that a test makes."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.app = make_app(database.url, notify=False)
        at_once = Retry(1e-6, cap=1e-6)

        def handle(job: Job, group: str | None = None, n: int = 0) -> None: ...

        self.app.job(name="work", group="group", retry=at_once, time_limit=9)(handle)
        self.app.job(name="last", group="group", retry=at_once, last_only=True)(handle)
        self._opened: list[Any] = []
        self.admin = self.connect()
        self.admin.execute("create table effects (job bigint, pod uuid)")

    def connect(self) -> psycopg.Connection[Any]:
        """A connection made by the library; statements wait briefly for locks."""
        connection = self.database.connect("scene")
        connection.execute("set lock_timeout = '100ms'")
        self._opened.append(connection)
        return connection

    def pod(
        self,
        *origins: str,
        section: Section | None = None,
        connection: psycopg.Connection[Any] | None = None,
    ) -> Pod:
        """A pod that owns these origins."""
        connection = connection or self.connect()
        pod = Pod(self.database, connection, self.app.jobs, section=section)
        self._opened.append(pod)
        if origins:
            pod.take_over(*origins)
        return pod

    def enqueue(
        self,
        connection: psycopg.Connection[Any] | None = None,
        type_: str = "work",
        group: str | None = None,
        **options: Any,
    ) -> int:
        """Enqueue in the connection's open transaction, or else in a new one."""
        chosen: Any = self.app.jobs[type_].options(origin=ORIGIN, **options)
        if connection is not None:
            return chosen.enqueue(connection, group=group)
        with self.admin.transaction():
            return chosen.enqueue(self.admin, group=group)

    def begin(self) -> psycopg.Connection[Any]:
        """A connection with an open transaction."""
        connection = self.connect()
        connection.execute("begin")
        return connection

    def send(
        self,
        connection: psycopg.Connection[Any],
        name: str,
        parameters: Mapping[str, Any],
    ) -> list[Any]:
        """Send one of the library's statements."""
        cursor = connection.execute(self.database.queries[name], parameters)
        return cursor.fetchall() if cursor.description else []

    def waits(
        self,
        connection: psycopg.Connection[Any],
        name: str,
        parameters: Mapping[str, Any],
    ) -> bool:
        """Tell whether a statement must wait for a lock; if so, it has no effect."""
        try:
            with connection.transaction():
                self.send(connection, name, parameters)
        except psycopg.errors.LockNotAvailable:
            return True
        return False

    def completion(self, pod: Pod, *jobs: ClaimedJob) -> tuple[str, dict[str, Any]]:
        """The statement with which a pod completes jobs."""
        completer = Completer(pod.id, self.app.jobs)
        (settlement,) = completer.prepare(jobs, [], pod.claimer.epochs)
        return settlement.query, settlement.parameters

    def taking(self, pod: Pod) -> dict[str, Any]:
        """The parameters with which a pod takes the origin over."""
        return {
            "role": "execute",
            "origins": [ORIGIN],
            "owner": pod.id,
            "last_epoch": 0,
        }

    def state(self, job: int) -> tuple[Any, ...] | None:
        """State, attempts and crashes of an unfinished job."""
        return self.admin.execute(
            "select state, attempt, crashes from jobs_lib.jobs where id = %s", (job,)
        ).fetchone()

    def ends(self, job: int) -> list[str]:
        """Return the outcomes of a job, in order."""
        rows = self.admin.execute(
            "select outcome from jobs_lib.history where id = %s", (job,)
        )
        return [outcome for (outcome,) in rows]

    def effects(self) -> list[int]:
        """Return the jobs that left an effect."""
        rows = self.admin.execute("select job from effects order by job")
        return [job for (job,) in rows]

    def close(self) -> None:
        """Close all pods and connections."""
        for one in reversed(self._opened):
            one.close()


@pytest.fixture
def scene(database) -> Iterator[Scene]:
    """Pods and connections whose every step the test makes."""
    scene = Scene(database)
    yield scene
    scene.close()


def run(pod: Pod, rounds: int = 3) -> list[int]:
    """Let a pod run all that it can; return the ids of the jobs, in order."""
    ran = []
    for _ in range(rounds):
        pod.round()
        while pod.startable:
            if job := pod.start():
                ran.append(job.id)
                pod.finish(job)
    pod.round()
    return ran
