"""A job changes a table and publishes the change: both, or neither."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import pytest

from jobs_lib import ConfigurationError, JobsError
from jobs_lib.executor.lane import Finished, Lane
from jobs_lib.ownership.lease import Lease, NotBegun
from tests.support.apps import count, heard, running
from tests.support.claimed import make_claimed
from tests.support.processes.processors import JOB_STEPS, PLANS, SOON, declare_change
from tests.support.processes.publishers import SET_BACK
from tests.support.waiting import linger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.brokers import OwnBroker

QUICKLY = {"completing"}
"""The step that is tried every day."""
PLAN_OF = "select plan, changes from plans where tenant = 't1'"


@pytest.fixture
def plans(admin) -> None:
    """The table that jobs change."""
    admin.execute(PLANS)


def end_senders_time(admin) -> None:
    """Let the time of all senders be over."""
    admin.execute("update jobs_lib.requests set sent_until = clock_timestamp()")


@contextlib.contextmanager
def away(broker: OwnBroker, how: str) -> Iterator[None]:
    """Let Kafka be away meanwhile."""
    if how == "killed":
        with broker.down():
            yield
    else:
        broker.proxy.hold()
        yield
        broker.proxy.restore()


class Again:
    """Something that is handled again and again."""

    idempotency_key = str(uuid4())

    def ensure_may_publish(self) -> None:
        """It always may."""


@pytest.mark.expects("fenced")
@pytest.mark.guarantee("S3")
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=() if step in QUICKLY else pytest.mark.slow)
        for step in JOB_STEPS
    ],
)
def test_a_change_and_its_event_are_both_there_once_wherever_the_process_dies(
    start_process, database_url, own_broker, make, plans, admin, name, read_log,
    wait_for, step,
):  # fmt: skip
    app = make(publish_timeout=2)
    change = declare_change(app, name)
    change.enqueue(app, tenant="t1", plan="paid")
    dying = start_process(
        "changes",
        database_url,
        kafka_bootstrap_servers=own_broker.bootstrap_servers,
        topic=name,
        step=step,
    )
    dying.wait_for_line("dying around")
    dying.wait()
    # No committed change is without its event.
    changed = admin.execute(PLAN_OF).fetchall()
    assert not changed or read_log(name, "t1")
    end_senders_time(admin)
    with running(app, "executor"):
        wait_for(lambda: not count(admin, "jobs"), timeout=30, what="the job is done")
    assert admin.execute(PLAN_OF).fetchall() == [("paid", 0)]
    (event,) = read_log(name, "t1")
    assert event.json == {"plan": "paid", "changes": 0}


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("S3", "S4", "S17")
@pytest.mark.parametrize(
    ("outage", "seconds"),
    [("held", 0.0), pytest.param("killed", 60.0, marks=pytest.mark.slow)],
)
def test_what_fails_while_kafka_is_away_goes_out_in_order_afterwards(
    make, own_broker, plans, admin, name, read_log, wait_for, outage, seconds
):
    app = make(proxied=True, publish_timeout=2, transactions=1)
    change = declare_change(app, name)
    asked = ["free", "free", "paid", "large", "large"] * 10
    with heard("job.ran") as ran, running(app, "executor"):
        with away(own_broker, outage):
            with app.transaction() as conn:
                for plan in asked:
                    change.enqueue(conn, tenant="t1", plan=plan)
            wait_for(lambda: ran, timeout=30, what="a job has waited for Kafka")
            linger(seconds)
            assert admin.execute(PLAN_OF).fetchall() == []
        wait_for(lambda: not count(admin, "jobs"), timeout=90, what="all are done")
    # The outage costs no attempt.
    assert {fields["outcome"] for _, fields in ran} == {"snoozed", "committed"}
    # Only a change of the state is published, in the order of the jobs.
    states = ["free", "paid", "large"] * 10
    log = [(one.json["plan"], one.json["changes"]) for one in read_log(name, "t1")]
    assert log == [(plan, n) for n, plan in enumerate(states)]
    assert admin.execute(PLAN_OF).fetchall() == [("large", 29)]


@pytest.mark.guarantee("S3", "S4")
def test_a_job_that_fails_behind_its_event_takes_the_same_path_again(
    make, plans, admin, name, read_log, wait_for
):
    app = make()
    stream = app.stream(name)
    seen: list[int] = []

    @app.job(group="tenant", retry=SOON)
    def change(job, tenant: str, differs: bool) -> None:
        with job.transaction() as conn:
            conn.execute("insert into plans values (%s, 'paid', 0)", (tenant,))
            attempt = job.attempt if differs else 0
            seen.append(stream.publish(tenant, {"attempt": attempt}, by=job).offset)
            if job.attempt == 1:
                raise ValueError("a fault behind the event")

    with running(app, "executor"):
        for tenant, differs in (("same", False), ("other", True)):
            change.enqueue(app, tenant=tenant, differs=differs)
        wait_for(lambda: not count(admin, "jobs"), timeout=30, what="both are done")
    assert len(seen) == 4
    # An equal event is found. Another one is sent behind the one that has no change.
    assert [one.json for one in read_log(name, "same")] == [{"attempt": 0}]
    assert [one.json["attempt"] for one in read_log(name, "other")] == [1, 2]
    assert admin.execute("select count(*) from plans").fetchone() == (2,)


@pytest.mark.guarantee("S3", "S17")
def test_the_last_event_of_what_is_handled_again_is_what_it_said_last(
    make, name, admin, read_log, wait_for
):
    stream, cause = make(publish_timeout=2).stream(name), Again()
    said = ["a", "a", "b", "b", "a", "a"]
    offsets = [stream.publish("t1", one, by=cause).offset for one in said]
    assert [one.json for one in read_log(name)] == ["a", "b", "a"]
    assert offsets == [0, 0, 1, 1, 2, 2]
    other = asyncio.run(stream.publish_async("t2", "a", by=cause))
    assert [one.json for one in read_log(name, "t2")] == [other.content]
    # What a sender that has died may still send must be in front of another event.
    admin.execute(
        "update jobs_lib.requests set record_offset = null,"
        " sent_until = clock_timestamp() + interval '1 s' where id like '%/3'"
    )
    stream.publish("t1", "c", by=cause)
    (waited,) = admin.execute(
        "select max(remembered_at) filter (where id like '%/4')"
        " > max(sent_until) filter (where id like '%/3') from jobs_lib.requests"
    ).fetchone()
    assert waited
    assert [one.json for one in read_log(name, "t1")] == ["a", "b", "a", "c"]


@pytest.mark.guarantee("S3")
def test_a_clock_that_was_set_back_lets_a_later_event_follow_that_of_a_dead_sender(
    make, name, admin, read_log, passing
):
    stream, cause = make(publish_timeout=10).stream(name), Again()
    stream.publish("t1", "a", by=cause)
    admin.execute(SET_BACK)
    admin.execute("update jobs_lib.streams set send_seconds = 15")
    asked_at = passing.now
    stream.publish("t1", "b", by=cause)
    assert passing.now > asked_at + 15
    assert [one.json for one in read_log(name)] == ["a", "b"]


@pytest.mark.guarantee("S3")
def test_many_jobs_publish_with_one_connection_beside_their_own(
    make, plans, admin, name, read_log, wait_for
):
    app = make(transactions=1, workers=8)
    change = declare_change(app, name)
    tenants = [f"t{n}" for n in range(30)]
    with app.transaction() as conn:
        for tenant in tenants:
            change.enqueue(conn, tenant=tenant, plan="paid")
    with running(app, "executor"):
        wait_for(lambda: not count(admin, "jobs"), timeout=30, what="all are done")
    assert sorted(one.key for one in read_log(name)) == sorted(tenants)


@pytest.mark.guarantee("S3")
def test_an_async_job_publishes_inside_its_transaction(
    make, plans, admin, name, read_log, wait_for
):
    app = make(transactions=1)
    stream = app.stream(name)

    @app.job(group="tenant")
    async def change(job, tenant: str) -> None:
        async with job.transaction() as conn:
            await conn.execute("insert into plans values (%s, 'paid', 0)", (tenant,))
            await stream.publish_async(tenant, {"plan": "paid"}, by=job)

    change.enqueue(app, tenant="t1")
    with running(app, "executor"):
        wait_for(lambda: not count(admin, "jobs"), timeout=30, what="it is done")
    assert admin.execute(PLAN_OF).fetchall() == [("paid", 0)]
    assert [one.json for one in read_log(name)] == [{"plan": "paid"}]


def test_a_job_that_has_committed_or_has_no_group_may_not_publish(
    make, admin, name, read_log, wait_for
):
    app = make()
    stream = app.stream(name)
    refused: list[str] = []

    @app.job(group="tenant")
    def late(job, tenant: str) -> None:
        with job.transaction():
            pass
        with pytest.raises(JobsError) as error:
            stream.publish(tenant, {}, by=job)
        refused.append(str(error.value))

    @app.job()
    def alone(job, tenant: str) -> None:
        with pytest.raises(ConfigurationError) as error:
            stream.publish(tenant, {}, by=job)
        refused.append(str(error.value))

    with running(app, "executor"):
        for one in (late, alone):
            one.enqueue(app, tenant="t1")
        wait_for(lambda: len(refused) == 2, timeout=30, what="both are refused")
        wait_for(lambda: not count(admin, "jobs"), timeout=60, what="both are done")
    assert "Publish inside" in "".join(refused)
    assert "declare the type with a group" in "".join(refused)
    assert read_log(name) == []


def test_a_job_whose_lease_is_over_or_that_has_an_id_may_not_publish(make, name):
    stream = make().stream(name)
    lease = Lease()
    lane = Lane("local/0", 1, "t1", 1, UUID(int=1), Finished(), lease)
    job = make_claimed(lane)
    with pytest.raises(ConfigurationError, match="leave `request` out"):
        stream.publish("t1", {}, by=job, request="r1")
    job.timed_out = True
    with pytest.raises(JobsError, match="after its time limit"):
        stream.publish("t1", {}, by=job)
    job.timed_out = False
    lease.until = 0.0
    with pytest.raises(NotBegun, match="could publish"):
        stream.publish("t1", {}, by=job)
