"""A refused record is held with the later rows of its key; all others are sent."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from click.testing import CliRunner
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from jobs_lib import Gone, operating
from jobs_lib.cli.main import cli
from jobs_lib.errors import OperatingError
from jobs_lib.outbox.producers import ShardProducers
from jobs_lib.outbox.relay_thread import RelayThread
from jobs_lib.partitioner import choose_shard
from tests import support
from tests.support.apps import count, count_unsent, heard, make_app, running
from tests.support.canary import VALUE
from tests.support.records import read_topic

LIMIT = 100_000
SLOW = 150
LARGE = VALUE.encode() + b"x" * 3 * LIMIT


@pytest.fixture
def app(database_url, bootstrap_servers):
    """An app with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)


@pytest.fixture
def narrow(app, topic):
    """A topic that accepts records of a hundred kilobytes."""
    name = topic(
        1, config={"max.message.bytes": str(LIMIT), "compression.type": "uncompressed"}
    )
    return app.topic(name, value=bytes)


@pytest.fixture
def widen(kafka_admin, narrow):
    """A function that makes the topic accept larger records."""

    def widen() -> None:
        entry = ConfigEntry(
            "max.message.bytes",
            str(10 * LIMIT),
            incremental_operation=AlterConfigOpType.SET,
        )
        resource = ConfigResource(
            ResourceType.TOPIC, narrow.name, incremental_configs=[entry]
        )
        for future in kafka_admin.incremental_alter_configs([resource]).values():
            future.result()

    return widen


@pytest.fixture
def await_left(admin, database, wait_for):
    """A function that waits until this many rows are left, all of them held."""

    def await_left(rows: int) -> None:
        def tell() -> str:
            held, holds = count(admin, "held_rows"), operating.list_holds(database)
            return f"{rows} rows are held: {held}, by {holds}"

        wait_for(
            lambda: count_unsent(admin) == (0, rows),
            timeout=60,
            what=tell,
        )

    return await_left


def values(bootstrap_servers, topic) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for record in read_topic(bootstrap_servers, topic.name):
        found.setdefault(record.key, []).append(record.value or b"")
    return found


@pytest.mark.guarantee("FK10")
@pytest.mark.parametrize("size", [3 * LIMIT, 20 * LIMIT], ids=["broker", "client"])
def test_a_record_that_is_too_large_is_held_with_its_key_alone(
    app, database, admin, narrow, connect, bootstrap_servers, await_left, widen, size
):
    too_large = VALUE.encode() + b"x" * size
    # Python refuses values larger than the client accepts, so this goes past it.
    write = (
        "insert into jobs_lib.outbox (shard, topic, key, value) values (%s,%s,%s,%s)"
    )
    name = narrow.name
    with connect() as connection:
        for n in range(20):
            for key in ("a", "b", "c", "d"):
                large = (key, n) in {("b", 3), ("c", 7)}
                value = too_large if large else b"%d" % n
                shard = choose_shard(name, key, 16)
                connection.execute(write, (shard, name, key, value))
        connection.execute(write, (0, name, None, too_large))
        narrow.send(connection, key=None, value=b"small")
    with running(app, "relay"):
        await_left(17 + 13 + 1)
        # Later rows of the key wait behind it, and no other rows do.
        with connect() as connection:
            narrow.send(connection, key="b", value=b"20")
            narrow.send(connection, key="a", value=b"20")
        await_left(18 + 13 + 1)
        found = values(bootstrap_servers, narrow)
        assert found["a"] == [b"%d" % n for n in range(21)]
        assert found["b"] == [b"%d" % n for n in range(3)]
        assert found["c"] == [b"%d" % n for n in range(7)]
        assert found[""] == [b"small"]
        holds = {hold.key: hold for hold in operating.list_holds(database)}
        assert {key: hold.rows for key, hold in holds.items()} == {
            "b": 18,
            "c": 13,
            None: 1,
        }
        assert all("SIZE_TOO_LARGE" in hold.error for hold in holds.values())
        if size > 10 * LIMIT:
            return
        # Meanwhile the relay tries none of them, so the command handles all three.
        admin.execute("update jobs_lib.holds set retry_at = now() + interval '9 min'")
        widen()
        assert operating.retry_holds(database) == 3
        await_left(0)
    found = values(bootstrap_servers, narrow)
    for key, place in (("b", 3), ("c", 7)):
        expected = [b"%d" % n for n in range(21 if key == "b" else 20)]
        expected[place] = too_large
        assert found[key] == expected
    assert not operating.list_holds(database)


