"""A group tells Kafka how far the jobs of its records are done, and never too far."""

from __future__ import annotations

import contextvars
import re
import threading
import time
from types import SimpleNamespace

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from jobs_lib.consuming import done
from jobs_lib.errors import ConfigurationError
from jobs_lib.kafka.outside import OutsideCommitter
from jobs_lib.service.service import Service
from tests.support.apps import count, heard, make_app, running
from tests.support.processes.places import EFFECTS, fans_out
from tests.support.records import key_of, produce, read_committed

EACH = 60
"""Records of a partition."""


class Dependant:
    """Reads the offsets of a group all the time, and judges each that it sees."""

    def __init__(self, connect, bootstrap_servers: str, group: str, topic: str) -> None:
        self.seen: dict[int, int] = {}
        self.wrong: list[tuple[int, int, int]] = []
        """Partition, offset, and how many records before it were done."""
        self._asked = [TopicPartition(topic, n) for n in range(2)]
        self._group, self._servers = group, bootstrap_servers
        self._connection = connect(autocommit=True)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Dependant:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        consumer = Consumer(
            {"bootstrap.servers": self._servers, "group.id": self._group}
        )
        while not self._stopping.wait(0.01):
            try:
                found = consumer.committed(self._asked, timeout=30)
            except KafkaException:
                continue  # the group has no coordinator yet
            for at in found:
                if at.error is None and at.offset >= 0:
                    self._judge(at.partition, at.offset)
        consumer.close()

    def _judge(self, partition: int, offset: int) -> None:
        ((done,),) = self._connection.execute(
            "select count(distinct n) from effects where partition = %s and n < %s",
            (partition, offset),
        )
        self.seen[partition] = offset
        if done != offset:
            self.wrong.append((partition, offset, done))


@pytest.fixture
def watching(admin) -> type[Dependant]:
    """The class of a dependant; there is the table that it reads."""
    admin.execute(EFFECTS)
    return Dependant


