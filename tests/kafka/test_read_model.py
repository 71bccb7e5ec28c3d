"""Read models: no record brings a key back, however late or often it comes."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from jobs_lib.consuming.consumer import Consumer
from jobs_lib.consuming.queues import Queues
from jobs_lib.service.maintenance import Maintenance
from tests.support.apps import count, heard, make_app, running
from tests.support.records import make_producer
from tests.support.topics import grow_topic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs_lib.consuming.progress import Progress

KEYS = range(40)


@pytest.fixture
def make(database_url, bootstrap_servers):
    """A function that makes an app which keeps the model, in a given consumer group."""

    def make(topic: str, group: str, consumer_block: int = 3):
        app = make_app(
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            consumer_block=consumer_block,
        )

        @app.read_model(topic, table="model", key="id", group=group)
        def row(record):
            return {"n": record.value["n"]}

        return app

    return make


@pytest.fixture
def model(admin):
    """The model's table; another table notes each row that is written."""
    admin.execute("create table model (id int primary key, version bigint, n int)")
    admin.execute("create table written (at bigserial, id int, version bigint)")
    admin.execute(
        "create function note() returns trigger language plpgsql as $$ begin"
        " insert into public.written (id, version) values (new.id, new.version);"
        " return new; end $$"
    )
    admin.execute(
        "create trigger note after insert or update on model"
        " for each row execute function note()"
    )


def is_end(key: int, version: int) -> bool:
    """Tell whether this version of a key is a tombstone."""
    return (key + version) % 3 == 0


def send(
    bootstrap_servers: str, topic: str, records: Iterable[tuple[int, int]]
) -> None:
    """Send versions of keys."""
    send_each(
        bootstrap_servers,
        topic,
        [(key, version, is_end(key, version)) for key, version in records],
    )


def send_each(
    bootstrap_servers: str, topic: str, records: Iterable[tuple[int, int | None, bool]]
) -> None:
    """Send versions of keys, each a state or an end."""
    producer = make_producer(bootstrap_servers)
    for key, version, end in records:
        value = None if end else f'{{"n": {version or 0}}}'
        headers: Any = {} if version is None else {"ce_version": str(version)}
        producer.produce(topic, key=str(key), value=value, headers=headers)
    assert producer.flush(30) == 0


def await_read(admin, topic: str, group: str, records: int, wait_for) -> None:
    query = (
        "select coalesce(sum(next_offset), 0) from jobs_lib.offsets"
        " where topic = %s and consumer_group = %s"
    )
    wait_for(
        lambda: admin.execute(query, (topic, group)).fetchone() == (records,),
        timeout=60,
        what=lambda: f"{records} are in: {admin.execute(query, (topic, group))}",
    )


@pytest.mark.guarantee("I26", "W63")
def test_the_version_of_a_key_never_falls_and_a_deleted_key_stays_deleted(
    make, model, admin, bootstrap_servers, topic, wait_for
):
    name = topic(2)
    rng = random.Random(26)
    streams = {}
    for key in KEYS:
        # There are late ones and repeats, and sometimes the end is the newest of all.
        last = rng.randint(3, 9)
        versions = [*range(1, last + 1), *rng.choices(range(1, last + 1), k=3)]
        rng.shuffle(versions)
        streams[key] = versions
    order = [key for key, versions in streams.items() for _ in versions]
    rng.shuffle(order)
    left = {key: iter(versions) for key, versions in streams.items()}
    send(bootstrap_servers, name, [(key, next(left[key])) for key in order])
    with running(make(name, "first"), "consumers"):
        await_read(admin, name, "first", len(order), wait_for)
    newest = {key: max(versions) for key, versions in streams.items()}
    expected = {k: v for k, v in newest.items() if not is_end(k, v)}
    assert 0 < len(expected) < len(KEYS)
    query = "select id, version from model"
    assert dict(admin.execute(query).fetchall()) == expected
    written: dict[int, list[int]] = {key: [] for key in KEYS}
    for key, version in admin.execute("select id, version from written order by at"):
        written[key].append(version)
    for key, versions in streams.items():
        # A version that was not the newest on arrival was never written.
        records = [
            v for n, v in enumerate(versions) if all(v > w for w in versions[:n])
        ]
        assert written[key] == sorted(set(written[key])), key
        assert {*written[key]} <= {*records}, key
    # All records come again during the run: nothing is written at all.
    before = admin.execute("select count(*) from written").fetchone()
    with running(make(name, "again"), "consumers"):
        await_read(admin, name, "again", len(order), wait_for)
    assert admin.execute("select count(*) from written").fetchone() == before
    assert dict(admin.execute(query).fetchall()) == expected