def test_a_record_as_large_as_its_topic_is_declared_is_sent(
    app, topic, connect, bootstrap_servers, wait_for, admin
):
    limit = {"max.message.bytes": "3000000"}
    wide = app.topic(topic(1, config=limit), value=bytes, config=limit)
    with connect() as connection:
        wide.send(connection, key="a", value=b"x" * 2_500_000)
    with running(app, "relay"):
        wait_for(lambda: count_unsent(admin) == (0, 0), timeout=60, what="it is sent")
    assert len(values(bootstrap_servers, wide)["a"][0]) == 2_500_000


@pytest.mark.guarantee("FK10")
def test_a_record_without_a_key_is_held_alone_where_kafka_wants_one(
    app, database, topic, connect, bootstrap_servers, await_left
):
    # Python requires a key; SQL does not know which topics are compacted.
    states = app.topic(topic(1, config={"cleanup.policy": "compact"}), value=int)
    write = "select jobs_lib.send(%s, %s, %s)"
    with connect() as connection:
        for key, value in (("a", "1"), (None, "2"), ("a", "3"), (None, "4")):
            connection.execute(write, (states.name, key, value))
    with running(app, "relay"):
        await_left(2)
        with connect() as connection:
            states.send(connection, key="a", value=5)
        await_left(2)
        assert values(bootstrap_servers, states) == {"a": [b"1", b"3", b"5"]}
        holds = operating.list_holds(database)
        assert [(hold.key, hold.rows) for hold in holds] == [(None, 1), (None, 1)]
        assert all("INVALID_RECORD" in hold.error for hold in holds), holds


@pytest.mark.expects("loop.failed", "origins.lost")
@pytest.mark.guarantee("I20")
def test_a_relay_replaced_while_it_looks_for_refused_records_sends_nothing(
    app, database, narrow, connect, admin, bootstrap_servers, monkeypatch, wait_for
):
    made: Counter[int] = Counter()
    make = ShardProducers._make
    # This process lives for long, so that the shard is not taken again.
    (other,) = admin.execute(
        "insert into jobs_lib.processes (id, pod, roles, host, pid, version,"
        " heartbeat_at) values (gen_random_uuid(), 'other', '{}', '', 1, '',"
        " clock_timestamp() + interval '1 hour') returning id"
    ).fetchone()

    def replaced(self, shard):
        # Another relay takes over between the broker's refusal and the next producer.
        made[shard] += 1
        if made[shard] == 2:
            admin.execute(
                "update jobs_lib.origins set owner = %s, epoch = epoch + 1"
                " where role = 'relay' and origin = %s",
                (other, f"shard/{shard}"),
            )
        return make(self, shard)

    monkeypatch.setattr(ShardProducers, "_make", replaced)
    with connect() as connection:
        narrow.send(connection, key="a", value=b"before it")
        narrow.send(connection, key="a", value=LARGE)
    with heard("loop.failed") as failed, running(app, "relay"):
        wait_for(
            lambda: any(f["error"].startswith("FencedError") for _, f in failed),
            timeout=30,
            what=lambda: f"it is fenced: {failed}",
        )
        assert values(bootstrap_servers, narrow) == {}
        assert count(admin, "holds") == 0


