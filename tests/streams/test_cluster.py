"""Three nodes of Kafka: what they have acknowledged, and coordinators that move."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib import Published, UnavailableError, UnknownPublishError
from tests.support.apps import make_app, running
from tests.support.beside import Threads
from tests.support.cluster import Cluster
from tests.support.groups import Group
from tests.support.records import produce, read_committed, read_topic
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib import App
    from tests.support.cluster import Node

    Place = tuple[int | None, int | None]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KILLS = 30
MOVING: dict[str, Any] = {"gate_refresh": 0.2, "publish_timeout": 5}
_LONG = 120.0
"""Seconds: a node that was killed is missed after six, and what it led moves then."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The nodes that these tests share; each test starts what it kills."""
    with Cluster() as nodes:
        yield nodes


@pytest.fixture
def make(database_url, cluster) -> Iterator[Callable[..., App]]:
    """A function that makes an app on these nodes."""
    made: list[App] = []

    def make() -> App:
        servers = cluster.bootstrap_servers
        app = make_app(database_url, kafka_bootstrap_servers=servers, **MOVING)
        made.append(app)
        return app

    yield make
    for app in made:
        app.close()


class Callers(Threads):
    """Threads that publish all the time, and note their answers and errors."""

    def __init__(self, stream: Any) -> None:
        self.answers: list[Published] = []
        self.failures: list[Exception] = []
        self.tried: set[tuple[str, int]] = set()
        """The key and value of each event, whatever became of it."""
        self._stream = stream
        super().__init__(partial(self._publish, f"k{n}") for n in range(4))

    def _publish(self, key: str) -> None:
        n = 0
        while not self.stopping.wait(0.005):
            n += 1
            self.tried.add((key, n))
            try:
                self.answers.append(self._stream.publish(key, n))
            except UnavailableError as error:
                self.failures.append(error)


def survive_leader(
    cluster: Cluster, callers: Callers, name: str, *, still: bool = False
) -> tuple[int, int]:
    """Kill the leader of a topic while callers publish, and let them go on.

    With `still`, it stands still instead. Returns how many answers there were before,
    and before some that came when another node led.
    """
    wait_for(lambda: len(callers.answers) > 50, what="some are published")
    leader = cluster.leader_of(name)
    killed = len(callers.answers)
    with cluster.still(leader) if still else cluster.down(leader):
        wait_for(
            lambda: cluster.leader_of(name) is not leader,
            timeout=_LONG,
            what="another node leads",
        )
        moved = len(callers.answers)
        wait_for(
            lambda: len(callers.answers) > moved + 50,
            timeout=_LONG,
            what="it goes on without the leader",
        )
    return killed, moved


def read_log(cluster: Cluster, name: str) -> dict[Place, tuple[str, int]]:
    """The key and value at each place of a topic."""
    return {
        (one.partition, one.offset): (one.key, one.json)
        for one in read_topic(cluster.bootstrap_servers, name)
    }


def is_in(log: dict[Place, tuple[str, int]], answer: Published) -> bool:
    """Whether an answer's event is where it says."""
    found = log.get((answer.partition, answer.offset))
    return found == (answer.key, answer.content)


@pytest.mark.guarantee("T5", "T7")
@pytest.mark.parametrize("still", [False, True], ids=["killed", "still"])
def test_publishing_survives_a_leader_and_what_all_have_acknowledged_is_kept(
    make, cluster, still
):
    name = cluster.create()
    with Callers(make().stream(name, value=int)) as callers:
        survive_leader(cluster, callers, name, still=still)
    log = read_log(cluster, name)
    for answer in callers.answers:
        assert is_in(log, answer)
    # None is there twice, and nothing else.
    assert len({*log.values()}) == len(log)
    assert {*log.values()} <= callers.tried


@pytest.mark.guarantee("T6")
def test_what_the_leader_alone_has_acknowledged_may_be_lost_with_it_and_only_then(
    make, cluster
):
    name = cluster.create()
    with Callers(make().stream(name, value=int, acks=1)) as callers:
        # Readers see what the others have, too.
        seen = wait_for(lambda: read_log(cluster, name), what="some are copied")
        killed, moved = survive_leader(cluster, callers, name)
    log = read_log(cluster, name)
    assert seen.items() <= log.items()
    # Only the last events before its end may be gone: the others had no time for them.
    before = sorted(callers.answers[:killed], key=lambda one: one.offset or 0)
    kept = [is_in(log, one) for one in before]
    assert kept == sorted(kept, reverse=True)
    assert all(is_in(log, one) for one in callers.answers[moved:])
    assert {*log.values()} <= callers.tried


