"""A re-export on a cluster, and a kill for each process that takes part in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import psycopg

from jobs_lib import reexport
from jobs_lib.devstack import server
from jobs_lib.errors import ReexportError, UnavailableError
from jobs_lib.postgres.database import Database
from tests.spark.fleet import ROOT
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from jobs_lib.devstack import PostgresServer
    from jobs_lib.reexport import Progress
    from tests.support import Worker
    from tests.support.brokers import OwnBroker
    from tests.support.spark_cluster import SparkCluster

_MODULE = """
from jobs_lib import App
from tests.support.processes.relays import {kind}

app = App("{kind}")
{kind}(app, **{topics})
"""
_LOOK_EVERY = 0.2
_START_SECONDS = 900.0
_PODS = 2
_COMMAND = ("-m", "jobs_lib.cli")


@dataclass
class Run:
    """The driver, the pods, and the servers below them."""

    cluster: SparkCluster
    server: PostgresServer
    broker: OwnBroker
    url: str
    run_process: Callable[..., Worker]
    start_process: Callable[..., Worker]
    folder: Path
    """For the module of the service."""
    chance: random.Random
    kind: str
    """The kind of the pods' processes, which declares the service, too."""
    topics: Mapping[str, str]
    """The options of the kind."""
    entity: str
    """What is re-exported."""
    program: tuple[str, ...] = _COMMAND
    """What Python runs as the command."""
    pods: list[Worker] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    """What was killed, in order."""

    def __post_init__(self) -> None:
        self.database = Database(self.url)
        text = _MODULE.format(kind=self.kind, topics=dict(self.topics))
        (self.folder / "killed_service.py").write_text(text)
        self._words: tuple[str, ...] = ()
        self.driver: Worker | None = None

    def drive(self, *words: str) -> None:
        """Begin `jobs-lib reexport` with these words; again if it is killed or fails.

        So do those who start commands on clusters, such as Kubernetes.
        """
        self._words = words
        self._start_driver()

    def start_pods(self) -> None:
        """Begin the pods, each with an executor and a relay."""
        while len(self.pods) < _PODS:
            self.pods.append(
                self.start_process(
                    self.kind,
                    self.url,
                    kafka_bootstrap_servers=self.broker.bootstrap_servers,
                    **self.topics,
                )
            )

    def read(self) -> Progress | None:
        """Read the progress; None if there is none, or no answer."""
        try:
            return reexport.status(self.database, self.entity)
        except (psycopg.OperationalError, UnavailableError, ReexportError):
            return None

    def reach(self, what: str, done: Callable[[Progress], Any]) -> None:
        """Wait for some progress."""

        def look() -> bool:
            self._keep_driving()
            for pod in self.pods:
                # A pod outlives each failure of the others.
                assert pod.running, pod.output
            found = self.read()
            return found is not None and bool(done(found))

        wait_for(
            look,
            timeout=1_200,
            what=lambda: f"{what}: {self.read()}\n{self._tell_driver()}",
            every=_LOOK_EVERY,
        )

    def reach_sent(self, number: int) -> None:
        """Wait until so many records are sent."""
        self.reach(f"{number} are sent", lambda found: found.sent >= number)

    def reach_loaded(self, ranges: int) -> None:
        """Wait until so many ranges are loaded."""
        self.reach(f"{ranges} ranges", lambda found: found.loaded_ranges >= ranges)

    def kill(self, what: str) -> None:
        """Kill a driver, worker, pod, broker or database, and begin another one."""
        print(f"{len(self.killed) + 1}: {what} at {self._tell_progress()}")
        # A broker needs the three minutes that it has beside a few busy processes.
        with patch.object(server, "START_SECONDS", _START_SECONDS):
            {
                "driver": self._kill_driver,
                "worker": self._kill_worker,
                "pod": self._kill_pod,
                "broker": self._kill_broker,
                "database": self._kill_database,
            }[what]()
        self.killed.append(what)

    @property
    def is_driving(self) -> bool:
        """Whether the command runs."""
        return self.driver is not None and self.driver.running

    def _start_driver(self) -> None:
        servers = self.broker.bootstrap_servers
        self.driver = self.run_process(
            *self.program,
            "reexport",
            *self._words,
            env={
                "JOBS_LIB_APP": "killed_service:app",
                "JOBS_LIB_DATABASE_URL": self.url,
                "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": servers,
                "PYTHONPATH": f"{self.folder}:{ROOT}",
                "SPARK_CONF_DIR": str(self.cluster.conf),
            },
        )

    def _keep_driving(self) -> None:
        if self.driver is None or self.driver.running:
            return
        if self.driver.wait() != 0:
            print(f"the driver has failed: {self.driver.errors[-1:]}")
            self.cluster.mend()
            self._start_driver()

    def _kill_driver(self) -> None:
        assert self.driver is not None
        self.driver.kill()
        self._start_driver()

    def _kill_worker(self) -> None:
        self.cluster.mend()
        name = self.chance.choice(self.cluster.workers)
        self.cluster.kill(name)
        self.cluster.start_worker(name)

    def _kill_pod(self) -> None:
        self.pods.pop(0).kill()
        self.start_pods()

    def _kill_broker(self) -> None:
        with self.broker.down():
            pass

    def _kill_database(self) -> None:
        self.server.kill()
        self.server.start()
        wait_for(
            lambda: self.read() is not None,
            timeout=300,
            what="the database is back",
            every=_LOOK_EVERY,
        )

    def _tell_driver(self) -> str:
        return "no driver" if self.driver is None else self.driver.output

    def _tell_progress(self) -> str:
        if (found := self.read()) is None:
            return "no answer"
        return (
            f"{found.sent} sent of {found.loaded} loaded, in "
            f"{found.loaded_ranges} of {found.ranges} ranges"
        )


def await_live(url: str) -> None:
    """Wait until all live records are sent."""
    with psycopg.connect(url, autocommit=True) as connection:
        wait_for(
            lambda: (
                connection.execute(
                    "select count(*) from jobs_lib.outbox where class = 0"
                ).fetchone()
                == (0,)
            ),
            timeout=300,
            what="all live records are sent",
            every=_LOOK_EVERY,
        )
