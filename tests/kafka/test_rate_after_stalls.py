"""What was granted before something stood still does not leave in one burst."""

from __future__ import annotations

import threading

import pytest

from jobs_lib import reexport
from jobs_lib.outbox.producers import ShardProducers
from jobs_lib.outbox.relay import SENDERS
from tests.support.apps import make_app, running
from tests.support.records import read_topic
from tests.support.reexports import SHARDS, write_reexport

pytestmark = [pytest.mark.expects("fenced"), pytest.mark.timeout(300)]

RATE = 6_000
BUCKET = 1 + RATE * 0.0149
"""The most that leaves at once."""
REFILL = RATE * 0.975 / 60
"""Records a second."""
ROWS = 200 * SHARDS


class Stall:
    """Something that stands still until it is let go."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self._lock = threading.Lock()
        self._waits: set[int] = set()

    def wait(self) -> None:
        """Wait, and be counted as one that waits."""
        me = threading.get_ident()
        with self._lock:
            self._waits.add(me)
        self.open.wait(120)
        with self._lock:
            self._waits.discard(me)

    def count(self) -> int:
        """How many threads wait."""
        with self._lock:
            return len(self._waits)


@pytest.fixture
def stall():
    """A stall; it ends with the test."""
    stall = Stall()
    yield stall
    stall.open.set()


@pytest.mark.guarantee("W28", "X7")
@pytest.mark.parametrize("where", ["loader", "broker"])
def test_records_that_waited_leave_at_the_rate(
    database_url,
    bootstrap_servers,
    topic,
    admin,
    database,
    wait_for,
    monkeypatch,
    stall,
    where,
):
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    name = topic(1, config={"message.timestamp.type": "LogAppendTime"})
    states = app.topic(name, value=int)

    def load(_connection, keys):
        if where == "loader":
            stall.wait()
        return dict.fromkeys(keys, 1)

    app.entity(states, source="items", key="id", name="items")(load)
    real = ShardProducers.send

    def send(self, shard, records, confirm):
        if where == "broker":
            stall.wait()
        return real(self, shard, records, confirm)

    monkeypatch.setattr(ShardProducers, "send", send)
    write_reexport(admin, name, "items", ROWS, rate=RATE, shards=SHARDS)
    fill = (
        "update jobs_lib.reexports set tokens = 0,"
        " refilled_at = clock_timestamp() - make_interval(secs => %s)"
    )

    def sent() -> int:
        return reexport.status(database, "items").sent

    with running(app, "relay"):
        wait_for(lambda: sent() > 0, timeout=60, what="some are sent")
        stall.open.clear()
        # As if each loader came a second after the one before: all have full buckets.
        for waiting in range(1, SENDERS + 1) if where == "loader" else [1]:
            admin.execute(fill, (1.0 if where == "loader" else 0.5,))
            wait_for(
                lambda waiting=waiting: stall.count() >= waiting,
                timeout=60,
                what=lambda: f"threads wait: {stall.count()}",
            )
        # Until the bucket is full again, and what was granted is old: threads that
        # waited already took nothing of the last filling.
        admin.execute(fill, (0,))
        wait_for(
            lambda: admin.execute(
                "select tokens + %s * extract(epoch from clock_timestamp()"
                " - refilled_at) > %s from jobs_lib.reexports",
                (REFILL, BUCKET),
            ).fetchone()[0],
            timeout=60,
            what="the bucket is full",
        )
        before = sent()
        stall.open.set()
        wait_for(
            lambda: sent() >= before + 2 * BUCKET,
            timeout=120,
            what=lambda: f"it goes on: {reexport.status(database, 'items')}",
        )
        reexport.cancel(database, "items")
    times = [record.at for record in read_topic(bootstrap_servers, name)][before:]
    for place, at in enumerate(times):
        # A record may be appended 0.6 seconds after its grant.
        allowed = BUCKET + REFILL * (at - times[0] + 0.6)
        assert place + 1 <= allowed, f"after {at - times[0]:.3f} s"
