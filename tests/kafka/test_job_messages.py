"""Jobs make a change and send a message: both or neither, through every outage."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib import exponential
from tests.support.apps import HOME, count, executing, heard, make_app, running
from tests.support.outbox.history import Slot
from tests.support.outbox.judge import judge
from tests.support.processes.dying import ENTITIES, STEPS, changes_entities
from tests.support.records import read_topic
from tests.support.waiting import linger, wait_for

if TYPE_CHECKING:
    from tests.support.brokers import OwnBroker
    from tests.support.outbox.history import Row
    from tests.support.outbox.judge import Verdict

QUICK = exponential(first=0.02, cap=0.1)
_WAITING = """
select 'job', id, attempt, crashes, run_at::text, errors::text from jobs_lib.jobs
union all select 'row', id, null, null, null, null from jobs_lib.outbox
"""


def seconds(quick: float, slow: float):
    """Run a test with a short outage, and as a slow test with a long one."""
    marks = [pytest.mark.slow, pytest.mark.timeout(slow + 180)]
    return pytest.mark.parametrize(
        "seconds", [quick, pytest.param(slow, marks=marks)], ids="{:g}s".format
    )


def values(bootstrap_servers: str, topic: str) -> dict[str, list[int]]:
    """Return the records of a topic by key."""
    found: dict[str, list[int]] = {}
    for record in read_topic(bootstrap_servers, topic):
        found.setdefault(record.key, []).append(record.json)
    return found


@pytest.mark.guarantee("S3")
@pytest.mark.parametrize(
    "steps",
    [
        ["changed", "written", "completion", "committed"],
        pytest.param([*STEPS, "changed"], marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_a_kill_at_any_step_leaves_the_change_and_its_message_or_neither(
    database_url, admin, topic, bootstrap_servers, connect, start_process, steps
):
    name = topic(2)
    admin.execute(ENTITIES)
    admin.execute("insert into entities values ('a', 0), ('b', 0), ('c', 0)")
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    changes_entities(app, name)
    jobs = 3 * (len(steps) + 1)
    with connect() as connection:
        app.jobs["change"].enqueue_many(
            connection, [{"key": "abc"[n % 3]} for n in range(jobs)]
        )
    with Slot(database_url) as slot:
        for step in steps:
            doomed = start_process(
                "changes_entities",
                database_url,
                pod=f"dies-{step}",
                step=step,
                topic=name,
            )
            doomed.wait_for_line(f"dying: {step}")
            assert doomed.wait() == -signal.SIGKILL
            assert count(admin, "jobs") > 0, "nothing was left to cut off"
            (changes,) = admin.execute("select sum(n) from entities").fetchone()
            assert count(admin, "outbox") == changes
        with running(app, "executor", "relay"):
            wait_for(
                lambda: count(admin, "jobs") == count(admin, "outbox") == 0,
                timeout=60,
                what=lambda: (
                    "the rest has run, and all is sent: "
                    f"{admin.execute(_WAITING).fetchall()}"
                ),
            )
        # Each change and each message exist once, and no others exist.
        rows = slot.read()
    assert admin.execute("select distinct n from entities").fetchall() == [(jobs / 3,)]
    assert len(rows) == jobs
    verdict = judge(rows, {name: read_topic(bootstrap_servers, name)})
    assert not verdict.violations, str(verdict)


class Changes:
    """Jobs that each change an entity and send it; every fifth then fails twice."""

    def __init__(self, url: str, admin: Any, broker: OwnBroker, connect: Any) -> None:
        self._servers = broker.bootstrap_servers
        self._connect = connect
        self.app = make_app(url, kafka_bootstrap_servers=self._servers)
        config = {"message.timestamp.type": "LogAppendTime"}
        self._events = self.app.topic(broker.create(2, config), value=int)
        admin.execute(ENTITIES)
        admin.execute("insert into entities values ('a', 0)")

        @self.app.job(group="key", retry=QUICK)
        def change(job, key: str, n: int) -> None:
            with job.transaction() as connection:
                changed = connection.execute(
                    "update entities set n = %s where key = %s and n <> %s", (n, key, n)
                )
                # Send a message only for a change. An attempt that comes this far and
                # fails must change the row again the next time.
                if changed.rowcount:
                    self._events.send(connection, key=key, value=n, version=n)
                if n % 5 == 0 and job.attempt <= 2:
                    raise ConnectionError("after the change")

        self._change = change

    def enqueue(self, numbers: range) -> None:
        """Enqueue two jobs for each number; the second one changes nothing."""
        with self._connect() as connection:
            for n in numbers:
                self._change.enqueue(connection, key="a", n=n)
                self._change.enqueue(connection, key="a", n=n)
                connection.commit()

    def judge(self, rows: list[Row]) -> Verdict:
        """Check that the topic has these committed rows, and return the verdict."""
        records = read_topic(self._servers, self._events.name)
        verdict = judge(rows, {self._events.name: records})
        assert not verdict.violations, str(verdict)
        return verdict

    def values(self) -> dict[str, list[int]]:
        """Return the records of the topic by key."""
        return values(self._servers, self._events.name)


@pytest.mark.expects("loop.failed")
@seconds(2, 60)
@pytest.mark.guarantee("S4", "S17", "I22")
def test_changes_are_sent_in_order_once_the_broker_is_back(
    database_url, admin, own_broker, connect, seconds
):
    changes = Changes(database_url, admin, own_broker, connect)
    with (
        Slot(database_url) as slot,
        heard("jobs.retried") as retried,
        running(changes.app, "executor", "relay"),
    ):
        began_at = time.monotonic()
        changes.enqueue(range(1, 6))
        wait_for(
            lambda: count(admin, "jobs") == count(admin, "outbox") == 0,
            timeout=60,
            what="the first ones are sent",
        )
        first_ones = time.monotonic() - began_at
        rows = slot.read()
        calm = changes.judge(rows)
        with own_broker.down():
            changes.enqueue(range(6, 56))
            wait_for(
                lambda: count(admin, "jobs") == 0,
                timeout=60,
                what="all has changed, and nobody waits for the broker",
            )
            linger(seconds)
        back_at = time.monotonic()
        wait_for(lambda: count(admin, "outbox") == 0, timeout=60, what="all is sent")
        drained = time.monotonic() - back_at
        rows += slot.read()
    changes.judge(rows)
    assert len(retried) > 20
    assert changes.values() == {"a": [*range(1, 56)]}
    print(f"before: {calm}\nan outage of {seconds:g} s, drained in {drained:.1f} s")
    # The first ones show how busy the machine is: they need new producers, too.
    assert drained < max(10, 5 * first_ones) + seconds / 10


@seconds(1, 60)
@pytest.mark.guarantee("S5")
def test_no_message_is_sent_while_the_database_refuses_the_change(
    database_url, admin, topic, bootstrap_servers, connect, seconds
):
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    events = app.topic(topic(1), value=int)
    admin.execute(ENTITIES)
    admin.execute("insert into entities values ('a', 0)")
    # One of them refuses the statement; the other refuses the commit, after all is
    # written.
    admin.execute("alter table entities add constraint small check (n < 1)")
    admin.execute(
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin raise exception 'refused'; end $$;"
        "create constraint trigger refuse after insert on jobs_lib.outbox"
        " deferrable initially deferred for each row execute function refuse()"
    )

    @app.job(retry=QUICK)
    def update_first(job) -> None:
        with job.transaction() as connection:
            connection.execute("update entities set n = 1")
            events.send(connection, key="a", value=1)

    @app.job(retry=QUICK)
    def send_first(job) -> None:
        with job.transaction() as connection:
            events.send(connection, key="a", value=2)
            connection.execute("update entities set n = 2")

    @app.job(retry=QUICK)
    def send_only(job) -> None:
        with job.transaction() as connection:
            events.send(connection, key="a", value=3)

    with (
        heard("jobs.retried") as retried,
        running(app, "relay"),
        executing(app, HOME),
    ):
        with connect() as connection:
            for job in (update_first, send_first, send_only):
                job.enqueue(connection)
        linger(seconds)
        wait_for(lambda: len(retried) > 30, timeout=60, what="each has failed often")
        assert read_topic(bootstrap_servers, events.name) == []
        assert count(admin, "outbox") == 0
        admin.execute("drop trigger refuse on jobs_lib.outbox")
        admin.execute("alter table entities drop constraint small")
        wait_for(
            lambda: count(admin, "jobs") == count(admin, "outbox") == 0,
            timeout=60,
            what="all is sent",
        )
    assert {*values(bootstrap_servers, events.name)["a"]} == {1, 2, 3}
    assert len(read_topic(bootstrap_servers, events.name)) == 3
