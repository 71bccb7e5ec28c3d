"""Pods share origins over a coordination log, and the epochs guard them."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from jobs_lib import ConfigurationError
from jobs_lib.consuming import commits
from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.errors import FencedError
from jobs_lib.kafka.outside import OutsideCommitter
from jobs_lib.operating.home_topic import declare_topic
from jobs_lib.ownership import Ownership, Process
from jobs_lib.ownership.coordinated import CoordinationSource, name_group
from jobs_lib.service.service import Service
from tests.support.apps import make_app, running
from tests.support.pods import await_shares, read_shares
from tests.support.proxy import Proxy
from tests.support.records import produce, read_committed
from tests.support.topics import create_topic, delete_topics
from tests.support.waiting import linger

if TYPE_CHECKING:
    from jobs_lib import App, Job

pytestmark = pytest.mark.expects("fenced")

INTERVAL = 0.5
CALM = {"coordination_interval": 5.0}
"""Where nobody is to become silent, however busy the machine is."""
LINGER = 1.5
ORIGINS = 16
INSTALLATION = UUID(int=7)
# In the database none of them counts as dead, however late its heartbeats come.
PATIENT = {"stale_after": 60.0}


def over(log: str, servers: str, **settings) -> dict[str, Any]:
    """The settings of a pod that shares over a log."""
    return {
        "kafka_bootstrap_servers": servers,
        "ownership": "coordination",
        "coordination_topic": log,
        "coordination_interval": INTERVAL,
        **settings,
    }


@pytest.fixture
def log(topic) -> str:
    """A coordination log."""
    return topic(2, prefix="log", config=WANTED)


@pytest.fixture
def own_log(own_broker) -> str:
    """A coordination log on the broker that a test may disturb."""
    return own_broker.create(2, WANTED)


@pytest.fixture
def ran() -> list[tuple[str, str]]:
    """The pods that have run a job, with its origin."""
    return []


@pytest.fixture
def make_pod(database_url, ran):
    """A function that makes a pod's app: `make_pod("a", over(log, servers))`."""
    lock = threading.Lock()

    def make(pod: str, settings: dict[str, Any], url: str = database_url) -> App:
        app = make_app(url, pod=pod, **settings)

        @app.job(group="group")
        def work(job: Job, group: str) -> None:
            with lock:
                ran.append((pod, job.origin))

        return app

    return make


@pytest.fixture
def enqueue(connect):
    """A function that enqueues a job in each of many groups."""

    def enqueue(app: App) -> int:
        groups = [{"group": f"g{n}"} for n in range(5 * ORIGINS)]
        with connect() as connection:
            app.jobs["work"].enqueue_many(connection, groups)
        return len(groups)

    return enqueue


def read_epochs(admin) -> dict[str, int]:
    """The epoch of each origin of executors that has an owner."""
    rows = admin.execute(
        "select origin, epoch from jobs_lib.origins"
        " where role = 'execute' and owner is not null"
    )
    return dict(rows.fetchall())


@pytest.mark.guarantee("M24")
@pytest.mark.parametrize(
    "end",
    [
        "kill",
        # The other one ends its sessions if it stands still in a transaction.
        pytest.param("pause", marks=pytest.mark.expects("loop.failed")),
    ],
)
def test_the_origins_of_a_silent_pod_are_taken_over_and_each_job_has_one_effect(
    database_url, log, bootstrap_servers, start_process, admin, connect, wait_for, end
):
    admin.execute("create table effects (n int, job bigint, pod text)")
    settings = over(log, bootstrap_servers, coordination_interval=1.0)

    def start(pod: str):
        return start_process("effects", database_url, pod=pod, **settings)

    def enqueue(first: int) -> None:
        app = make_app(database_url)

        @app.job(group="group")
        def work(job, n: int, group: str) -> None: ...

        with connect() as connection:
            work.enqueue_many(
                connection,
                [{"n": n, "group": f"g{n}"} for n in range(first, first + 80)],
            )

    def await_effects(count: int) -> list[tuple[int, str]]:
        read = "select n, pod from effects order by n"
        wait_for(
            lambda: len(admin.execute(read).fetchall()) >= count,
            timeout=60,
            what=lambda: f"{count} effects\n{first.output}\n{second.output}",
        )
        return admin.execute(read).fetchall()

    first, second = start("pod-a"), start("pod-b")
    await_shares(admin, {"pod-a": 8, "pod-b": 8})
    enqueue(0)
    assert {pod for _, pod in await_effects(80)} == {"pod-a", "pod-b"}
    getattr(first, end)()
    await_shares(admin, {"pod-b": 16})
    enqueue(80)
    found = await_effects(160)
    assert {pod for n, pod in found if n >= 80} == {"pod-b"}
    if end == "pause":
        first.resume()
        await_shares(admin, {"pod-a": 8, "pod-b": 8})
        enqueue(160)
        found = await_effects(240)
    assert [n for n, _ in found] == [*range(len(found))]


