"""Events are processed with effects once, in order, and entities by themselves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.operating.rewinds import rewind
from tests.support.apps import count, running
from tests.support.pods import count_shares
from tests.support.processes.processors import (
    CHAIN,
    JOB_STEPS,
    PARTS,
    TENANTS,
    declare_chain,
    declare_parts,
    declare_registration,
)
from tests.support.processes.publishers import STEPS
from tests.support.provider import Provider, providing
from tests.support.records import key_of, produce, read_committed

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.expects("fenced", "loop.failed")

KEYS = [key_of(partition, 2) for partition in range(2)]
CHAIN_STEPS = [
    "records.applied",
    "records.committed",
    "completing",
    "completed",
    *STEPS,
]
"""From the pending event to its outcome."""
QUICKLY = {"sent"}


@pytest.fixture
def provider() -> Iterator[Provider]:
    """The provider that handlers call."""
    with providing() as provider:
        yield provider


def end_senders_time(admin) -> None:
    """Let the time of all senders be over."""
    admin.execute("update jobs_lib.requests set sent_until = clock_timestamp()")


@pytest.mark.expects("origins.lost")  # it is set back
@pytest.mark.guarantee("T4", "T11", "T16")
@pytest.mark.parametrize(
    "by_job",
    [
        pytest.param(False, id="inline"),
        pytest.param(True, marks=pytest.mark.slow, id="by a job"),
    ],
)
def test_a_tenant_is_registered_once_when_the_process_dies_before_the_call_ends(
    start_process, database_url, own_broker, make, admin, provider, name, wait_for,
    await_read, database, by_job,
):  # fmt: skip
    admin.execute(TENANTS)
    app = make(heartbeat_interval=0.3, stale_after=5.0)
    app.stream(name).publish(KEYS[0], {}, request="r1")
    provider.may_answer.clear()
    worker = start_process(
        "registers",
        database_url,
        kafka_bootstrap_servers=own_broker.bootstrap_servers,
        topic=name,
        provider=provider.address,
        by_job=by_job,
    )
    wait_for(lambda: provider.calls, timeout=30, what="the provider is called")
    group = f"{name}.done" if by_job else name
    # The other partition may have been committed, at its start.
    committed = read_committed(own_broker.bootstrap_servers, group, name) or {}
    assert not committed.get(0)
    worker.kill()
    provider.may_answer.set()
    # The event is in the log once more, as after a failover of the database.
    produce(
        own_broker.bootstrap_servers,
        name,
        [(KEYS[0], {})],
        headers={"ce_request": "r1"},
    )
    declare_registration(app, name, provider.address, by_job=by_job)
    with running(app, "consumers", "executor"):
        await_read(name, name)
        wait_for(lambda: not count(admin, "jobs"), timeout=60, what="the jobs are done")
        before = len(provider.calls)
        # The first call died with its process; each of both events has made another.
        assert before >= 3
        rewind(database, name, name, {0: 0})
        app.streams[name].publish(KEYS[0], {"is": "the end"}, request="r2")
        await_read(name, name)
        wait_for(
            lambda: len(provider.calls) >= before + 3 and not count(admin, "jobs"),
            timeout=60,
            what="all calls are made again",
        )
    assert admin.execute("select id from tenants").fetchall() == [(KEYS[0],)]
    # One for each of both requests.
    assert provider.ledger == [KEYS[0]] * 2


@pytest.mark.guarantee("T16")
def test_what_is_done_if_an_event_creates_is_done_once(
    make, own_broker, admin, provider, name, wait_for, await_read
):
    admin.execute(TENANTS)
    app = make()
    app.stream(name)
    called: list[str] = []

    @app.job(group="tenant")
    def welcome(job, tenant: str) -> None:
        called.append(tenant)

    @app.consumer(name, group=name)
    def create(record, conn) -> None:
        text = "insert into tenants values (%s) on conflict do nothing"
        if conn.execute(text, [record.key]).rowcount:
            welcome.enqueue(conn, tenant=record.key)

    events: list[tuple[str | None, Any]] = [(key, {}) for key in KEYS * 3]
    produce(own_broker.bootstrap_servers, name, events, headers={"ce_request": "r1"})
    with running(app, "consumers", "executor"):
        await_read(name, name)
        wait_for(lambda: not count(admin, "jobs"), timeout=60, what="the jobs are done")
    assert sorted(called) == sorted(KEYS)


@pytest.mark.guarantee("T9")
def test_two_changes_of_an_entity_are_never_handled_at_once(
    make, admin, name, wait_for
):
    busy: set[str] = set()
    at_once: list[str] = []
    lock = threading.Lock()
    handled: list[tuple[str, int]] = []
    both = threading.Barrier(2)
    apps = [make(pod=f"pod-{n}", stale_after=5.0) for n in range(2)]
    for app in apps:

        @app.consumer(name, group=name)
        def handle(record, conn) -> None:
            with lock:
                if record.key in busy:
                    at_once.append(record.key)
                busy.add(record.key)
            if record.value["n"] == 0:
                # Different entities are handled at once.
                both.wait(30)
            with lock:
                busy.remove(record.key)
                handled.append((record.key, record.value["n"]))

    with running(apps[0], "consumers"), running(apps[1], "consumers"):
        stream = apps[0].stream(name)
        # What is handled before a process has its share may be handled again.
        wait_for(
            lambda: count_shares(admin, f"consume:{name}") == [1, 1],
            timeout=60,
            what="each process has a partition",
        )
        for n in range(20):
            for key in KEYS:
                stream.publish(key, {"n": n})
        wait_for(lambda: len(handled) == 40, timeout=30, what="all are handled")
    assert at_once == []
    for key in KEYS:
        assert [n for one, n in handled if one == key] == [*range(20)]


@pytest.mark.guarantee("T10")
@pytest.mark.parametrize(
    "dies_at",
    ["records.committed", pytest.param("records.applied", marks=pytest.mark.slow)],
)
def test_the_parts_of_a_transaction_keep_their_context_over_a_rebalance(
    start_process, database_url, own_broker, make, admin, name, wait_for, await_read,
    dies_at,
):  # fmt: skip
    admin.execute(PARTS)
    app = make(pod="second", stale_after=5.0)
    declare_parts(app, name)
    stream = app.stream(name)
    stream.publish("t1", {"part": 1, "amount": 7})
    first = start_process(
        "parts",
        database_url,
        kafka_bootstrap_servers=own_broker.bootstrap_servers,
        topic=name,
        pod="first",
        dies_at={dies_at: 1},
    )
    first.wait()
    kept = [("t1", 7)] if dies_at == "records.committed" else []
    assert admin.execute("select * from contexts").fetchall() == kept
    with running(app, "consumers"):
        stream.publish("t1", {"part": 2})
        await_read(name, name)
    assert admin.execute("select * from transfers").fetchall() == [("t1", 7, "second")]
    assert count(admin, "offsets")


@pytest.mark.guarantee("T10")
def test_a_transaction_goes_on_in_the_process_that_gets_its_partition(
    make, admin, name, wait_for, await_read
):
    admin.execute(PARTS)
    # None of them dies, however late its heartbeats come.
    apps = [make(pod=f"pod-{n}", stale_after=30.0) for n in range(2)]
    for app in apps:
        declare_parts(app, name)
    stream = apps[0].stream(name)
    with running(apps[0], "consumers"):
        for amount, key in enumerate(KEYS):
            stream.publish(key, {"part": 1, "amount": amount})
        await_read(name, name)
        with running(apps[1], "consumers"):
            wait_for(
                lambda: count_shares(admin, f"consume:{name}") == [1, 1],
                timeout=60,
                what="each process has a partition",
            )
            for key in KEYS:
                stream.publish(key, {"part": 2})
            await_read(name, name)
    found = admin.execute("select id, amount, pod from transfers").fetchall()
    assert sorted((key, amount) for key, amount, _ in found) == sorted(
        (key, amount) for amount, key in enumerate(KEYS)
    )
    assert {pod for *_, pod in found} == {"pod-0", "pod-1"}
    assert not admin.execute("select id from contexts").fetchall()


@pytest.mark.guarantee("T17", "T18")
@pytest.mark.parametrize("processes", [1, 2])
def test_entities_have_consumers_of_their_own_in_one_process_or_many(
    make, own_broker, admin, name, gate, await_read, processes
):
    users = own_broker.create(1)
    apps = [make(pod=f"pod-{n}", name=f"app-{n}") for n in range(processes)]

    @apps[0].consumer(name, group=f"{name}-tenants")
    def take_tenant(record, conn) -> None:
        gate.wait(60)

    @apps[-1].consumer(users, group=f"{name}-users")
    def take_user(record, conn) -> None:
        pass

    tenants, people = apps[0].stream(name), apps[-1].stream(users)
    with running(apps[0], "consumers"):
        # In one process the API publishes as well.
        tenants.publish(KEYS[0], {})
        people.publish("u1", {})
        if processes == 1:
            await_read(users, f"{name}-users")
        else:
            with running(apps[1], "consumers"):
                await_read(users, f"{name}-users")
        gate.set()
        await_read(name, f"{name}-tenants")


@pytest.mark.guarantee("T21")
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=() if step in QUICKLY else pytest.mark.slow)
        for step in CHAIN_STEPS
    ],
)
def test_a_pending_tenant_ends_in_exactly_one_outcome_wherever_the_process_dies(
    start_process, database_url, own_broker, make, admin, name, read_log, wait_for,
    await_read, step,
):  # fmt: skip
    admin.execute(CHAIN)
    created, failed = own_broker.create(1), own_broker.create(1)
    app = make(publish_timeout=2, stale_after=5.0)
    pending = app.stream(name)
    pending.publish("t1", {}, request="r1")
    how = {"step": step} if step in JOB_STEPS else {"dies_at": {step: 1}}
    start_process(
        "chain",
        database_url,
        kafka_bootstrap_servers=own_broker.bootstrap_servers,
        pending=name,
        created=created,
        failed=failed,
        **how,
    ).wait()
    end_senders_time(admin)
    declare_chain(app, name, created, failed)
    # An event that is there twice has one outcome, too.
    repeated = {"ce_request": "r1"}
    produce(own_broker.bootstrap_servers, name, [("t1", {})], headers=repeated)
    with running(app, "consumers", "executor"):
        pending.publish("t2", {})
        await_read(name, name)
        wait_for(lambda: not count(admin, "jobs"), timeout=30, what="all is decided")
    ends = [(one.key, topic) for topic in (created, failed) for one in read_log(topic)]
    assert sorted(key for key, _ in ends) == ["t1", "t2"]
