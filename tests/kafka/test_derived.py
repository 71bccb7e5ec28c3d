"""Services that read topics derived from one wait for each other by its offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from confluent_kafka import TopicPartition

from jobs_lib.consuming import done
from jobs_lib.consuming.done import Done
from jobs_lib.consuming.sent import Sent
from jobs_lib.errors import ConfigurationError
from tests.support.apps import make_app, running
from tests.support.records import key_of, make_producer, produce, read_committed

if TYPE_CHECKING:
    from jobs_lib import App

pytestmark = pytest.mark.usefixtures("patient_gates")
REFRESH = 0.2


@pytest.fixture
def make(database_url, bootstrap_servers):
    """A function that makes an app."""

    def make() -> App:
        return make_app(
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            gate_refresh=REFRESH,
            heartbeat_interval=0.2,
            # Several services share the shards, and all of them live.
            stale_after=30.0,
        )

    return make


@pytest.fixture
def handled(admin):
    """A function that reads which records a service has handled."""
    admin.execute("create table handled (service text, n int)")

    def read(service: str) -> list[int]:
        rows = admin.execute(
            "select n from handled where service = %s order by 1", (service,)
        )
        return [n for (n,) in rows]

    return read


def note(conn: Any, service: str, n: int) -> None:
    """Note that a service has handled a record, in its transaction."""
    conn.execute("insert into handled values (%s, %s)", (service, n))


@pytest.mark.guarantee("K5", "K22")
def test_two_derived_topics_wait_for_each_other_by_the_common_one(
    make, handled, bootstrap_servers, topic, gate, wait_for
):
    payments, transfers, reviews = topic(2), topic(2), topic(2)
    maker, service, dependant = make(), make(), make()
    made = maker.topic(transfers, value=dict)

    @maker.consumer(payments, group=f"{payments}-maker", done="sent")
    def derive(record, conn) -> None:
        # Of odd payments no transfer is made.
        if record.value % 2 == 0:
            made.send(conn, key=record.key, value={"n": record.value})

    @service.consumer(
        transfers,
        group=f"{payments}-b",
        done=True,
        derived_from=(payments, f"{payments}-maker.done"),
        block=1,
    )
    def handle(record, conn) -> None:
        if record.value["n"] == 4:
            gate.wait(60)
        note(conn, "b", record.value["n"])

    @dependant.consumer(
        reviews, group=f"{payments}-a", after=[(payments, f"{payments}-b.done")]
    )
    def review(record, conn) -> None:
        note(conn, "a", record.value)

    def read_done() -> dict[int, int] | None:
        return read_committed(bootstrap_servers, f"{payments}-b.done", payments)

    key = key_of(0, 2)
    produce(bootstrap_servers, payments, [(key, n) for n in range(8)])
    review_each(bootstrap_servers, reviews, payments, key, 8)
    with running(maker), running(service), running(dependant):
        wait_for(lambda: handled("b") == [0, 2], timeout=30, what="4 is in its hands")
        # What the maker had said before 4 was there may come true.
        assert (read_done() or {}).get(0, 0) <= 4
        assert {*handled("a")} <= {*range(4)}
        gate.set()
        wait_for(lambda: handled("a") == [*range(8)], timeout=30, what="all is done")
        assert handled("b") == [0, 2, 4, 6]
        # Nothing at all is made of this one.
        produce(bootstrap_servers, payments, [(key_of(1, 2), 9)])
        wait_for(lambda: read_done() == {0: 8, 1: 1}, timeout=30, what="told of all")


@pytest.mark.guarantee("K22")
def test_a_process_that_has_lost_its_partitions_tells_nothing_of_the_common_topic(
    make, bootstrap_servers, topic, group, wait_for, monkeypatch
):
    first, derived, maker = topic(2), topic(2), group()
    app, given = make(), []

    @app.consumer(
        derived, group=f"{first}-b", done=True, derived_from=(first, maker.name)
    )
    def handle(record, conn) -> None: ...

    def note(self, offsets, *others) -> None:
        given.append({one: at for one, at in offsets.items() if one[0] == first})

    monkeypatch.setattr(Done, "_commit", note)
    monkeypatch.setattr(done, "_PAUSE", 0.1)
    maker.commit_soon(first, {0: 7, 1: 8})
    # The other partition has nothing at all.
    produce(bootstrap_servers, derived, [(key_of(0, 2), 1)])
    with running(app, "consumers") as service:
        reached = {(first, 0): 7, (first, 1): 8}
        wait_for(lambda: reached in given, timeout=30, what="it is known how far it is")
        consumer: Any = next(one.worker for one in service._owners if one.measures)
        # As if another process had them, and this one did not know it yet.
        consumer._done._owner = uuid4()
        seen = len(given)
        wait_for(lambda: len(given) > seen + 2, timeout=30, what="it looks again")
        assert given[-1] == {}


@pytest.mark.guarantee("K5", "K22")
def test_a_new_group_is_done_with_records_that_expired_before_it_came(
    make, kafka_admin, bootstrap_servers, topic, group, wait_for
):
    first, derived, maker = topic(1), topic(1), group()
    app = make()

    @app.consumer(
        derived, group=f"{first}-b", done=True, derived_from=(first, maker.name)
    )
    def handle(record, conn) -> None: ...

    maker.commit_soon(first, {0: 7})
    produce(bootstrap_servers, derived, [("k", n) for n in range(5)])
    at = TopicPartition(derived, 0, 5)
    for deleted in kafka_admin.delete_records([at]).values():
        assert deleted.result().low_watermark == 5
    with running(app, "consumers"):
        wait_for(
            lambda: (
                read_committed(bootstrap_servers, f"{first}-b.done", first) == {0: 7}
            ),
            timeout=30,
            what="whoever waits for it can go on",
        )


@pytest.mark.guarantee("K22", "K5")
def test_a_record_is_done_only_when_what_it_has_led_to_is_in_kafka(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for, monkeypatch
):
    looks: list[dict[Any, int]] = []
    find = Sent.find

    def note_look(self, connection, offsets):
        looks.append(dict(offsets))
        return find(self, connection, offsets)

    monkeypatch.setattr(Sent, "find", note_look)
    name, out = topic(1), topic(1)
    app = make()
    sent = app.topic(out, value=dict)

    @app.job()
    def work(job, n: int) -> None:
        with job.transaction() as conn:
            sent.send(conn, key="job", value={"n": n})

    @app.consumer(name, group=f"{name}-g", done="sent")
    def handle(record, conn) -> None:
        if record.value == 1:
            sent.send(conn, key="handler", value={})
        if record.value == 2:
            work.enqueue(conn, n=record.value)

    def read_done() -> dict[int, int] | None:
        return read_committed(bootstrap_servers, f"{name}-g.done", name)

    def count_rows() -> int:
        return int(admin.execute("select from jobs_lib.outbox").rowcount)

    produce(bootstrap_servers, name, [("k", 0)])
    with running(app, "consumers", "executor"):
        wait_for(lambda: read_done() == {0: 1}, timeout=30, what="nothing is sent")
        produce(bootstrap_servers, name, [("k", 1)])
        wait_for(lambda: count_rows() == 1, timeout=30, what="it waits for a relay")
        produce(bootstrap_servers, name, [("k", 2), ("k", 3)])
        wait_for(lambda: count_rows() == 2, timeout=30, what="the job's, too")
        wait_for(lambda: read_offsets(name) == {0: 4}, timeout=30, what="all handled")
        # The jobs are done, and two more looks tell nothing new.
        wait_for(lambda: looks[-1] == {(name, 0): 4}, timeout=30, what="jobs are done")
        seen = len(looks)
        wait_for(lambda: len(looks) > seen + 2, timeout=30, what="it looks again")
        assert read_done() == {0: 1}
    with running(app):
        wait_for(lambda: read_done() == {0: 4}, timeout=30, what="Kafka has them")


def test_topics_that_are_not_cut_alike_are_refused_at_the_start(make, topic):
    first, derived = topic(3), topic(2)
    app = make()

    @app.consumer(derived, group="g", done=True, derived_from=(first, "maker.done"))
    def handle(record, conn) -> None: ...

    with (
        pytest.raises(ConfigurationError, match=r"2 partitions.* which has 3"),
        running(app),
    ):
        pass


def review_each(servers: str, topic: str, first: str, key: str, count: int) -> None:
    """Produce a review of each payment of the first partition."""
    producer = make_producer(servers)
    for n in range(count):
        headers: dict[str, str | bytes | None] = {"ce_derivedfrom": f"{first}/0/{n}"}
        producer.produce(topic, str(n).encode(), key, headers=headers)
    assert producer.flush(30) == 0