@pytest.mark.expects("fenced")
@pytest.mark.guarantee("K22")
def test_a_dependant_never_sees_an_offset_above_a_record_whose_jobs_are_not_done(
    watching, connect, database_url, bootstrap_servers, topic, start_process, wait_for
):
    name = topic(2)
    place = {
        "home": name,
        "kafka_bootstrap_servers": bootstrap_servers,
        # It is the same member again, so that a restart need not wait for the group.
        "kafka": {"group.instance.id": name},
        "stale_after": 1.0,
    }

    def send() -> None:
        for partition in range(2):
            key = key_of(partition, 2)
            produce(bootstrap_servers, name, [(key, n) for n in range(EACH // 4)])

    deaths = (
        {"dies_at": {"records.applied": 2}},
        {"dies_before_commit": True},
        {"dies_at": {"done.committed": 1}},
        {"dies_at": {"job.ran": 20}},
    )
    with watching(connect, bootstrap_servers, f"{name}-g.done", name) as dependant:
        for death in deaths:
            send()
            worker = start_process("fans_out", database_url, **place, **death)
            assert worker.wait(timeout=60) == -9, worker.output
        app = make_app(database_url, **place)
        fans_out(app)
        with running(app):
            wait_for(
                lambda: dependant.seen == {0: EACH, 1: EACH},
                timeout=60,
                what=lambda: f"all is done: {dependant.seen}",
            )
    assert dependant.wrong == []


@pytest.mark.guarantee("K22")
def test_each_job_that_is_enqueued_in_sql_gets_the_place_of_its_own_record(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    app = make()

    left_behind: list[contextvars.Context] = []

    @app.job()
    def work(job) -> None: ...

    @app.consumer(name, group=f"{name}-g", done=True, block=10)
    def handle(record, conn) -> None:
        conn.execute("select jobs_lib.enqueue('work')")
        left_behind.append(contextvars.copy_context())

    def read_places() -> list[int | None]:
        rows = admin.execute("select record_offset from jobs_lib.jobs order by id")
        return [offset for (offset,) in rows]

    with running(app, "consumers"):
        produce(bootstrap_servers, name, [("k", 0)])
        wait_for(lambda: read_offsets(name) == {0: 1}, timeout=30, what="one is in")
        produce(bootstrap_servers, name, [("k", n) for n in range(1, 30)])
        wait_for(lambda: read_offsets(name) == {0: 30}, timeout=30, what="all are in")
    assert read_places() == [*range(30)]
    # What a handler leaves behind has no record any more.
    left_behind[0].run(work.enqueue, app)
    assert read_places() == [*range(30), None]
    app.close()


@pytest.mark.guarantee("K22")
@pytest.mark.parametrize("how", ["block", "async", "on_change"])
def test_the_jobs_of_a_block_get_the_place_of_its_first_record(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for, how
):
    name = topic(1, config={"cleanup.policy": "compact"})
    app = make()
    admin.execute("create table board (key text primary key, version bigint, n int)")

    @app.job()
    def work(job, n: int) -> None: ...

    def enqueue(records, conn) -> None:
        work.enqueue_many(conn, [{"n": one.offset} for one in records])

    options = {"group": f"{name}-g", "block": 5, "done": True}
    if how == "on_change":

        @app.read_model(name, table="board", key="key", on_change=enqueue, **options)
        def row(record) -> dict[str, int]:
            return {"n": record.value}

    elif how == "async":

        @app.consumer(name, per="block", **options)
        async def handle(records, conn) -> None:
            await work.enqueue_many(conn, [{"n": one.offset} for one in records])

    else:
        app.consumer(name, per="block", **options)(enqueue)

    produce(bootstrap_servers, name, [(f"k{n}", n) for n in range(20)])
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 20}, timeout=30, what="all are in")
    rows = admin.execute(
        "select record_offset, array_agg((payload ->> 'n')::int order by id)"
        " from jobs_lib.jobs group by 1 order by 1"
    ).fetchall()
    assert [n for _, numbers in rows for n in numbers] == [*range(20)]
    assert [first for first, _ in rows] == [numbers[0] for _, numbers in rows]


@pytest.mark.guarantee("K22", "K21")
def test_what_kafka_has_is_told_again_until_it_is_acknowledged(
    make, admin, bootstrap_servers, topic, wait_for, monkeypatch
):
    name = topic(1)
    app = make()

    @app.consumer(name, group=f"{name}-g", done=True)
    def handle(record, conn) -> None: ...

    commit, failures = OutsideCommitter.commit, [OSError, OSError]

    def fail_at_first(self, offsets) -> None:
        if failures:
            raise failures.pop()("no answer")
        commit(self, offsets)

    monkeypatch.setattr(OutsideCommitter, "commit", fail_at_first)
    produce(bootstrap_servers, name, [("k", 0)])
    with heard("loop.failed") as failed, running(app, "consumers"):
        wait_for(
            lambda: read_committed(bootstrap_servers, f"{name}-g.done", name) == {0: 1},
            timeout=30,
            what="Kafka has it",
        )
    # A coordinator that has moved may refuse it once more.
    refused = [one for _, one in failed if one["error"] == "OSError: no answer"]
    assert [one["loop"] for one in refused] == [f"done {name}-g"] * 2


@pytest.mark.guarantee("K22")
def test_an_older_offset_of_a_process_that_stood_still_is_replaced(
    make, bootstrap_servers, topic, wait_for, monkeypatch
):
    name = topic(1)
    app = make()

    @app.consumer(name, group=f"{name}-g", done=True)
    def handle(record, conn) -> None: ...

    def is_told(offset: int) -> bool:
        found = read_committed(bootstrap_servers, f"{name}-g.done", name)
        return found == {0: offset}

    monkeypatch.setattr(done, "_AGAIN", 0.5)
    produce(bootstrap_servers, name, [("k", n) for n in range(5)])
    with running(app, "consumers"):
        wait_for(lambda: is_told(5), timeout=30, what="Kafka has it")
        late = OutsideCommitter(app.settings, f"{name}-g.done")
        with heard("done.committed") as told:
            late.commit({(name, 0): 2})
            wait_for(lambda: told, timeout=30, what="it is told again")
        late.close()
        wait_for(lambda: is_told(5), timeout=30, what="Kafka has it again")


@pytest.mark.guarantee("K22")
def test_a_partition_is_told_at_its_take_over(
    make, bootstrap_servers, topic, group, wait_for, monkeypatch
):
    name, other = topic(2), group()
    app = make()

    @app.consumer(name, group=other.name, done=True)
    def handle(record, conn) -> None: ...

    def is_told() -> bool:
        found = read_committed(bootstrap_servers, f"{other.name}.done", name)
        return found == {0: 5, 1: 1}

    monkeypatch.setattr(done, "_PAUSE", 0.1)
    for partition, count_ in ((0, 5), (1, 1)):
        key = key_of(partition, 2)
        produce(bootstrap_servers, name, [(key, n) for n in range(count_)])
    with running(app, "consumers"):
        wait_for(is_told, timeout=30, what="Kafka has it")
    late = OutsideCommitter(app.settings, f"{other.name}.done")
    late.commit({(name, 0): 2, (name, 1): 0})
    late.close()
    # Nothing else makes it look: no pause ends, and nothing is handled.
    monkeypatch.setattr(done, "_PAUSE", 3_600.0)
    with running(app, "consumers"):
        wait_for(is_told, timeout=30, what="Kafka has it again")


@pytest.mark.guarantee("K22")
def test_a_process_that_stood_still_looks_again_before_it_tells(
    make, admin, bootstrap_servers, topic, gate, wait_for, monkeypatch
):
    name = topic(1)
    app = make(heartbeat_interval=0.2)
    ahead, told = [0.0], []
    commit, look = OutsideCommitter.commit, done.Done._look

    @app.consumer(name, group=f"{name}-g", done=True)
    def handle(record, conn) -> None:
        if ahead[0]:
            gate.wait(60)

    def note(self, offsets) -> None:
        commit(self, offsets)
        told.append(offsets[name, 0])

    def stand_still(self, connection, owned):
        found = look(self, connection, owned)
        if told[-1:] == [5] and not ahead[0]:
            # Meanwhile somebody sets the offset back. What was told is dropped first:
            # the test looks at it as soon as the clock has gone ahead.
            told.clear()
            ahead[0] = 60.0
            admin.execute("update jobs_lib.offsets set next_offset = 2")
        return found

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(done, "time", clock)
    monkeypatch.setattr(done, "_PAUSE", 0.1)
    monkeypatch.setattr(done, "_AGAIN", 0.0)
    monkeypatch.setattr(done.Done, "_look", stand_still)
    monkeypatch.setattr(OutsideCommitter, "commit", note)
    produce(bootstrap_servers, name, [("k", n) for n in range(5)])
    with running(app, "consumers"):
        wait_for(lambda: ahead[0] and told, timeout=30, what="it tells again")
        assert told[0] == 2
        gate.set()
        wait_for(lambda: told[-1] == 5, timeout=30, what="all are handled again")


@pytest.mark.guarantee("K22")
def test_a_server_that_is_always_slow_keeps_nobody_from_telling(
    make, bootstrap_servers, topic, wait_for, monkeypatch
):
    name = topic(1)
    app = make()

    @app.consumer(name, group=f"{name}-g", done=True)
    def handle(record, conn) -> None: ...

    # All that it finds is too old.
    monkeypatch.setattr(done, "_OLD", -1.0)
    produce(bootstrap_servers, name, [("k", n) for n in range(5)])
    with running(app, "consumers"):
        wait_for(
            lambda: read_committed(bootstrap_servers, f"{name}-g.done", name) == {0: 5},
            timeout=30,
            what="Kafka has it",
        )


@pytest.mark.guarantee("K22")
def test_a_consumer_that_does_not_tell_has_jobs_without_places_and_no_second_group(
    make, admin, bootstrap_servers, topic, read_offsets, wait_for
):
    name = topic(1)
    app = make()

    @app.job()
    def work(job) -> None: ...

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        work.enqueue(conn)
        conn.execute("select jobs_lib.enqueue('work')")

    produce(bootstrap_servers, name, [("k", 0)])
    with running(app, "consumers") as service:
        wait_for(lambda: read_offsets(name) == {0: 1}, timeout=30, what="it is in")
        assert not [one for one in service_threads() if "done" in one]
        assert service is not None
    assert admin.execute(
        "select count(*) from jobs_lib.jobs where source is null"
    ).fetchone() == (2,)
    assert count(admin, "sources") == 0
    wait_for(
        lambda: read_committed(bootstrap_servers, f"{name}-g.done", name) == {},
        timeout=30,
        what="Kafka has no offset of it",
    )


def service_threads() -> list[str]:
    """Return the names of the threads of this process."""
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.guarantee("K22")
def test_a_service_that_lacks_the_index_does_not_start_and_names_the_statement(
    make, admin, topic
):
    name = topic(1)
    app = make()

    @app.consumer(name, group=f"{name}-g", done=True)
    def handle(record, conn) -> None: ...

    admin.execute("drop index jobs_lib.jobs_of_place")
    with pytest.raises(ConfigurationError, match="lacks the index") as refused:
        Service(app, ["consumers"]).start()
    for statement in re.findall(r"`(.*?)`", str(refused.value)):
        admin.execute(statement)
    with running(app, "consumers"):
        pass