@pytest.mark.guarantee("M24", "I4")
@pytest.mark.expects("loop.failed")
def test_a_pod_that_loses_kafka_alone_is_replaced_while_it_is_seen_in_the_database(
    make_pod, own_broker, own_log, admin, enqueue, ran, wait_for
):
    cut_off = make_pod("cut off", over(own_log, own_broker.proxied, **PATIENT))
    other = make_pod("other", over(own_log, own_broker.bootstrap_servers, **PATIENT))
    with running(cut_off, "executor"), running(other, "executor"):
        await_shares(admin, {"cut off": 8, "other": 8})
        own_broker.proxy.hold()
        await_shares(admin, {"other": 16})
        count = enqueue(other)
        wait_for(lambda: len(ran) == count, timeout=60, what="all have run")
        assert {pod for pod, _ in ran} == {"other"}
        own_broker.proxy.release()
        await_shares(admin, {"cut off": 8, "other": 8})


@pytest.mark.slow
@pytest.mark.guarantee("M24", "FK7")
@pytest.mark.expects("loop.failed", "origins.lost")
def test_pods_go_on_while_nobody_reaches_kafka(
    make_pod, own_broker, own_log, admin, enqueue, ran, wait_for
):
    app = make_pod("pod-a", over(own_log, own_broker.bootstrap_servers))
    other = make_pod("pod-b", over(own_log, own_broker.bootstrap_servers))
    with running(app, "executor"), running(other, "executor"):
        await_shares(admin, {"pod-a": 8, "pod-b": 8})
        with own_broker.down():
            # By their own clocks all are silent in the log for long.
            linger(4 * INTERVAL)
            count = enqueue(app)
            wait_for(lambda: len(ran) == count, timeout=30, what="all have run")
        await_shares(admin, {"pod-a": 8, "pod-b": 8})
        assert len(ran) == count


@pytest.mark.guarantee("M24")
@pytest.mark.expects("loop.failed", "origins.lost")
def test_a_pod_that_loses_the_database_leaves_its_origins_to_others(
    make_pod, database_url, log, bootstrap_servers, admin
):
    quick = {"give_up_after": 2.0, "database_timeout": 1.0}
    with Proxy.before(database_url) as proxy:
        settings = over(log, bootstrap_servers, **quick)
        cut_off = make_pod("cut off", settings, proxy.url(database_url))
        other = make_pod("other", over(log, bootstrap_servers))
        with running(cut_off, "executor"), running(other, "executor"):
            await_shares(admin, {"cut off": 8, "other": 8})
            proxy.hold()
            await_shares(admin, {"other": 16})
            proxy.release()
            await_shares(admin, {"cut off": 8, "other": 8})


@pytest.mark.guarantee("M24")
def test_a_pod_that_shares_over_the_log_takes_nothing_from_one_that_does_not(
    make_pod, log, bootstrap_servers, admin
):
    before = make_pod("before", PATIENT)
    after = make_pod("after", over(log, bootstrap_servers, **PATIENT, **CALM))
    with running(before, "executor"):
        await_shares(admin, {"before": 16})
        epochs = read_epochs(admin)
        with running(after, "executor"):
            await_shares(admin, {"before": 8, "after": 8})
            linger(LINGER)
            assert read_shares(admin, "execute") == {"before": 8, "after": 8}
            assert sum(read_epochs(admin)[one] == epochs[one] for one in epochs) == 8
        await_shares(admin, {"before": 16})


@pytest.mark.guarantee("M24")
def test_a_consumer_over_the_log_takes_nothing_from_a_group_of_kafka(
    make_pod, log, bootstrap_servers, topic, admin, wait_for
):
    name = topic(4)
    role = f"consume:{name}-g"

    def declare(app: App) -> App:
        @app.consumer(name, group=f"{name}-g")
        def handle(record, connection) -> None: ...

        return app

    def await_owner(pod: str) -> None:
        wait_for(lambda: read_shares(admin, role) == {pod: 4}, timeout=60, what=pod)

    settings = {"kafka_bootstrap_servers": bootstrap_servers, **PATIENT}
    before = declare(make_pod("before", settings))
    sharing = over(log, bootstrap_servers, **PATIENT, **CALM)
    after = declare(make_pod("after", sharing))
    with contextlib.ExitStack() as later:
        with running(before, "consumers"):
            await_owner("before")
            service = later.enter_context(running(after, "consumers"))
            member = service._owners[0].member
            assert member is not None
            wait_for(lambda: len(member._assigned) == 4, what="the log gives it all")
            linger(LINGER)
            assert read_shares(admin, role) == {"before": 4}
        await_owner("after")


