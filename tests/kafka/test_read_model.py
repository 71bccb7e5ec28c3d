"""Read models: no record brings a key back, however late or often it comes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.service.maintenance import Maintenance
from tests.support.apps import count, make_app, running
from tests.support.records import make_producer

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    bootstrap_servers: str, topic: str, records: Iterable[tuple[int, int, bool]]
) -> None:
    """Send versions of keys, each a state or an end."""
    producer = make_producer(bootstrap_servers)
    for key, version, end in records:
        value = None if end else f'{{"n": {version}}}'
        headers: Any = {"ce_version": str(version)}
        producer.produce(topic, key=str(key), value=value, headers=headers)
    assert producer.flush(30) == 0


def await_read(admin, topic: str, group: str, records: int, wait_for) -> None:
    query = (
        "select coalesce(sum(next_offset), 0) from jobs_lib.offsets"
        " where topic = %s and consumer_group = %s"
    )
    wait_for(
        lambda: admin.execute(query, (topic, group)).fetchone() == (records,),
        timeout=30,
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


def test_keys_that_went_long_ago_are_forgotten(database, admin, wait_for):
    admin.execute(
        "insert into jobs_lib.model_keys (model, key, version, noted_at)"
        " select 'model', 'k' || n, n, now() - make_interval(days => n)"
        " from generate_series(25, 40) n"
    )
    maintenance = Maintenance(database, {1})
    maintenance.start()
    wait_for(lambda: count(admin, "model_keys") == 5, what="the oldest are forgotten")
    maintenance.stop()
    rows = admin.execute("select min(version), max(version) from jobs_lib.model_keys")
    assert rows.fetchone() == (25, 29)