@pytest.mark.guarantee("FK9")
def test_the_rows_of_a_missing_topic_wait_for_it(
    app, database, admin, topic, connect, bootstrap_servers, kafka_admin, await_left
):
    missing = app.topic(f"{topic()}-missing", value=int)
    there = app.topic(topic(), value=int)
    with connect() as connection:
        for n in range(100):
            missing.send(connection, key=f"k{n % 20}", value=n)
            there.send(connection, key=f"k{n % 20}", value=n)
    with running(app, "relay"):
        await_left(100)
        assert len(read_topic(bootstrap_servers, there.name)) == 100
        (hold,) = operating.list_holds(database)
        assert (hold.topic, hold.key, hold.rows) == (missing.name, None, 100)
        assert "UNKNOWN_TOPIC" in hold.error
        # There is one attempt, however many shards missed the topic before the hold.
        # More come only with time: 5 seconds later, 10 after that, and so on.
        (since,) = admin.execute(
            "select clock_timestamp() - %s", [hold.since]
        ).fetchone()
        assert 5 * (2 ** (hold.attempts - 1) - 1) <= since.total_seconds()
        support.create_topic(kafka_admin, missing.name, 4, None)
        try:
            operating.retry_holds(database, topic=missing.name)
            await_left(0)
            found = values(bootstrap_servers, missing)
        finally:
            support.delete_topics(kafka_admin, [missing.name])
    for n in range(20):
        # Rows that are tried singly may come again; none is missing or out of order.
        assert [int(v) for v in found[f"k{n}"]] == list(range(n, 100, 20))


@pytest.mark.guarantee("FK10")
def test_a_refused_row_at_the_head_of_a_topic_that_is_back_holds_its_key_alone(
    app, database, admin, topic, connect, bootstrap_servers, kafka_admin, await_left
):
    missing = app.topic(f"{topic()}-missing", value=bytes)
    with connect() as connection:
        for key, value in (("a", LARGE), ("a", b"2"), ("b", LARGE), ("c", b"3")):
            missing.send(connection, key=key, value=value)
    with running(app, "relay"):
        await_left(4)
        # It was missing for hours.
        admin.execute("update jobs_lib.holds set attempts = 20")
        config = {
            "max.message.bytes": str(LIMIT),
            "compression.type": "uncompressed",
        }
        support.create_topic(kafka_admin, missing.name, 4, config)
        try:
            operating.retry_holds(database, topic=missing.name)
            await_left(3)
            found = values(bootstrap_servers, missing)
        finally:
            support.delete_topics(kafka_admin, [missing.name])
    assert found == {"c": [b"3"]}
    holds = operating.list_holds(database)
    assert {hold.key: hold.rows for hold in holds} == {"a": 2, "b": 1}
    assert all("SIZE_TOO_LARGE" in hold.error for hold in holds)


def test_a_held_row_leaves_once_although_the_server_was_started_again(
    app, admin, topic, connect, bootstrap_servers, kafka_admin, await_left, monkeypatch
):
    relays: list[RelayThread] = []
    start = RelayThread.start

    def keep(self: RelayThread) -> None:
        relays.append(self)
        start(self)

    monkeypatch.setattr(RelayThread, "start", keep)
    missing = app.topic(f"{topic()}-missing", value=int)
    with connect() as connection:
        missing.send(connection, key="a", value=1)
    with running(app, "relay"):
        await_left(1)
        # As after a restart: no row but the held one tells which server it is now. No
        # server was started one microsecond after the epoch.
        for relay in relays:
            relay._server = 1
        support.create_topic(kafka_admin, missing.name, 1, None)
        try:
            admin.execute("update jobs_lib.holds set retry_at = now()")
            await_left(0)
            found = values(bootstrap_servers, missing)
        finally:
            support.delete_topics(kafka_admin, [missing.name])
    assert found == {"a": [b"1"]}