@pytest.mark.slow
@pytest.mark.guarantee("M24")
@pytest.mark.expects("loop.failed")
def test_a_group_goes_on_without_a_topic_that_is_made_later(
    make_pod, log, bootstrap_servers, topic, kafka_admin, wait_for
):
    name = topic(1)
    late = f"{name}-late"
    app = make_pod("pod", over(log, bootstrap_servers, **PATIENT, **CALM))
    handled: list[str] = []

    @app.consumer(name, group=f"{name}-g")
    def handle(record, connection) -> None:
        handled.append(record.topic)

    @app.consumer(late, group=f"{name}-g")
    def handle_late(record, connection) -> None:
        handled.append(record.topic)

    declare_topic(app, late, partitions=1)
    produce(bootstrap_servers, name, [("k", 1)])
    with running(app, "consumers"):
        wait_for(lambda: handled == [name], timeout=60, what="it is handled")
        try:
            create_topic(kafka_admin, late, 1)
            produce(bootstrap_servers, late, [("k", 1)])
            wait_for(lambda: handled == [name, late], timeout=60, what="both are")
        finally:
            delete_topics(kafka_admin, [late])


@pytest.mark.guarantee("M24")
def test_an_offset_that_somebody_else_commits_for_the_group_is_replaced(
    make_pod, log, bootstrap_servers, topic, monkeypatch, wait_for
):
    name = topic(1)
    app = make_pod("pod", over(log, bootstrap_servers, **PATIENT, **CALM))

    @app.consumer(name, group=f"{name}-g")
    def handle(record, connection) -> None: ...

    def is_told() -> bool:
        return read_committed(bootstrap_servers, f"{name}-g", name) == {0: 5}

    monkeypatch.setattr(commits, "_AGAIN", 0.5)
    produce(bootstrap_servers, name, [("k", n) for n in range(5)])
    with running(app, "consumers"):
        wait_for(is_told, timeout=60, what="Kafka has it")
        # As a process that stood still does, or Kafka's own tool.
        late = OutsideCommitter(app.settings, f"{name}-g")
        for offset in (2, 9):
            late.commit({(name, 0): offset})
            wait_for(is_told, timeout=30, what="Kafka has it again")
        late.close()


def test_jobs_of_origins_that_nobody_declared_run_too(
    make_pod, log, bootstrap_servers, admin, ran, wait_for
):
    with running(make_pod("pod-a", over(log, bootstrap_servers)), "executor"):
        admin.execute(
            "insert into jobs_lib.jobs (origin, type, payload)"
            """ values ('gone/3', 'work', '{"group": "g"}')"""
        )
        wait_for(lambda: ran == [("pod-a", "gone/3")], what="it has run")


