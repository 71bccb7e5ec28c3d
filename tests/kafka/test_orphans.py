"""Jobs in origins that Kafka assigns to no pod still run."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import pytest

from jobs_lib.ownership import Process, orphans
from tests.support.apps import make_app, running
from tests.support.topics import delete_topics

if TYPE_CHECKING:
    from jobs_lib import Job

pytestmark = pytest.mark.expects("fenced")


@pytest.fixture
def home(topic):
    """The topic that the service consumes."""
    return topic(2)


@pytest.fixture
def ran():
    """The pod and the origin of each job that has run."""
    return []


@pytest.fixture
def make(database_url, bootstrap_servers, home, ran):
    """A function that makes the app of a pod."""
    lock = threading.Lock()

    def make(pod: str, consumed: str = home, name: str = "test"):
        app = make_app(
            database_url,
            name=name,
            home=home,
            pod=pod,
            kafka_bootstrap_servers=bootstrap_servers,
            # None of them dies, however late its heartbeats come.
            stale_after=30.0,
        )

        @app.consumer(consumed, group=f"{consumed}-g")
        def handle(record, connection) -> None: ...

        @app.job(name="work" if name == "test" else f"work_of_{name}")
        def work(job: Job) -> None:
            with lock:
                ran.append((pod, job.origin))

        return app

    return make


def enqueue(admin, *origins: str, type: str = "work") -> None:
    admin.execute(
        "insert into jobs_lib.jobs (origin, type, payload)"
        " select origin, %s, '{}' from unnest(%s::text[]) as o(origin)",
        (type, list(origins)),
    )


@pytest.mark.guarantee("FK8")
@pytest.mark.parametrize("sidecar", [False, True], ids=["member", "sidecar"])
def test_origins_of_topics_that_are_not_consumed_are_shared(
    make, ran, home, admin, wait_for, sidecar
):
    gone = [f"no-such-topic/{n}" for n in range(20)]
    with contextlib.ExitStack() as running_pods:
        for app in (make("pod-a"), make("pod-b")):
            if sidecar:
                running_pods.enter_context(running(app, "consumers"))
                running_pods.enter_context(running(app, "executor", sidecar=True))
            else:
                running_pods.enter_context(running(app, "consumers", "executor"))
        enqueue(admin, f"{home}/0", f"{home}/1", *gone)
        wait_for(
            lambda: not admin.execute("select from jobs_lib.jobs").rowcount,
            timeout=40,
            what=lambda: f"all have run: {ran}",
        )
    assert sorted(origin for _, origin in ran) == sorted(
        [f"{home}/0", f"{home}/1", *gone]
    )
    assert {pod for pod, origin in ran if origin in gone} == {"pod-a", "pod-b"}


@pytest.mark.guarantee("FK8", "J40")
def test_an_app_runs_its_jobs_in_origins_that_another_one_follows(
    make, topic, ran, admin, home, wait_for
):
    with (
        running(make("pod-a"), "consumers", "executor"),
        running(make("pod-b", topic(1), name="other"), "consumers", "executor"),
    ):
        enqueue(admin, f"{home}/0", f"{home}/1")
        enqueue(admin, f"{home}/0", f"{home}/1", type="work_of_other")
        wait_for(
            lambda: not admin.execute("select from jobs_lib.jobs").rowcount,
            timeout=40,
            what=lambda: f"all have run: {ran}",
        )
    assert sorted(ran) == [
        (pod, f"{home}/{n}") for pod in ("pod-a", "pod-b") for n in range(2)
    ]


@pytest.mark.guarantee("FK8", "FK7")
def test_other_pods_leave_a_sidecar_the_origins_that_it_follows(
    make, topic, ran, admin, wait_for
):
    mine, theirs = topic(8), topic(1)
    orphans = [f"no-such-topic/{n}" for n in range(20)]
    followed = make("pod-a", mine)
    with (
        running(make("pod-b", theirs), "consumers", "executor"),
        running(followed, "executor", sidecar=True),
    ):
        # Its group has no member: the sidecar owns none of these.
        enqueue(admin, *(f"{mine}/{n}" for n in range(8)), *orphans)
        wait_for(
            lambda: {origin for _, origin in ran} == {*orphans},
            timeout=40,
            what=lambda: f"both have had their share of the orphans: {ran}",
        )
        with running(followed, "consumers"):
            wait_for(
                lambda: not admin.execute("select from jobs_lib.jobs").rowcount,
                timeout=40,
                what=lambda: f"all have run: {ran}",
            )
    assert {pod for pod, origin in ran if origin in orphans} == {"pod-a", "pod-b"}
    assert {pod for pod, origin in ran if origin not in orphans} == {"pod-a"}


@pytest.mark.slow
@pytest.mark.expects("loop.failed", "origins.lost")
@pytest.mark.guarantee("FK8")
def test_jobs_of_a_topic_that_is_deleted_run_and_those_of_the_others_stay(
    make, ran, home, admin, kafka_admin, wait_for, monkeypatch
):
    monkeypatch.setattr(orphans, "_ASK_EVERY", 0.2)
    with running(make("pod-a"), "consumers", "executor"):
        enqueue(admin, f"{home}/7")
        # Kafka has two partitions, and reports this twice.
        wait_for(lambda: ran == [("pod-a", f"{home}/7")], what="it has run")
        delete_topics(kafka_admin, [home])
        wait_for(
            lambda: (
                not admin.execute(
                    "select from jobs_lib.origins where role = 'execute'"
                    " and origin = %s and owner is not null",
                    (f"{home}/0",),
                ).rowcount
            ),
            timeout=40,
            what="its partitions are given back",
        )
        enqueue(admin, f"{home}/0")
        wait_for(
            lambda: ran[1:] == [("pod-a", f"{home}/0")],
            timeout=40,
            what=lambda: f"the job has run: {ran}",
        )


def test_origins_of_known_topics_become_no_orphans_while_kafka_does_not_answer(
    database_url, admin
):
    app = make_app(database_url, kafka_bootstrap_servers="127.0.0.1:1")
    database = app.database()
    process = Process(database, "pod-a", ["execute"], 1.0)
    source = orphans.OrphanSource(database, process, app.settings, {"orders"})
    enqueue(admin, "orders/0", "other/0")
    with database.connect("test") as connection:
        assert source._find(connection) == ["other/0"]


def test_an_origin_that_no_partition_is_called_is_an_orphan(database_url, admin):
    app = make_app(database_url, kafka_bootstrap_servers="127.0.0.1:1")
    database = app.database()
    process = Process(database, "pod-a", ["execute"], 1.0)
    source = orphans.OrphanSource(database, process, app.settings, {"orders"})
    enqueue(admin, "orders/7", "orders/007")
    with database.connect("test") as connection:
        assert source._find(connection) == ["orders/007"]