def test_a_state_that_cannot_be_read_holds_its_key_alone(
    app, database, topic, connect, bootstrap_servers, await_left
):
    states = app.topic(topic(1), value=int, compacted=True)
    broken = {"bad"}

    @app.entity(states, source="states", key="id")
    def load(connection, keys: list[str]) -> dict[str, int]:
        if broken & {*keys}:
            connection.execute("select 1 / 0")
        return dict.fromkeys(keys, 1)

    with connect() as connection:
        for key in ("good", "bad", "fine"):
            states.send_current(connection, key=key)
    with running(app, "relay"):
        await_left(1)
        assert {*values(bootstrap_servers, states)} == {"good", "fine"}
        (hold,) = operating.list_holds(database)
        assert hold.key == "bad"
        assert "DivisionByZero" in hold.error
        broken.clear()
        operating.retry_holds(database, key="bad")
        await_left(0)
    assert {*values(bootstrap_servers, states)} == {"good", "bad", "fine"}


def test_a_loaded_version_that_no_consumer_reads_holds_its_key_alone(
    app, database, topic, connect, bootstrap_servers, await_left
):
    states = app.topic(topic(1), value=dict[str, int], compacted=True)
    found = {"here": {"version": -1}, "gone": Gone(-1), "good": {"version": 0}}
    app.entity(states, source="states", key="id")(lambda _, keys: found)
    with connect() as connection:
        for key in found:
            states.send_current(connection, key=key)
    with running(app, "relay"):
        await_left(2)
        holds = {one.key: one.error for one in operating.list_holds(database)}
        assert {*holds} == {"here", "gone"}
        assert all("is below 0: give a number" in error for error in holds.values())
        found |= {"here": {"version": 1}, "gone": Gone(1)}
        operating.retry_holds(database)
        await_left(0)
    versions = {
        one.key: one.headers["ce_version"]
        for one in read_topic(bootstrap_servers, states.name)
    }
    assert versions == {"here": "1", "gone": "1", "good": "0"}


@pytest.mark.guarantee("FK10")
@pytest.mark.parametrize("then", ["running", "cancelled", "a live row"])
def test_a_held_row_of_a_re_export_leaves_only_while_that_runs(
    app, database, topic, admin, connect, bootstrap_servers, await_left, wait_for, then
):
    states = app.topic(topic(1), value=int, compacted=True)
    broken = {"bad", "other"}

    @app.entity(states, source="states", key="id")
    def load(connection, keys: list[str]) -> dict[str, int]:
        if broken & {*keys}:
            raise ValueError("not now")
        return dict.fromkeys(keys, 1)

    admin.execute(
        "insert into jobs_lib.reexports (id, entity, topic, rate, state, total)"
        " values (1, 'states', %s, 60000, 'running', 1)",
        [states.name],
    )
    admin.execute(
        "insert into jobs_lib.outbox"
        " (shard, class, topic, key, entity, cause, reexport_id)"
        " values (%s, 1, %s, 'bad', 'states', 'reexport', 1)",
        [choose_shard(states.name, "bad", 16), states.name],
    )
    with connect() as connection:
        states.send_current(connection, key="other")
    with running(app, "relay"):
        await_left(2)
        admin.execute("update jobs_lib.reexports set state = 'paused'")
        broken.clear()

        def is_let_go() -> bool:
            operating.retry_holds(database)
            return count_unsent(admin) == (0, 1)

        wait_for(is_let_go, timeout=60, what="the other one left")
        # Both are due at each look, and the older one comes first.
        assert values(bootstrap_servers, states) == {"other": [b"1"]}
        if then == "a live row":
            with connect() as connection:
                states.send(connection, key="bad", value=2)
        else:
            admin.execute("update jobs_lib.reexports set state = %s", [then])
        operating.retry_holds(database)
        await_left(0)
    sent = {"running": [b"1"], "cancelled": None, "a live row": [b"2"]}[then]
    assert values(bootstrap_servers, states).get("bad") == sent
    counted = admin.execute("select sent, superseded from jobs_lib.reexports")
    assert counted.fetchone() == ((1, 0) if then == "running" else (0, 1))
    assert not operating.list_holds(database)