class Slow:
    """A holder whose work ends when a test says so."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.releasing: list[frozenset[str]] = []

    def take(self, origins) -> None: ...

    def release(self, origins, timeout) -> None:
        self.releasing.append(origins)
        self.may_end.wait(timeout)


@pytest.fixture
def own(database, log, bootstrap_servers):
    """A function that starts an owner: `own("a")` returns its source and its holder."""
    with contextlib.ExitStack() as running:

        def start(client_id: str, origins: int = 4, **more):
            settings = make_app(
                database.url,
                **over(log, bootstrap_servers, handover_timeout=60.0, **CALM),
            ).settings
            process = Process(database, client_id, ["relay"], 0.2, stale_after=60.0)
            source = CoordinationSource(
                settings,
                name_group(INSTALLATION, "relay"),
                client_id,
                lambda: [f"shard/{n}" for n in range(origins)],
                **more,
            )
            holder = Slow()
            ownership = Ownership(
                database,
                process,
                "relay",
                source,
                holder,
                interval=0.1,
                stale_after=60.0,
                handover_timeout=60.0,
            )
            for part in (process, ownership):
                part.start()
                running.callback(part.stop)
            running.callback(holder.may_end.set)
            return source, holder

        yield start


@pytest.mark.guarantee("M24", "I4")
def test_an_origin_is_released_in_the_log_once_it_is_handed_over(own, admin, wait_for):
    first, holder = own("a")
    wait_for(lambda: len(first.wanted) == 4, what="the first one has all")
    holder.may_end.clear()
    second, _ = own("b")
    wait_for(lambda: holder.releasing, what="the first one hands over")
    linger(LINGER)
    assert not second.wanted
    assert read_shares(admin, "relay")["a"] == 4
    holder.may_end.set()
    wait_for(
        lambda: read_shares(admin, "relay") == {"a": 2, "b": 2},
        what=lambda: f"they share: {read_shares(admin, 'relay')}",
    )
    assert not first.wanted & second.wanted


def test_an_origin_that_is_shared_no_more_is_given_up(own, admin, wait_for):
    source, _ = own("a")
    wait_for(lambda: len(source.wanted) == 4, what="it has all")
    source._find = lambda: ["shard/0", "shard/9"]
    wait_for(lambda: source.wanted == {"shard/0", "shard/9"}, what="it has the others")
    wait_for(lambda: read_shares(admin, "relay") == {"a": 2}, what="it owns them")


@pytest.mark.guarantee("M11")
@pytest.mark.expects("loop.failed")
def test_a_second_pod_of_one_name_stops_and_names_the_setting(
    make_pod, log, bootstrap_servers, admin, wait_for
):
    settings = over(log, bootstrap_servers, **PATIENT)
    with running(make_pod("pod-a", settings), "executor"):
        await_shares(admin, {"pod-a": 16})
        epochs = read_epochs(admin)
        second = Service(make_pod("pod-a", settings), ("executor",))
        second.start()
        try:
            wait_for(lambda: second.failure is not None, what="the second one fails")
        finally:
            second.stop()
        assert isinstance(second.failure, FencedError)
        assert "JOBS_LIB_POD" in str(second.failure)
        assert read_epochs(admin) == epochs


@pytest.mark.guarantee("M21")
def test_a_service_whose_log_is_missing_or_loses_records_does_not_start(
    make_pod, bootstrap_servers, kafka_admin, topic, database_url
):
    def refuse(settings: dict[str, Any]) -> str:
        service = Service(make_pod("pod-a", settings), ("executor",))
        with pytest.raises(ConfigurationError) as error:
            service.start()
        return str(error.value)

    told = refuse(over("nowhere", bootstrap_servers))
    assert "'nowhere' does not exist" in told
    assert "kafka-topics.sh --create" in told
    plain = topic(2, prefix="log")
    assert "message.timestamp.type=LogAppendTime" in refuse(
        over(plain, bootstrap_servers)
    )
    told = refuse(over("somewhere", ""))
    assert "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS" in told


def test_a_group_is_of_one_role_of_one_database():
    assert name_group(INSTALLATION, "relay") == f"jobs_lib-{INSTALLATION}.relay"
    names = {
        name_group(INSTALLATION, f"execute:{app}")
        for app in ("my app", "my.app", "my%20app", "my..app", "my-app")
    }
    assert len(names) == 5
    with pytest.raises(ConfigurationError, match="200 characters"):
        name_group(INSTALLATION, "execute:" + 200 * "x")


@pytest.mark.guarantee("M24", "S8")
def test_each_record_is_applied_once_while_consumers_come_and_are_killed(
    database_url, log, bootstrap_servers, topic, start_process, admin, wait_for
):
    name = topic(6)
    admin.execute("create table sums (partition int primary key, n bigint)")
    settings = over(log, bootstrap_servers, coordination_interval=1.0)
    sent = itertools.count(1)

    def start(pod: str):
        return start_process("sums", database_url, topic=name, pod=pod, **settings)

    def await_owners(shares: dict[str, int]) -> None:
        wait_for(
            lambda: read_shares(admin, f"consume:{name}-g") == shares,
            timeout=60,
            what=lambda: (
                f"{shares}: {read_shares(admin, f'consume:{name}-g')}\n"
                + "\n".join(one.output for one in pods)
            ),
        )

    def send(count: int) -> None:
        values = [next(sent) for _ in range(count)]
        produce(bootstrap_servers, name, [(f"k{n}", n) for n in values])

    def await_sum(count: int) -> None:
        wanted = count * (count + 1) // 2
        read = "select coalesce(sum(n), 0)::bigint from sums"
        wait_for(
            lambda: admin.execute(read).fetchone()[0] >= wanted,
            timeout=60,
            what=lambda: "\n".join(one.output for one in pods),
        )
        assert admin.execute(read).fetchone() == (wanted,)

    send(200)
    pods = [start("pod-a")]
    await_owners({"pod-a": 6})
    await_sum(200)
    pods.append(start("pod-b"))
    send(200)
    await_owners({"pod-a": 3, "pod-b": 3})
    await_sum(400)
    send(200)
    pods[0].kill()
    await_owners({"pod-b": 6})
    send(200)
    await_sum(800)
    # Lag tools and gates read the group's offsets in Kafka.
    stored = dict(
        admin.execute("select partition, next_offset from jobs_lib.offsets").fetchall()
    )
    wait_for(
        lambda: read_committed(bootstrap_servers, f"{name}-g", name) == stored,
        what="Kafka has the offsets",
    )
    pods[1].signal(signal.SIGTERM)
    assert pods[1].wait() == 0
    assert read_shares(admin, f"consume:{name}-g") == {}
