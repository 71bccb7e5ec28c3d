"""A pod joins its group by any protocol, under its own name, and leaves in time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.service.supervisor import FAILED
from tests.support.apps import heard, make_app, running
from tests.support.proxy import Proxy
from tests.support.records import produce

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib import Job
    from tests.support import Worker

pytestmark = pytest.mark.expects("fenced")

PARTITIONS = 6
PROTOCOLS: dict[str, dict[str, Any]] = {
    "range": {"assignment_strategy": "range"},
    "cooperative": {"assignment_strategy": "cooperative-sticky"},
    "consumer": {"group_protocol": "consumer"},
    "log": {"ownership": "coordination", "coordination_interval": 2.0},
    "log of consumer": {
        "ownership": "coordination",
        "coordination_interval": 2.0,
        "group_protocol": "consumer",
    },
}


@pytest.fixture
def home(topic):
    """A topic of six partitions."""
    return topic(PARTITIONS)


@pytest.fixture
def make(database_url, bootstrap_servers, home):
    """A function that makes the app of a pod; the app notes its handled records."""

    def make(pod: str, *, url: str = database_url, **settings):
        app = make_app(
            url,
            home=home,
            pod=pod,
            kafka_bootstrap_servers=bootstrap_servers,
            **settings,
        )

        @app.consumer(home, group=f"{home}-g")
        def handle(record, connection) -> None:
            connection.execute("insert into handled values (%s)", (record.value,))

        @app.job()
        def work(job: Job) -> None: ...

        return app

    return make


@pytest.fixture
def owned(admin):
    """A function that counts the origins that each pod consumes and executes."""

    def owned(role: str) -> dict[str, int]:
        rows = admin.execute(
            "select p.pod, count(*) from jobs_lib.origins o"
            " join jobs_lib.processes p on p.id = o.owner"
            " where split_part(o.role, ':', 1) = %s group by 1",
            (role,),
        )
        return dict(rows.fetchall())

    return owned


@pytest.fixture
def await_owned(owned, wait_for):
    """A function that waits until each pod has this many origins in both roles."""

    def await_owned(expected: dict[str, int], timeout: float = 60) -> None:
        wait_for(
            lambda: owned("consume") == owned("execute") == expected,
            timeout=timeout,
            what=lambda: f"{expected}: {owned('consume')}, {owned('execute')}",
        )

    return await_owned


def send_all(bootstrap_servers: str, home: str, first: int) -> range:
    """Send twenty numbered records to the topic."""
    numbers = range(first, first + 20)
    produce(bootstrap_servers, home, [(f"k{n}", str(n)) for n in numbers])
    return numbers


@pytest.mark.guarantee("S18", "FK2", "M24")
@pytest.mark.parametrize(
    "static",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["dynamic", "static"],
)
@pytest.mark.parametrize(
    "protocol",
    [
        "range",
        "cooperative",
        pytest.param("consumer", marks=pytest.mark.slow),
        "log",
        pytest.param("log of consumer", marks=pytest.mark.slow),
    ],
)
def test_partitions_move_by_any_protocol_and_each_record_is_handled_once(
    make, home, admin, await_owned, bootstrap_servers, topic, wait_for, protocol, static
):
    admin.execute("create table handled (n int)")
    settings = {**PROTOCOLS[protocol], "static_membership": static}
    if "ownership" in settings:
        settings["coordination_topic"] = topic(2, prefix="log", config=WANTED)

    def handled() -> list[int]:
        rows = admin.execute("select n from handled order by n")
        return [row[0] for row in rows]

    with running(make("pod-a", **settings), "consumers", "executor"):
        await_owned({"pod-a": 6})
        with running(make("pod-b", **settings), "consumers", "executor"):
            await_owned({"pod-a": 3, "pod-b": 3})
            send_all(bootstrap_servers, home, 0)
            wait_for(
                lambda: handled() == [*range(20)], timeout=60, what="all were handled"
            )
        # A member that does not leave is missed only after the session timeout.
        await_owned({"pod-a": 6}, timeout=60)
        send_all(bootstrap_servers, home, 20)
        wait_for(lambda: handled() == [*range(40)], timeout=60, what="all were handled")


@pytest.fixture
def start_static(
    database_url, bootstrap_servers, home, start_process, owned, wait_for
) -> Callable[..., Worker]:
    """A function that starts `pod-a` as a static member, and waits until it has all."""

    def start(*, waits: bool = True, **settings: Any) -> Worker:
        worker: Worker = start_process(
            "pod",
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            home=home,
            pod="pod-a",
            probes_port=0,
            static_membership=True,
            **settings,
        )
        if waits:
            wait_for(
                lambda: owned("consume") == {"pod-a": 6},
                timeout=60,
                what=lambda: f"it has all\n{worker.output}",
            )
        return worker

    return start


@pytest.mark.expects("loop.failed", "origins.lost")
@pytest.mark.guarantee("FK5")
def test_a_pod_stops_with_the_reason_when_another_takes_its_name(
    start_static, owned, wait_for
):
    first, second = start_static(), start_static(waits=False)
    assert first.wait(timeout=60) == FAILED
    assert "give each pod its own JOBS_LIB_POD" in first.output
    wait_for(
        lambda: owned("consume") == {"pod-a": 6},
        timeout=60,
        what=lambda: f"the other has all\n{second.output}",
    )
    assert second.running


@pytest.mark.slow
@pytest.mark.expects("loop.failed", "origins.lost")
@pytest.mark.guarantee("FK2")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_pod_that_was_killed_gets_its_name_back(start_static, wait_for, protocol):
    first = start_static(group_protocol=protocol)
    first.kill()
    second = start_static(waits=False, group_protocol=protocol)
    wait_for(
        lambda: not second.running or "origins.taken" in second.output,
        timeout=120,
        what=lambda: f"the next one has all\n{second.output}",
    )
    assert second.running, second.output
    is_waiting = "is still a member of the group" in second.output
    assert is_waiting is (protocol == "consumer"), second.output


@pytest.mark.expects("jobs.fenced", "loop.failed", "origins.lost")
@pytest.mark.guarantee("FK19")
def test_a_pod_that_loses_the_database_alone_leaves_its_partitions_to_others(
    make, database_url, admin, await_owned, wait_for
):
    quick = {"give_up_after": 2.0, "database_timeout": 1.0}
    with (
        Proxy.before(database_url) as proxy,
        running(make("pod-a", **quick), "consumers", "executor"),
        running(
            make("pod-b", url=proxy.url(database_url), **quick), "consumers", "executor"
        ),
        heard("origins.taken") as taken,
    ):
        await_owned({"pod-a": 3, "pod-b": 3})
        # Its threads tell of what they have taken only after the database has it.
        shares = admin.execute(
            "select o.role, array_agg(origin order by origin) from jobs_lib.origins o"
            " join jobs_lib.processes p on p.id = owner where pod = 'pod-b' group by 1"
        ).fetchall()
        assert len(shares) == 2
        wait_for(
            lambda: (
                {(role, tuple(origins)) for role, origins in shares}
                <= {(one["role"], tuple(one["origins"])) for _, one in taken}
            ),
            what=lambda: f"{shares} are told: {taken}",
        )
        taken.clear()
        proxy.hold()
        await_owned({"pod-a": 6})
        # Three move for each role, and none that the other pod did not have.
        wait_for(
            lambda: len(taken) == 2, timeout=60, what=lambda: f"both are taken: {taken}"
        )
        assert [len(fields["origins"]) for _, fields in taken] == [3, 3]
        proxy.release()
        await_owned({"pod-a": 3, "pod-b": 3})


@pytest.mark.slow
@pytest.mark.guarantee("FK4")
def test_a_handler_that_is_busy_for_long_does_not_cost_the_pod_its_partitions(
    make, home, admin, await_owned, bootstrap_servers, wait_for
):
    admin.execute("create table handled (n int)")
    interval = 6.0
    app = make("pod-a", kafka={"max.poll.interval.ms": str(int(interval * 1000))})
    busy, done = threading.Event(), threading.Event()

    @app.job()
    def spin(job: Job) -> None:
        busy.set()
        until = time.monotonic() + 3 * interval
        while time.monotonic() < until:
            pass
        done.set()

    with (
        heard("origins.lost") as lost,
        heard("origins.released") as released,
        running(app, "consumers", "executor"),
    ):
        await_owned({"pod-a": 6})
        with app.transaction() as connection:
            spin.enqueue(connection)
        wait_for(busy.is_set, what="it spins")
        # The handler of one record also waits for a lock for this long.
        with app.transaction() as connection:
            connection.execute("lock table handled in exclusive mode")
            send_all(bootstrap_servers, home, 0)
            assert done.wait(10 * interval)
        wait_for(
            lambda: admin.execute("select count(*) from handled").fetchone()[0] == 20,
            what="all were handled",
        )
        assert not lost
        assert not released
    epochs = admin.execute("select distinct epoch from jobs_lib.origins").fetchall()
    assert epochs == [(1,)]