@pytest.mark.guarantee("W28", "W34")
def test_a_held_live_row_does_not_wait_for_held_rows_of_a_slow_re_export(
    app, topic, admin, bootstrap_servers, wait_for
):
    states = app.topic(topic(1), value=int, compacted=True)
    app.entity(states, source="states", key="id")(
        lambda _connection, keys: dict.fromkeys(keys, 1)
    )
    admin.execute(
        "insert into jobs_lib.reexports (id, entity, topic, rate, state, total, tokens)"
        " values (1, 'states', %s, 1, 'running', %s, 1)",
        (states.name, SLOW),
    )
    # More than are tried at once, in one shard; all are due, and the live one is last.
    keys = [
        key
        for key in (f"k{n}" for n in range(100 * SLOW))
        if choose_shard(states.name, key, 16) == 0
    ]
    for n, key in enumerate(keys[: SLOW + 1]):
        admin.execute(
            "with row as (insert into jobs_lib.held_rows (shard, class, id, topic, key,"
            " entity, cause, reexport_id, created_at)"
            " values (0, %(class)s, %(id)s, %(topic)s, %(key)s, 'states', 'live',"
            " %(reexport)s, now()))"
            " insert into jobs_lib.holds (topic, key, error, retry_at, attempts)"
            " values (%(topic)s, %(key)s, 'not now', clock_timestamp(), 3)",
            {
                "class": int(n < SLOW),
                "id": n + 1,
                "topic": states.name,
                "key": key,
                "reexport": 1 if n < SLOW else None,
            },
        )
    with running(app, "relay"):
        wait_for(
            lambda: not count(admin, "held_rows where class = 0"),
            timeout=60,
            what="the live one left",
        )
    # At one a minute.
    assert count(admin, "held_rows") >= SLOW - 2
    assert keys[SLOW] in values(bootstrap_servers, states)
    # It is no failure to wait for the rate.
    assert not count(admin, "holds where attempts <> 3")


def test_a_held_row_is_shown_and_dropped_and_the_next_ones_go(
    app, database, admin, narrow, connect, bootstrap_servers, await_left, database_url
):
    run = CliRunner(env={"JOBS_LIB_DATABASE_URL": database_url}).invoke
    with connect() as connection:
        large = narrow.send(connection, key="a", value=LARGE)
        narrow.send(connection, key="a", value=b"next")
        other = narrow.send(connection, key="b", value=LARGE)
    with running(app, "relay"):
        await_left(3)
        status = json.loads(run(cli, ["outbox", "status", "--json"]).stdout)
        assert [(one["topic"], one["kind"], one["rows"]) for one in status] == [
            (narrow.name, "held", 3)
        ]
        holds = json.loads(run(cli, ["outbox", "status", "--holds", "--json"]).stdout)
        assert {one["key"]: one["rows"] for one in holds} == {"a": 2, "b": 1}
        shown = json.loads(run(cli, ["outbox", "show", str(large), "--json"]).stdout)
        assert (shown["kind"], shown["key"]) == ("held", "a")
        assert "SIZE_TOO_LARGE" in shown["error"]
        assert run(cli, ["outbox", "drop", str(large)], input="n\n").exit_code == 1
        assert run(cli, ["outbox", "drop", str(large), "--yes"]).exit_code == 0
        await_left(1)
        assert values(bootstrap_servers, narrow) == {"a": [b"next"]}
        assert run(cli, ["outbox", "drop", str(other), "--yes"]).exit_code == 0
    assert not operating.list_holds(database)
    assert not count(admin, "touched"), "nothing of that was a stranger's"
    with pytest.raises(OperatingError, match="is not held"):
        operating.drop_row(database, other)
    assert operating.show_row(database, other) is None