@pytest.mark.guarantee("T6")
def test_what_nobody_has_acknowledged_has_no_place_and_goes_on_without_the_leader(
    make, cluster
):
    name = cluster.create()
    with Callers(make().stream(name, value=int, acks=0)) as callers:
        _, moved = survive_leader(cluster, callers, name)
    assert {one.offset for one in callers.answers} == {None}
    later = {(one.key, one.content) for one in callers.answers[moved:]}
    # Nobody waits until they are there.
    wait_for(
        lambda: later & {*read_log(cluster, name).values()},
        timeout=_LONG,
        what="the next leader has some",
    )
    assert {*read_log(cluster, name).values()} <= callers.tried


@pytest.mark.guarantee("T5", "T14")
def test_with_one_node_of_three_nothing_is_acknowledged(make, cluster, wait_for, admin):
    name = cluster.create()
    stream = make().stream(name, value=int)
    stream.publish("k", 1)
    leader = cluster.leader_of(name)
    others = [node for node in cluster.nodes if node is not leader]
    with cluster.down(*others):
        for request in (None, "r2"):
            with pytest.raises(UnknownPublishError, match="within 5 s"):
                stream.publish("k", 2, request=request)
    admin.execute("update jobs_lib.requests set sent_until = clock_timestamp()")
    answer = stream.publish("k", 2, request="r2")
    stream.publish("k", 3)
    log = read_topic(cluster.bootstrap_servers, name)
    # Of what nobody knew some may be there: once for each that was sent.
    assert [one.json for one in log] in ([1, 2, 3], [1, 2, 2, 3])
    (own,) = [one for one in log if one.headers.get("ce_request") == "r2"]
    assert own.offset == answer.offset


@pytest.fixture
def gated(make, cluster) -> Iterator[Gated]:
    """A consumer behind another group."""
    one = Gated(make(), cluster)
    yield one
    one.before.close()


class Gated:
    """A consumer behind another group, and which records it has handled."""

    def __init__(self, app: App, cluster: Cluster) -> None:
        self.app = app
        self.name = name = cluster.create()
        self.before = Group(cluster.bootstrap_servers)
        self.before.commit_soon(name, {0: 0})
        self.reached = 0
        """The other group's offset."""
        self.handled: list[int] = []
        self.wrong: list[int] = []
        """What was handled before the other group had."""

        @app.consumer(name, group=f"{name}-g", after=[(name, self.before.name)])
        def handle(record, conn) -> None:
            if record.offset >= self.reached:
                self.wrong.append(record.offset)
            self.handled.append(record.offset)

        values = [("k", n) for n in range(40)]
        produce(cluster.bootstrap_servers, name, values)

    def go_on(self, by: Group) -> None:
        """Let the other group handle ten more records, and wait for the consumer."""
        self.reached += 10
        by.commit_soon(self.name, {0: self.reached})
        wait_for(
            lambda: self.handled and max(self.handled) == self.reached - 1,
            timeout=_LONG,
            what=lambda: f"all before {self.reached} are handled: {self.handled[-3:]}",
        )

    def check(self) -> None:
        """All that the other group has handled was handled, and nothing before it."""
        assert self.wrong == []
        assert {*self.handled} == {*range(self.reached)}


def await_move(cluster: Cluster, group: str, gone: Node) -> None:
    """Wait until another node coordinates a group."""
    wait_for(
        lambda: cluster.coordinator_of(group) is not gone,
        timeout=_LONG,
        what="another node coordinates",
    )


@pytest.mark.expects("loop.failed", "origins.lost")
@pytest.mark.guarantee("FK16", "K9")
def test_a_gate_stays_right_while_the_coordinator_moves(gated, cluster):
    before = gated.before
    with running(gated.app, "consumers"):
        for _ in range(2):
            gated.go_on(before)
            coordinator = cluster.coordinator_of(before.name)
            with cluster.down(coordinator):
                await_move(cluster, before.name, coordinator)
                gated.go_on(before)
    gated.check()


