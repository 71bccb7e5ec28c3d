"""Pods: processes of the command line, as in a deployment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewTopic,
)

from benchmarks.ownership import service
from benchmarks.peers.peer import REPOSITORY
from jobs_lib.postgres.migrate import migrate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import psycopg

    from benchmarks.server import Server
    from jobs_lib.devstack import KafkaBroker

Settings = dict[str, Any]
"""Settings by name, as an application gives them."""

QUICK: Settings = {
    "session_timeout": 6.0,
    "group_heartbeat_interval": 0.3,
    "heartbeat_interval": 0.5,
    "stale_after": 2.0,
    "handover_timeout": 2.0,
    "follow_interval": 0.3,
}
"""The settings of take-overs, unless a line says otherwise."""
_PAUSE = 0.005


class WaitError(Exception):
    """Something did not happen in time."""


def wait_until(
    condition: Callable[[], object],
    seconds: float,
    what: str | Callable[[], str],
    pause: float = _PAUSE,
) -> float:
    """Wait until the condition holds; return the clock's time at that moment.

    Args:
        condition: the function that is called repeatedly.
        seconds: how long to wait at most.
        what: a description of the condition.
        pause: seconds between two calls; longer if a call disturbs.

    Raises:
        WaitError: it does not hold within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            said = what if isinstance(what, str) else what()
            raise WaitError(f"waited {seconds:g} s in vain until {said}")
        time.sleep(pause)
    return time.monotonic()


@dataclass
class Pod:
    """The processes of one pod: the service, and the sidecar if there is one."""

    name: str
    processes: list[subprocess.Popen[bytes]]
    log: Any

    def send(self, number: int) -> None:
        """Send a signal to all of its processes."""
        for process in self.processes:
            process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End its processes, and wait for it."""
        if number != signal.SIGKILL:
            # A process that stands still hears no other signal.
            self.send(signal.SIGCONT)
        self.send(number)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def said(self) -> str:
        """The last output of its processes."""
        self.log.seek(0)
        return str(self.log.read()[-2_000:].decode(errors="replace"))


@dataclass
class Deployment:
    """A database, a topic, and pods that come and go."""

    server: Server
    broker: KafkaBroker | None
    partitions: int
    settings: Settings
    sidecars: bool = False
    topic: str = "local"
    notes: Path | None = None
    """The file that the job `note` writes to."""
    pods: dict[str, Pod] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        """Start pods."""
        for name in names:
            log = tempfile.TemporaryFile()  # noqa: SIM115 -- lives as long as the pod
            pod = Pod(name, [], log)
            target = "benchmarks.ownership.service:app"
            if self.broker is None:
                commands = [["executor", target]]
            elif self.sidecars:
                service_only = ["run", target, "--without", "executor"]
                commands = [service_only, ["executor", target]]
            else:
                commands = [["run", target]]
            for command in commands:
                pod.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "jobs_lib.cli", *command],
                        cwd=REPOSITORY,
                        env=self.environment(name),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
            self.pods[name] = pod

    def environment(self, pod: str) -> Mapping[str, str]:
        """The environment of a pod's processes."""
        settings = {**self.settings, "database_url": self.server.url, "pod": pod}
        if self.broker is not None:
            settings["kafka_bootstrap_servers"] = self.broker.bootstrap_servers
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith("JOBS_LIB_")},
            **{f"JOBS_LIB_{name.upper()}": str(v) for name, v in settings.items()},
            "BENCH_TOPIC": self.topic,
            "BENCH_NOTES": str(self.notes or os.devnull),
            "PYTHONPATH": str(REPOSITORY),
        }

    @property
    def origins(self) -> list[str]:
        """The origins of the topic's partitions."""
        return [f"{self.topic}/{n}" for n in range(self.partitions)]

    def owners(
        self, connection: psycopg.Connection[Any], role: str = "execute"
    ) -> dict[str, tuple[str, int]]:
        """The owner of each origin of a role, and its epoch."""
        rows = connection.execute(
            "select o.origin, p.pod, o.epoch from jobs_lib.origins o"
            " join jobs_lib.processes p on p.id = o.owner"
            " where split_part(o.role, ':', 1) = %s",
            (role,),
        )
        return {origin: (pod, epoch) for origin, pod, epoch in rows}

    def await_shared(
        self, connection: psycopg.Connection[Any], *names: str, seconds: float = 60
    ) -> float:
        """Wait until these pods share all origins; return the clock's time then."""

        def shared() -> bool:
            found = self.owners(connection)
            pods = {pod for pod, _ in found.values()}
            return {*found} >= {*self.origins} and pods == {*names}

        return wait_until(
            shared,
            seconds,
            lambda: (
                f"{names} share {self.partitions} origins: "
                f"{self.owners(connection)} {[p.said for p in self.pods.values()]}"
            ),
        )

    def enqueue_marks(self, connection: psycopg.Connection[Any]) -> list[int]:
        """Enqueue a job in each origin; return their ids."""
        rows = connection.execute(
            "select jobs_lib.enqueue('mark', '{}', origin => o)"
            " from unnest(%s::text[]) o",
            (self.origins,),
        )
        return [job for (job,) in rows]

    def enqueue_note(self, connection: psycopg.Connection[Any], origin: str) -> int:
        """Enqueue a job that notes when it has run; return its id."""
        row = connection.execute(
            "select jobs_lib.enqueue('note', '{}', origin => %s)", (origin,)
        ).fetchone()
        assert row is not None
        return int(row[0])

    def read_notes(self) -> list[tuple[int, str, float]]:
        """The jobs that have run, the origin of each, and the clock's time."""
        assert self.notes is not None
        lines = (line.split() for line in self.notes.read_text().splitlines())
        return [(int(job), origin, float(at)) for job, origin, at in lines]


@contextlib.contextmanager
def deployed(
    server: Server,
    broker: KafkaBroker | None,
    *,
    partitions: int,
    sidecars: bool = False,
    **settings: Any,
) -> Iterator[Deployment]:
    """A fresh database and topic; all pods end with the block."""
    server.renew()
    migrate(server.url)
    deployment = Deployment(server, broker, partitions, {**QUICK, **settings}, sidecars)
    with server.connect() as connection:
        service.create_tables(connection)
        if broker is not None:
            deployment.topic = f"bench-{uuid.uuid4().hex[:8]}"
            _create_topics(broker, deployment.topic, partitions)
    try:
        yield deployment
    finally:
        for pod in deployment.pods.values():
            pod.end(signal.SIGKILL)


def _create_topics(broker: KafkaBroker, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    made = admin.create_topics(
        [NewTopic(topic, partitions, 1), NewTopic(f"{topic}-state", 4, 1)]
    )
    for future in made.values():
        future.result()
