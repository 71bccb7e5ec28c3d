"""Pods of one service in this process, and which pod ran the jobs of each origin."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tests.support.apps import make_app
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib import App, Job


class Pods:
    """Makes the apps of pods, and notes which pod ran which job."""

    def __init__(
        self, url: str, bootstrap_servers: str, home: str, partitions: int
    ) -> None:
        self.home = home
        self.origins = [f"{home}/{n}" for n in range(partitions)]
        self.group = f"{home}-service"
        self.runs: list[tuple[str, str]] = []
        """(pod, origin) of each job, in the order in which they ran."""
        self._lock = threading.Lock()
        self._url = url
        self._bootstrap_servers = bootstrap_servers

    def make(self, pod: str) -> App:
        """An app that consumes the home topic and has a job type ``work``."""
        app = make_app(
            self._url,
            home=self.home,
            pod=pod,
            kafka_bootstrap_servers=self._bootstrap_servers,
            # None of them dies, however late its heartbeats come.
            stale_after=30.0,
        )

        @app.consumer(self.home, group=self.group)
        def handle(record: Any, connection: Any) -> None: ...

        @app.job()
        def work(job: Job) -> None:
            with self._lock:
                self.runs.append((pod, job.origin))

        return app

    def enqueue(self, connection: Any, times: int = 1) -> None:
        """Enqueue jobs in each origin."""
        work = self.make("outside").jobs["work"]
        for origin in self.origins:
            work.options(origin=origin).enqueue_many(connection, [{}] * times)
        connection.commit()


def read_owners(admin: Any, role: str) -> dict[str, set[str]]:
    """The origins of each pod in a role."""
    rows = admin.execute(
        "select p.pod, array_agg(o.origin) from jobs_lib.origins o"
        " join jobs_lib.processes p on p.id = o.owner where o.role = %s group by 1",
        (role,),
    )
    return {pod: set(origins) for pod, origins in rows.fetchall()}


def read_shares(admin: Any, role: str) -> dict[str, int]:
    """How many origins each pod has in a role."""
    return {pod: len(origins) for pod, origins in read_owners(admin, role).items()}


def await_shares(
    admin: Any, shares: dict[str, int], describe: Callable[[], str] = str
) -> None:
    """Wait until these pods, and no others, have these numbers of origins."""
    wait_for(
        lambda: read_shares(admin, "execute") == shares,
        timeout=60,
        what=lambda: f"{shares}: {read_shares(admin, 'execute')}\n{describe()}",
    )


def await_pods(admin: Any, pods: set[str], origins: int) -> None:
    """Wait until these pods, and no others, share all origins."""

    def shared() -> bool:
        shares = read_shares(admin, "execute")
        return {*shares} == pods and sum(shares.values()) == origins

    wait_for(
        shared,
        timeout=60,
        what=lambda: f"{pods} share all: {read_shares(admin, 'execute')}",
    )


def count_shares(admin: Any, role: str) -> list[int]:
    """How many origins each process has in a role, without processes that have none."""
    rows = admin.execute(
        "select count(*) from jobs_lib.origins"
        " where role = %s and owner is not null group by owner",
        (role,),
    )
    return [count for (count,) in rows]
