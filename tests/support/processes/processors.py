"""Processes whose jobs and handlers publish to streams, or call a provider."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib import exponential
from jobs_lib.consuming.transaction_writer import TransactionWriter
from jobs_lib.consuming.transactional import Transactional
from jobs_lib.executor.running.transaction import JobConnections, OwnTransaction
from tests.support.processes.kinds import die, kind
from tests.support.processes.publishers import CALLS, STEPS, await_start, die_around
from tests.support.provider import register
from tests.support.say import say

if TYPE_CHECKING:
    from jobs_lib import App, Event, Job, Record
    from jobs_lib.jobs.type import JobType

SOON = exponential(first=0.05, cap=0.05)
PLANS = "create table plans (tenant text primary key, plan text, changes int)"
TENANTS = "create table tenants (id text primary key)"
CHANGE = """
insert into plans values (%s, %s, 0)
on conflict (tenant) do update set plan = excluded.plan, changes = plans.changes + 1
where plans.plan <> excluded.plan
returning changes
"""
PARTS = """
create table contexts (id text primary key, amount int);
create table transfers (id text primary key, amount int, pod text);
"""
CHAIN = """
create table decided (call text primary key, tenant text);
create sequence decisions;
"""
DECIDE = "insert into decided values (%s, %s) on conflict do nothing"
JOB_STEPS = [
    *STEPS,
    "completing",  # Kafka has the event, and the change is not committed
    "completed",  # the change is committed, and nobody knows it
]
_OF_JOBS: dict[str, tuple[type, str, bool]] = {
    "completing": (JobConnections, "completion", False),
    "completed": (OwnTransaction, "_note_committed", False),
}


def declare_change(app: App, topic: str) -> JobType[Any]:
    """Declare a job that changes a tenant's plan, and publishes it if it is another."""
    plans = app.stream(topic)

    @app.job(group="tenant", retry=SOON)
    def change(job: Job, tenant: str, plan: str) -> None:
        with job.transaction() as conn:
            row = conn.execute(CHANGE, (tenant, plan)).fetchone()
            if row is not None:
                plans.publish(tenant, {"plan": plan, "changes": row[0]}, by=job)

    return change


@kind("executor", publish_timeout=2)
def changes(app: App, topic: str, step: str) -> None:
    """Run the jobs, and die at a step of the first one that publishes."""
    declare_change(app, topic)
    die_around(*(CALLS | _OF_JOBS)[step])


def declare_forwarding(app: App, source: str, target: str) -> None:
    """Declare a handler that notes each record, and publishes an event by it."""
    forwarded = app.stream(target)

    @app.consumer(source, group=source)
    def forward(record: Record, conn: Any) -> None:
        conn.execute("insert into tenants values (%s)", [record.key])
        forwarded.publish(str(record.key), record.value, by=record)


@kind("consumers", publish_timeout=2)
def forwards(app: App, source: str, target: str, step: str | None = None) -> None:
    """Forward records, and die at a step of the first one."""
    declare_forwarding(app, source, target)
    if step:
        die_around(*CALLS[step])


def declare_registration(app: App, topic: str, provider: str, *, by_job: bool) -> None:
    """Declare a handler that creates a tenant if absent, and has it registered."""

    @app.job(group="tenant", retry=SOON)
    def register_tenant(job: Job, tenant: str, call: str) -> None:
        register(provider, tenant, call)

    @app.consumer(topic, group=topic, done=by_job)
    def create(record: Record, conn: Any) -> None:
        tenant, key = str(record.key), record.idempotency_key
        conn.execute("insert into tenants values (%s) on conflict do nothing", [tenant])
        if by_job:
            register_tenant.enqueue(conn, tenant=tenant, call=key)
        else:
            register(provider, tenant, key)


@kind("consumers", "executor")
def registers(app: App, topic: str, provider: str, by_job: bool) -> None:
    """Create tenants and have them registered."""
    declare_registration(app, topic, provider, by_job=by_job)


def declare_chain(app: App, pending: str, created: str, failed: str) -> None:
    """Declare that each pending tenant ends as a created or as a failed one.

    A decision is another one each time that it is made, as with a flaky provider.
    """
    outcomes = {"created": app.stream(created), "failed": app.stream(failed)}

    @app.consumer(pending, group=pending)
    def take(record: Record, conn: Any) -> None:
        decide.enqueue(conn, tenant=str(record.key), call=record.idempotency_key)

    @app.job(group="tenant", retry=SOON)
    def decide(job: Job, tenant: str, call: str) -> None:
        with job.transaction() as conn:
            if not conn.execute(DECIDE, (call, tenant)).rowcount:
                return
            (number,) = conn.execute("select nextval('decisions')").fetchone() or (0,)
            outcome = "created" if number % 2 else "failed"
            tell.enqueue(conn, tenant=tenant, outcome=outcome)

    @app.job(group="tenant", retry=SOON)
    def tell(job: Job, tenant: str, outcome: str) -> None:
        outcomes[outcome].publish(tenant, {"outcome": outcome}, by=job)


@kind("consumers", "executor", publish_timeout=2)
def chain(
    app: App, pending: str, created: str, failed: str, step: str | None = None
) -> None:
    """Run the chain, and die at a step of it."""
    declare_chain(app, pending, created, failed)
    if step:
        die_around(*(CALLS | _OF_JOBS)[step])


def declare_parts(app: App, topic: str) -> None:
    """Declare a handler of transfers that come in two parts, in one partition."""

    @app.consumer(topic, group=topic)
    def take(record: Record, conn: Any) -> None:
        if record.value["part"] == 1:
            conn.execute(
                "insert into contexts values (%s, %s)",
                (record.key, record.value["amount"]),
            )
            return
        conn.execute(
            "with context as (delete from contexts where id = %s returning id, amount)"
            " insert into transfers select id, amount, %s from context",
            (record.key, app.settings.pod),
        )


@kind("consumers")
def parts(app: App, topic: str) -> None:
    """Take the parts of transfers."""
    declare_parts(app, topic)


def declare_copying(app: App, source: str, target: str) -> None:
    """Declare that each event of a topic makes one of another one, in transactions."""
    copies = app.stream(target)

    @app.transactional(source, group=f"{source}-copy")
    def copy(record: Record) -> Event:
        return copies.event(str(record.key), record.value)


COPY_STEPS = [
    "made",  # the events are made, and not sent
    "sent",  # they are in the topic, and not committed
    "offered",  # the offset is in the transaction, too
    "committed",  # both are committed
]


@kind("consumers")
def copies(
    app: App,
    source: str,
    target: str,
    step: str | None = None,
    stands_still: bool = False,
) -> None:
    """Copy events, and die at a step of the first ones, or take long before it."""
    declare_copying(app, source, target)
    if stands_still:
        finish = TransactionWriter.finish

        def linger(self: Any, producer: Any, *place: Any) -> None:
            # The events are in the topic, and the test stops the process here.
            producer.flush(10)
            say("inside")
            await_start(app.settings.database_url)
            finish(self, producer, *place)

        setattr(TransactionWriter, "finish", linger)  # noqa: B010
    if step == "made":
        die_around(Transactional, "call", True)
    elif step == "committed":
        die_around(TransactionWriter, "finish", True)
    elif step:

        def die_inside(_: Any, producer: Any, *place: Any) -> None:
            # The events are in the topic, where all may see them who want to.
            producer.flush(10)
            if step == "offered":
                producer.send_offsets_to_transaction([place[0]], place[1], 10)
            say("dying around finish")
            die()

        setattr(TransactionWriter, "finish", die_inside)  # noqa: B010