def test_a_deleted_key_comes_back_with_a_newer_version(
    make, model, admin, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    # The second record is the end.
    send(bootstrap_servers, name, [(1, version) for version in (1, 2, 3, 4)])
    with running(make(name, "g"), "consumers"):
        await_read(admin, name, "g", 4, wait_for)
    assert admin.execute("select id, version from model").fetchall() == [(1, 4)]


@pytest.mark.guarantee("I26", "W63")
@pytest.mark.parametrize("block", [1, 100], ids=["one by one", "together"])
def test_the_later_of_an_end_and_a_state_of_equal_version_wins(
    make, model, admin, bootstrap_servers, topic, wait_for, block
):
    name = topic(1)
    state, end = False, True
    came_back = [(1, 5, state), (1, 6, end), (1, 6, state)]
    ended = [(2, 5, state), (2, 5, end)]
    ended_again = [(3, 5, state), (3, 5, end), (3, 6, state), (3, 6, end)]
    records = [*came_back, *ended, *ended_again]
    app = make(name, "g", consumer_block=block)
    with running(app, "consumers"):
        send_each(bootstrap_servers, name, records)
        await_read(admin, name, "g", len(records), wait_for)
        query = "select id, version from model"
        assert admin.execute(query).fetchall() == [(1, 6)]
        # Each record comes again, one by one and in any order.
        again = random.Random(4).sample(records, len(records))
        send_each(bootstrap_servers, name, again)
        await_read(admin, name, "g", 2 * len(records), wait_for)
        assert admin.execute(query).fetchall() == [(1, 6)]
        # Each key also continues.
        more = [(1, 7, end), (2, 6, state), (3, 7, state)]
        send_each(bootstrap_servers, name, more)
        await_read(admin, name, "g", 2 * len(records) + len(more), wait_for)
        assert sorted(admin.execute(query).fetchall()) == [(2, 6), (3, 7)]


def test_an_end_without_a_version_ends_any_and_a_newer_state_brings_the_key_back(
    make, model, admin, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    records = [
        (1, 5, False),
        (1, None, True),
        # As an owner writes it that counts from one again.
        (1, 1, False),
        (2, 5, False),
        (2, None, True),
        (3, None, True),
        (3, 2, False),
        (4, 3, False),
    ]
    expected = [(1, 1), (3, 2), (4, 3)]
    query = "select id, version from model order by id"
    send_each(bootstrap_servers, name, records)
    with running(make(name, "g"), "consumers"):
        await_read(admin, name, "g", len(records), wait_for)
        assert admin.execute(query).fetchall() == expected
    # All come again, in blocks of another size: nothing changes.
    before = admin.execute("select count(*) from written").fetchone()
    for block in (1, 100):
        group = f"again-{block}"
        with running(make(name, group, block), "consumers"):
            await_read(admin, name, group, len(records), wait_for)
        assert admin.execute(query).fetchall() == expected
    assert admin.execute("select count(*) from written").fetchone() == before


@pytest.mark.guarantee("I26")
@pytest.mark.parametrize("block", [1, 100], ids=["one by one", "together"])
def test_records_without_versions_are_compared_by_their_places(
    make, model, admin, bootstrap_servers, topic, kafka_admin, wait_for, block
):
    name = topic(1)
    states = [(key, n) for n in range(5) for key in KEYS]
    producer = make_producer(bootstrap_servers)
    for key, n in states:
        producer.produce(name, key=str(key), value=f'{{"n": {n}}}')
    assert producer.flush(30) == 0
    with running(make(name, "g", block), "consumers"):
        await_read(admin, name, "g", len(states), wait_for)
    grow_topic(kafka_admin, name, 3)
    # Most keys have another partition now, whose offsets begin anew.
    producer = make_producer(bootstrap_servers)
    for key in KEYS:
        value = None if key % 4 == 0 else '{"n": 7}'
        producer.produce(name, key=str(key), value=value)
    assert producer.flush(30) == 0
    with running(make(name, "g", block), "consumers"):
        await_read(admin, name, "g", len(states) + len(KEYS), wait_for)
    query = "select id, version, n from model order by id"
    expected = [(key, None, 7) for key in KEYS if key % 4]
    assert admin.execute(query).fetchall() == expected
    with running(make(name, "again", block), "consumers"):
        await_read(admin, name, "again", len(states) + len(KEYS), wait_for)
    assert admin.execute(query).fetchall() == expected


def test_a_state_with_a_version_follows_one_without(
    make, model, admin, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    records = [(1, None, False), (1, 3, False), (2, 3, False), (2, None, False)]
    query = "select id, version from model order by id"
    for group in ("g", "again"):
        if group == "g":
            send_each(bootstrap_servers, name, records)
        with running(make(name, group, 1), "consumers"):
            await_read(admin, name, group, len(records), wait_for)
        assert admin.execute(query).fetchall() == [(1, 3), (2, None)]


def test_a_column_that_the_table_lacks_is_named_until_it_is_there(
    make, admin, bootstrap_servers, topic, wait_for
):
    admin.execute("create table model (id int primary key, version bigint)")
    name = topic(1)
    send(bootstrap_servers, name, [(1, 1)])
    with heard("record.failed") as failed, running(make(name, "g"), "consumers"):
        wait_for(lambda: failed, timeout=30, what="it fails")
        ((_, fields), *_) = failed
        assert "the table model lacks n" in str(fields["error"])
        admin.execute("alter table model add column n int")
        await_read(admin, name, "g", 1, wait_for)
    assert admin.execute("select * from model").fetchall() == [(1, 1, 1)]


@pytest.mark.parametrize("block", [1, 100], ids=["one by one", "together"])
def test_a_record_without_a_key_stops_its_partition(
    make, model, admin, bootstrap_servers, topic, wait_for, block
):
    name = topic(1)
    producer = make_producer(bootstrap_servers)
    producer.produce(name, key="1", value='{"n": 1}', headers={"ce_version": "1"})
    producer.produce(name, value='{"n": 1}', headers={"ce_version": "1"})
    assert producer.flush(30) == 0
    with heard("record.failed") as failed, running(make(name, "g", block), "consumers"):
        wait_for(lambda: failed, timeout=30, what="it fails")
        await_read(admin, name, "g", 1, wait_for)
    ((_, fields), *_) = failed
    assert fields["offset"] == 1
    assert "has no key" in str(fields["error"])


def test_keys_that_went_long_ago_are_forgotten(database, admin, wait_for):
    admin.execute(
        "insert into jobs_lib.model_keys (model, key, version, noted_at)"
        " select 'model', 'k' || n, n, now() - make_interval(days => n)"
        " from generate_series(25, 40) n"
    )
    maintenance = Maintenance(database, {1})
    maintenance.start()
    wait_for(
        lambda: count(admin, "model_keys") == 5,
        timeout=30,
        what="the oldest are forgotten",
    )
    maintenance.stop()
    rows = admin.execute("select min(version), max(version) from jobs_lib.model_keys")
    assert rows.fetchone() == (25, 29)


def test_a_block_that_was_read_ahead_is_read_again_if_the_offset_moves(
    make, model, admin, connect, bootstrap_servers, topic, wait_for, monkeypatch
):
    name = topic(4)
    records = [(key, version, False) for version in range(1, 6) for key in range(200)]
    send_each(bootstrap_servers, name, records)
    taken: list[Progress] = []
    take_ahead = Queues.take_ahead

    def note(queues):
        progress = take_ahead(queues)
        if progress is not None:
            taken.append(progress)
        return progress

    take, all_wait = Queues.take, threading.Event()

    def take_late(queues):
        # The first block is taken once there is one to read ahead.
        with queues.changed:
            if sum(bool(one.waiting) for one in queues.partitions.values()) == 4:
                all_wait.set()
        return take(queues) if all_wait.wait(0.05) else None

    monkeypatch.setattr(Queues, "take_ahead", note)
    monkeypatch.setattr(Queues, "take", take_late)
    with connect() as blocker:
        # While the database waits for this lock, blocks of other partitions are read.
        blocker.execute("lock table model in exclusive mode")
        with running(make(name, "g", 10), "consumers"):
            wait_for(lambda: taken, timeout=30, what="a block is read ahead")
            admin.execute("update jobs_lib.offsets set next_offset = 0")
            blocker.commit()
            await_read(admin, name, "g", len(records), wait_for)
    rows = admin.execute("select id, version from model").fetchall()
    assert sorted(rows) == [(key, 5) for key in range(200)]


def test_a_mapping_that_hangs_as_it_reads_ahead_holds_up_no_other_partition(
    database_url, model, admin, connect, bootstrap_servers, topic, wait_for, monkeypatch
):
    name = topic(4)
    app = make_app(
        database_url, kafka_bootstrap_servers=bootstrap_servers, consumer_block=3
    )
    ahead, hangs, goes_on = threading.local(), threading.Event(), threading.Event()
    read_ahead = Consumer._read_ahead

    def note(consumer, number) -> None:
        ahead.reads = True
        try:
            read_ahead(consumer, number)
        finally:
            ahead.reads = False

    monkeypatch.setattr(Consumer, "_read_ahead", note)

    @app.read_model(name, table="model", key="id", group="g")
    def row(record):
        if getattr(ahead, "reads", False) and not goes_on.is_set():
            hangs.set()
            goes_on.wait(60)
        return {"n": record.value["n"]}

    records = [(key, version, False) for version in range(1, 6) for key in range(200)]
    send_each(bootstrap_servers, name, records)
    # As for a partition that another process takes over.
    lock = "select from jobs_lib.origins where role = 'consume:g' for update nowait"

    def is_free() -> bool:
        with connect() as other, suppress(psycopg.errors.LockNotAvailable):
            return other.execute(lock).rowcount == 4
        return False

    with running(app, "consumers"):
        try:
            assert hangs.wait(60)
            wait_for(is_free, timeout=30, what="no partition is locked")
            (read,) = admin.execute("select count(*) from model").fetchone()
            assert read > 0
        finally:
            goes_on.set()
        await_read(admin, name, "g", len(records), wait_for)
