"""Every source of ownership keeps the same guarantees."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.coordination import Consumer
from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.settings import Settings
from tests.support.apps import heard, make_app, running
from tests.support.records import produce
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib import Job
    from jobs_lib.coordination import Record

ORIGINS = 12
KINDS = {
    "member": {"kafka"},
    "follow": {"kafka"},
    "database": set(),
    "static": set(),
    "coordination": {"kafka", "log"},
    "member over the log": {"kafka", "log"},
    "follow over the log": {"kafka", "log"},
}
"""The sources, and what each needs."""


class Pods:
    """Pods that own by one kind of source, and the jobs that each has run."""

    def __init__(
        self, url: str, bootstrap_servers: str, home: str, kind: str, log: str
    ) -> None:
        self.home = home
        self.ran: list[tuple[str, str]] = []
        self._kind = kind.split()[0]
        self.is_even = self._kind != "database"
        """Whether each of two pods has a half."""
        self._consumes = self._kind in ("member", "follow")
        self._url = url
        self._settings: dict[str, Any] = {}
        self.log = log if "log" in KINDS[kind] else None
        if "kafka" in KINDS[kind]:
            self._settings["kafka_bootstrap_servers"] = bootstrap_servers
        if "log" in KINDS[kind]:
            self._settings |= {
                "ownership": "coordination",
                "coordination_topic": log,
                # Nor does one count as dead there.
                "coordination_interval": 5.0,
            }
        self._lock = threading.Lock()

    def make(self, pod: str, **settings):
        # None of them dies, however late its heartbeats come.
        settings["stale_after"] = 30.0
        app = make_app(self._url, home=self.home, pod=pod, **self._settings, **settings)

        @app.job()
        def work(job: Job) -> None:
            with self._lock:
                self.ran.append((pod, job.origin))

        if self._consumes:

            @app.consumer(self.home, group=f"{self.home}-g")
            def handle(record, connection) -> None: ...

        return app

    @contextlib.contextmanager
    def running(self, pod: str, wanted: range) -> Iterator[None]:
        """Run a pod; ``wanted`` are the partitions of its list, if it has one."""
        if self._kind == "member":
            with running(self.make(pod), "consumers", "executor"):
                yield
        elif self._kind == "follow":
            with (
                running(self.make(pod), "consumers"),
                running(self.make(pod), "executor", sidecar=True),
            ):
                yield
        elif self._kind in ("database", "coordination"):
            with running(self.make(pod), "executor"):
                yield
        else:
            listed = ",".join(f"{self.home}/{n}" for n in wanted)
            with running(self.make(pod, origins=listed), "executor"):
                yield


class Mailer:
    """A consumer without a database, on the coordination log of the pods."""

    def __init__(self, bootstrap_servers: str, log: str, topic: str) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._topic = topic
        self._sent = 0
        self._handled: list[int] = []
        self.consumer = Consumer(
            Settings(kafka_bootstrap_servers=bootstrap_servers),
            log=log,
            group="shop.mailer",
            client_id="mailer",
            topics=[topic],
            handle=self._handle,
            interval=5.0,
        )

    def check(self) -> None:
        """Send some mails, and see that each mail so far is handled once."""
        mails = range(self._sent, self._sent + 30)
        produce(self._bootstrap_servers, self._topic, ((f"k{n}", n) for n in mails))
        self._sent = mails.stop
        wait_for(
            lambda: len(self._handled) >= self._sent,
            timeout=60,
            what=lambda: f"all mails are handled: {sorted(self._handled)}",
        )
        assert sorted(self._handled) == [*range(self._sent)]

    def _handle(self, records: list[Record]) -> None:
        self._handled += [json.loads(one.value or b"") for one in records]


@pytest.fixture(params=KINDS)
def pods(request, database_url, bootstrap_servers, topic, admin):
    """Pods of one kind, on a home of twelve partitions."""
    home = topic(ORIGINS)
    admin.execute("update jobs_lib.topics set home = false")
    admin.execute(
        "insert into jobs_lib.topics (topic, partitions, home) values (%s, %s, true)",
        (home, ORIGINS),
    )
    log = topic(2, prefix="log", config=WANTED)
    return Pods(database_url, bootstrap_servers, home, request.param, log)


@pytest.fixture
def check_mails(pods, bootstrap_servers, topic) -> Iterator[Callable[[], None]]:
    """A function that checks a service without a database, if there is a log."""
    if pods.log is None:
        yield lambda: None
    else:
        mailer = Mailer(bootstrap_servers, pods.log, topic(4))
        with mailer.consumer:
            yield mailer.check


@pytest.fixture
def owners(admin, pods) -> Callable[[], dict[str, tuple[str, int]]]:
    """A function that returns the owner and the epoch of each origin."""

    def owners() -> dict[str, tuple[str, int]]:
        rows = admin.execute(
            "select o.origin, p.pod, o.epoch from jobs_lib.origins o"
            " join jobs_lib.processes p on p.id = o.owner"
            " where o.role = 'execute' and o.origin like %s || '/%%'",
            (pods.home,),
        )
        return {origin: (pod, epoch) for origin, pod, epoch in rows}

    return owners


@pytest.mark.expects("origins.lost")
@pytest.mark.guarantee("S13", "I11", "I13", "M24")
def test_each_origin_has_one_owner_that_alone_runs_its_jobs(
    pods, owners, admin, wait_for, check_mails
):
    every = [f"{pods.home}/{n}" for n in range(ORIGINS)]

    def await_pods(*names: str) -> dict[str, tuple[str, int]]:
        def shared() -> bool:
            counts = Counter(pod for pod, _ in owners().values())
            # By heartbeats origins of another topic are shared with these.
            even = not pods.is_even or {*counts.values()} == {ORIGINS // len(names)}
            return sum(counts.values()) == ORIGINS and {*counts} == {*names} and even

        wait_for(shared, timeout=60, what=lambda: f"{names} share all: {owners()}")
        return owners()

    def check() -> None:
        found = owners()
        pods.ran.clear()
        admin.execute(
            "insert into jobs_lib.jobs (origin, type, payload)"
            " select origin, 'work', '{}' from unnest(%s::text[]) as o(origin)",
            (every * 3,),
        )
        wait_for(lambda: len(pods.ran) == 3 * ORIGINS, timeout=60, what="all ran")
        assert sorted(pods.ran) == sorted((found[o][0], o) for o in every * 3)
        check_mails()

    with heard("origins.taken") as taken:
        with pods.running("pod-a", range(ORIGINS)):
            first = await_pods("pod-a")
            check()
            with pods.running("pod-b", range(ORIGINS // 2)):
                both = await_pods("pod-a", "pod-b")
                check()
            last = await_pods("pod-a")
            check()
        assert owners() == {}
    # A pod that stays keeps its origins; a moved origin is taken over once each way.
    moved = {origin for origin, (pod, _) in both.items() if pod == "pod-b"}
    for before, after in ((first, both), (both, last)):
        assert {o for o in every if after[o][1] > before[o][1]} == moved
    times = Counter(
        origin
        for _, fields in taken
        if fields["role"] == "execute"
        for origin in fields["origins"]
    )
    assert {o: times[o] for o in every} == {o: 3 if o in moved else 1 for o in every}