@pytest.mark.expects("loop.failed", "origins.lost")
@pytest.mark.guarantee("FK16", "K9")
def test_a_gate_stays_right_while_the_coordinator_stands_still_and_when_it_wakes(
    gated, cluster
):
    name = gated.before.name
    with running(gated.app, "consumers"):
        gated.go_on(gated.before)
        coordinator = cluster.coordinator_of(name)
        with cluster.still(coordinator):
            await_move(cluster, name, coordinator)
            other = Group(cluster.awake_servers, name)
            gated.go_on(other)
        # The node still has the old offset in its memory when it wakes.
        gated.go_on(other)
        other.close()
    gated.check()


@pytest.mark.expects("loop.failed", "origins.lost", "jobs.fenced")
@pytest.mark.guarantee("FK16", "K22")
def test_a_read_model_its_offsets_and_its_done_group_survive_each_node(
    make, cluster, admin, wait_for
):
    name = cluster.create(2)
    servers = cluster.bootstrap_servers
    app = make()
    admin.execute(
        "create table tenants_rm (id text primary key, version bigint, n int)"
    )
    admin.execute("create table effects (n int)")

    @app.read_model(name, table="tenants_rm", key="id", group=f"{name}-m")
    def tenants(record) -> dict[str, Any]:
        return {"n": record.value}

    @app.job()
    def work(job, n: int) -> None:
        with job.transaction() as connection:
            connection.execute("insert into effects values (%s)", (n,))

    @app.consumer(name, group=f"{name}-j", done=True)
    def fan_out(record, conn) -> None:
        work.enqueue(conn, n=record.value)

    sent = 0

    def publish() -> int:
        nonlocal sent
        produce(servers, name, [(f"k{n}", n) for n in range(sent, sent + 20)])
        sent += 20
        return sent

    def is_told() -> bool:
        told = read_committed(servers, f"{name}-j.done", name) or {}
        return sum(told.values()) == sent

    def is_stored() -> bool:
        rows = admin.execute(
            "select consumer_group, sum(next_offset) from jobs_lib.offsets"
            " group by consumer_group"
        )
        return dict(rows.fetchall()) == {f"{name}-m": sent, f"{name}-j": sent}

    def await_all() -> None:
        wait_for(is_stored, timeout=_LONG, what="all records are handled")
        wait_for(is_told, timeout=_LONG, what="the group .done is at the ends")

    with running(app, "consumers", "executor"):
        publish()
        await_all()
        killed: list[Node] = []
        for group in (f"{name}-j.done", f"{name}-m", f"{name}-j"):
            killed.append(cluster.coordinator_of(group))
            with cluster.down(killed[-1]):
                publish()
                await_all()
    assert admin.execute("select count(*), max(n) from tenants_rm").fetchone() == (
        sent,
        sent - 1,
    )
    counts = admin.execute("select count(*), count(distinct n) from effects").fetchone()
    assert counts == (sent, sent)


@pytest.mark.timeout(2_400)
def test_no_process_that_asks_for_members_dies_with_their_coordinator(
    cluster, run_process, wait_for
):
    name = cluster.create()
    servers = cluster.bootstrap_servers
    group = Group(servers)
    group.commit_soon(name, {0: 0})
    askers = [
        run_process("-m", "tests.support.asking", what, servers, name, group.name)
        for what in ("members", "starts")
    ]

    def wait_for_more(more: int) -> None:
        before = [one.lines.count("answered") for one in askers]
        wait_for(
            lambda: all(
                one.lines.count("answered") >= count + more or not one.running
                for one, count in zip(askers, before, strict=True)
            ),
            timeout=_LONG,
            what=lambda: "\n".join(one.output[-2_000:] for one in askers),
        )
        for one in askers:
            assert one.running, one.output[-2_000:]

    for _ in range(KILLS):
        wait_for_more(5)
        coordinator = cluster.coordinator_of(group.name)
        with cluster.down(coordinator):
            await_move(cluster, group.name, coordinator)
            wait_for_more(1)
    group.close()
