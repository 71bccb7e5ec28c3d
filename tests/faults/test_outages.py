"""A database that is away for all pods at once makes none of them count as dead."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest

from jobs_lib.service.service import Service
from tests.support.apps import HOME, heard, make_app, running
from tests.support.proxy import Proxy
from tests.support.standby import Pair

if TYPE_CHECKING:
    from collections.abc import Callable

SHARES = "select count(*) from jobs_lib.origins where owner is not null group by owner"
OWNERS = "select origin, owner, epoch from jobs_lib.origins order by origin"
LEFT = "select count(*) from jobs_lib.jobs"
ENDS = "select distinct outcome, attempt from jobs_lib.history"
pytestmark = pytest.mark.expects("loop.failed")


class Scene:
    """Two pods without Kafka; each has its own way to the database."""

    def __init__(
        self,
        url: str,
        urls: list[str],
        stale_after: float,
        wait_for: Callable[..., object],
    ) -> None:
        self.stale_after = stale_after
        self.url = url
        self.wait_for = wait_for
        self.begun: list[int] = []
        self.gate = threading.Event()
        self.apps = [
            make_app(url, stale_after=stale_after, database_timeout=1, workers=8)
            for url in urls
        ]
        for app in self.apps:

            @app.job()
            def work(job) -> None:
                self.begun.append(job.id)
                assert self.gate.wait(150)

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query, in a session of its own."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(query).fetchall()

    def enqueue(self) -> None:
        """Enqueue one job in each origin."""
        work = self.apps[0].jobs["work"]
        with psycopg.connect(self.url) as connection:
            for origin in HOME:
                work.options(origin=origin).enqueue(connection)


@pytest.mark.guarantee("FP6", "J20", "I7")
def test_an_outage_in_which_all_look_dead_burns_no_attempt_and_moves_nothing(
    url, wait_for
):
    with Proxy.before(url) as one, Proxy.before(url) as other:

        def strike() -> None:
            one.hold()
            other.hold()

        check(
            Scene(url, [one.url(url), other.url(url)], 6.0, wait_for),
            strike,
            one.release,
            other.release,
        )


@pytest.mark.slow
@pytest.mark.guarantee("FP7", "I7")
def test_a_failover_in_which_all_look_dead_burns_no_attempt_and_moves_nothing(wait_for):
    with Pair() as pair, Proxy.before(pair.primary.url) as other:

        def strike() -> None:
            pair.cut_replication()
            pair.primary.process.kill()

        check(
            Scene(pair.url, [pair.url, other.url(pair.url)], 8.0, wait_for),
            strike,
            pair.promote,
            lambda: other.turn(pair.standby.url),
        )


def check(
    scene: Scene,
    strike: Callable[[], object],
    release: Callable[[], object],
    release_other: Callable[[], object],
) -> None:
    """Strike both pods while they run jobs, and let the second one come back last."""
    wait_for = scene.wait_for
    with (
        running(scene.apps[0], "executor") as first,
        running(scene.apps[1], "executor") as second,
    ):
        wait_for(
            lambda: scene.ask(SHARES) == [(8,), (8,)], timeout=60, what="even shares"
        )
        before = scene.ask(OWNERS)
        scene.enqueue()
        wait_for(lambda: len(scene.begun) == len(HOME), timeout=30, what="all run")
        strike()
        struck_at = time.monotonic()
        wait_for(
            lambda: (
                first.process.lease.is_over()
                and second.process.lease.is_over()
                and time.monotonic() - struck_at > scene.stale_after
            ),
            timeout=30,
            what="both look dead",
        )
        release()
        wait_for(
            lambda: not first.process.lease.is_over(), timeout=40, what="one is back"
        )
        # It looks around, and finds that the other one is silent.
        back_at = time.monotonic()
        wait_for(
            lambda: (
                first._owners[0].ownership._source.wanted == {*HOME}
                or time.monotonic() - back_at > 1
            )
        )
        release_other()
        wait_for(
            lambda: not second.process.lease.is_over(),
            timeout=40,
            what="the other one is back",
        )
        scene.gate.set()
        wait_for(lambda: scene.ask(LEFT) == [(0,)], timeout=30, what="all have ended")
        assert scene.ask(OWNERS) == before
    assert scene.ask(ENDS) == [("completed", 1)]
    assert len(scene.begun) == len(HOME)


@pytest.mark.guarantee("J20", "I7")
def test_a_pod_that_waited_for_its_database_does_not_take_silent_owners_for_dead(
    url, admin, wait_for
):
    silent = uuid4()
    admin.execute(
        "insert into jobs_lib.processes (id, pod, roles, host, pid, version,"
        " heartbeat_at) values (%s, 'pod', '{execute}', 'host', 1, '0',"
        " now() - interval '1 minute')",
        (silent,),
    )
    admin.execute(
        "insert into jobs_lib.origins (role, origin, owner, epoch)"
        " values ('execute', 'local/1', %s, 1)",
        (silent,),
    )
    with Proxy.before(url) as proxy:
        proxy.turn("postgresql://127.0.0.1:1/nobody")
        app = make_app(proxy.url(url), stale_after=2)

        @app.job()
        def work(job) -> None: ...

        service = Service(app, ["executor"])
        starting = threading.Thread(target=service.start)
        taken = (
            "select from jobs_lib.origins"
            " where origin = 'local/1' and owner is not null and owner <> %s"
        )
        with heard("loop.failed") as failed:
            starting.start()
            try:
                wait_for(lambda: failed, timeout=30, what="it waits")
                turned_at = time.monotonic()
                proxy.turn(url)
                wait_for(
                    lambda: admin.execute(taken, (silent,)).rowcount,
                    timeout=40,
                    what="it is taken",
                )
                waited = time.monotonic() - turned_at
            finally:
                service.ask_to_stop()
                starting.join()
                service.stop()
    # It may have been about to ask again when the database came back.
    assert waited > 1.9
