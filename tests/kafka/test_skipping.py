"""Records that cannot be read or handled: they stop their partition, or are skipped."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from jobs_lib.operating import check, list_owners
from jobs_lib.operating.rewinds import replay
from tests.support.apps import heard, running
from tests.support.canary import VALUE
from tests.support.records import key_of, produce, read_topic


@pytest.fixture
def read_skipped(admin):
    """A function that reads the offsets of a topic's skipped records, and the errors.

    Each is of the topic that the partition's offset belongs to.
    """

    def read(topic: str) -> dict[int, str]:
        rows = admin.execute(
            "select s.record_offset, s.error from jobs_lib.skipped s"
            " join jobs_lib.offsets using (consumer_group, topic, partition, topic_id)"
            " where topic = %s order by 1",
            (topic,),
        )
        return dict(rows.fetchall())

    return read


@pytest.fixture
def read_failures(admin):
    """A function that reads what the table says of failing records, by partition."""

    def read(topic: str) -> dict[int, tuple[int, str, Any]]:
        rows = admin.execute(
            "select partition, failed_offset, failure, failing_since"
            " from jobs_lib.offsets where topic = %s and failed_offset is not null",
            (topic,),
        )
        return {number: tuple(noted) for number, *noted in rows.fetchall()}

    return read


@pytest.fixture
def seen(admin):
    """A table for what handlers have seen; no number may be there twice at a commit."""
    admin.execute(
        "create table seen (at bigserial, partition int,"
        " n int check (n >= 0) unique deferrable initially deferred)"
    )
    return "insert into seen (partition, n) values (%s, %s)"


@pytest.mark.guarantee("W68", "W69", "FK12")
def test_whoever_looks_sees_which_record_stops_which_partition(
    make,
    database,
    bootstrap_servers,
    topic,
    seen,
    read_offsets,
    read_failures,
    wait_for,
):
    name = topic(2)
    app = make()
    attempts = 0
    fixed = threading.Event()

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        nonlocal attempts
        if record.value == 20 and not fixed.is_set():
            attempts += 1
            raise ValueError(f"attempt {attempts}")
        conn.execute(seen, (record.partition, record.value))

    def find_owned() -> list[tuple[Any, ...]]:
        return [
            (one.origin, one.failed_offset, one.failure, one.failing_since)
            for one in list_owners(database, app.settings)
            if one.role == f"consume:{name}-g"
        ]

    produce(bootstrap_servers, name, [(key_of(0, 2), n) for n in range(25)])
    produce(bootstrap_servers, name, [(key_of(1, 2), n) for n in range(100, 105)])
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: read_failures(name), timeout=30, what="it is written down")
        first = read_failures(name)[0]
        # It is written again where the error says something else, and not more often
        # than once in a second.
        wait_for(lambda: read_failures(name)[0] != first, timeout=30, what="once more")
        offset, error, since = read_failures(name)[0]
        assert (offset, since) == (20, first[2])
        assert error in [fields["error"] for _, fields in failed]
        wait_for(lambda: read_offsets(name) == {0: 20, 1: 5}, timeout=30, what="in")
        assert read_failures(name).keys() == {0}
        (stopped, going_on) = find_owned()
        assert stopped[0] == f"{name}/0"
        assert stopped[1] == 20
        assert stopped[2].startswith("ValueError: attempt ")
        assert stopped[3] == since
        assert going_on == (f"{name}/1", None, None, None)
        (found,) = [
            one
            for one in check(database, app.settings)
            if one.check == "stopped partitions"
        ]
        assert found.level == "error"
        assert f"{name}/0 of the group '{name}-g' stands still at offset 20" in (
            found.what
        )
        fixed.set()
        wait_for(lambda: read_offsets(name)[0] == 25, timeout=30, what="it goes on")
    assert read_failures(name) == {}
    assert find_owned()[0][1:] == (None, None, None)


def test_a_record_that_costs_its_connection_is_written_down(
    make, bootstrap_servers, topic, read_failures, wait_for
):
    name = topic(1)
    app = make()

    @app.consumer(name, group=f"{name}-g", on_error="skip")
    def handle(record, conn) -> None:
        conn.execute("select pg_terminate_backend(pg_backend_pid())")

    produce(bootstrap_servers, name, [("k", 1)])
    with heard("record.failed", "loop.failed"), running(app, "consumers"):
        wait_for(lambda: read_failures(name), timeout=30, what="it is written down")
    assert read_failures(name)[0][0] == 0


def raise_error(record, conn) -> None:
    raise LookupError("no price")


def break_rule(record, conn) -> None:
    conn.execute("insert into seen (n) values (-1)")


def break_rule_at_commit(record, conn) -> None:
    conn.execute("insert into seen (n) values (1), (1)")


def end_transaction(record, conn) -> None:
    conn.execute("rollback")
    conn.execute("select 1")


FAULTS = {
    "a handler that raises": (raise_error, None),
    "a row that is refused": (break_rule, None),
    "a row that the commit refuses": (break_rule_at_commit, None),
    "a transaction that is over": (end_transaction, None),
    "a value that is no JSON": (None, b"{" + VALUE.encode()),
    "a value of another type": (None, b'"' + VALUE.encode() + b'"'),
    "an empty value": (None, b""),
}


@pytest.mark.guarantee("W70", "W72", "FK12", "I28")
@pytest.mark.parametrize(("spoil", "poison"), FAULTS.values(), ids=FAULTS)
def test_a_record_at_fault_is_skipped_and_the_rest_goes_on(
    make, database, admin, bootstrap_servers, topic, seen, read_offsets, read_skipped,
    wait_for, spoil, poison, read_seen
):  # fmt: skip
    name = topic(1)
    app = make()
    calls: Counter[int] = Counter()
    bad = {0, 57, 58, 99}

    @app.consumer(name, group=f"{name}-g", value=int, on_error="skip")
    def handle(record, conn) -> None:
        calls[record.value] += 1
        if record.value in bad:
            spoil(record, conn)
        else:
            conn.execute(seen, (record.partition, record.value))

    values = [(poison or n) if n in bad else n for n in range(100)]
    produce(bootstrap_servers, name, [("k", value) for value in values])
    with (
        heard("record.skipped") as skipped,
        heard("record.failed") as failed,
        running(app, "consumers"),
    ):
        wait_for(lambda: read_offsets(name) == {0: 100}, timeout=60, what="all is in")
    errors = read_skipped(name)
    assert errors.keys() == bad
    assert VALUE not in str(errors)
    assert read_seen() == [n for n in range(100) if n not in bad]
    assert max(calls[n] for n in range(100) if n not in bad) <= 2
    # The first is told at once, and the others with their number.
    first = skipped[0][1]
    assert first == {
        "group": f"{name}-g",
        "origin": f"{name}/0",
        "offset": 0,
        "error": errors[0],
        "count": 1,
    }
    assert sum(fields["count"] for _, fields in skipped) == len(bad)
    assert not failed
    # Nothing is put aside: the topic keeps the record, and the check says where.
    assert len(read_topic(bootstrap_servers, name)) == 100
    (found,) = [
        one for one in check(database, app.settings) if one.check == "skipped records"
    ]
    assert f"4 skipped in {name}/0 of the group" in found.what
    assert "the first at offset 0" in found.what
    replay = f"`jobs-lib readmodel replay MODULE:APP {name} --group {name}-g`"
    assert f"repair the cause, then {replay}" in found.way_out


@pytest.mark.guarantee("W70")
def test_a_topic_of_nothing_but_bad_records_is_read_to_its_end(
    make, bootstrap_servers, topic, read_offsets, read_skipped, wait_for
):
    name = topic(1)
    # So few are read ahead that the partition is paused while the first is in hand.
    app = make(consumer_block=1)
    begun, go = threading.Event(), threading.Event()

    @app.consumer(name, group=f"{name}-g", on_error="skip")
    def handle(record, conn) -> None:
        begun.set()
        go.wait(30)
        raise_error(record, conn)

    produce(bootstrap_servers, name, [("k", n) for n in range(30)])
    with running(app, "consumers"):
        assert begun.wait(60)
        produce(bootstrap_servers, name, [("k", n) for n in range(30, 40)])
        go.set()
        wait_for(lambda: read_offsets(name) == {0: 40}, timeout=60, what="all is read")
    assert read_skipped(name) == dict.fromkeys(range(40), "LookupError: no price")


@pytest.mark.guarantee("W70")
def test_a_read_model_skips_what_it_cannot_read_map_or_write(
    make, admin, bootstrap_servers, topic, read_offsets, read_skipped, wait_for
):
    admin.execute(
        "create table rows (key text primary key, version bigint, n int check (n <> 7))"
    )
    name = topic(1)
    app = make()

    @app.read_model(name, table="rows", key="key", group=f"{name}-g", on_error="skip")
    def row(record):
        return {"n": record.value["n"]}

    values: list[Any] = [{"n": n} for n in range(10)]
    values[3], values[5] = b"{", {"m": 5}
    produce(
        bootstrap_servers, name, [(f"k{n}", value) for n, value in enumerate(values)]
    )
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 10}, timeout=60, what="all is read")
    errors = read_skipped(name)
    assert errors.keys() == {3, 5, 7}
    assert "cannot be read" in errors[3]
    assert "KeyError" in errors[5]
    assert "is refused: CheckViolation" in errors[7]
    found = admin.execute("select n from rows order by n").fetchall()
    assert found == [(n,) for n in (0, 1, 2, 4, 6, 8, 9)]


@pytest.mark.guarantee("W63", "W70")
def test_a_read_model_skips_a_version_that_is_no_number(
    make, admin, bootstrap_servers, topic, read_offsets, read_skipped, wait_for
):
    admin.execute("create table rows (key text primary key, version bigint, n int)")
    name = topic(1)
    app = make()

    @app.read_model(name, table="rows", key="key", group=f"{name}-g", on_error="skip")
    def row(record):
        return {"n": record.value}

    for n, version in enumerate(["12", "v13", "1" * 20, str(2**63), "", "2"]):
        headers = {"ce_version": version}
        produce(bootstrap_servers, name, [(f"k{n // 4}", n)], headers=headers)
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 6}, timeout=60, what="all is read")
    errors = read_skipped(name)
    assert errors.keys() == {1, 2, 3}
    for offset, error in errors.items():
        assert f"{name}/0 offset {offset}" in error
        assert "its header ce_version is no whole number" in error
    # An older state has not taken the newer one back, and an empty one is none.
    found = admin.execute("select key, version, n from rows order by key").fetchall()
    assert found == [("k0", 12, 0), ("k1", 2, 5)]


@pytest.mark.guarantee("W70")
@pytest.mark.parametrize(
    ("lose", "restore", "told"),
    [
        ("rename to gone", "alter table gone rename to rows", "no table rows"),
        ("drop column n", "alter table rows add column n int", "rows lacks n"),
    ],
    ids=["table", "column"],
)
def test_a_read_model_that_loses_its_table_or_a_column_skips_nothing(
    make, admin, bootstrap_servers, topic, read_offsets, read_skipped, wait_for,
    lose, restore, told,
):  # fmt: skip
    admin.execute("create table rows (key text primary key, version bigint, n int)")
    name = topic(1)
    app = make()

    @app.read_model(name, table="rows", key="key", group=f"{name}-g", on_error="skip")
    def row(record):
        return {"n": record.value}

    produce(bootstrap_servers, name, [("k", 0)])
    # The hourly upkeep may meet the table while it is lost, too.
    with (
        heard("record.failed") as failed,
        heard("loop.failed") as upkeep,
        running(app, "consumers"),
    ):
        wait_for(lambda: read_offsets(name) == {0: 1}, timeout=60, what="it is read")
        admin.execute(f"alter table rows {lose}")
        produce(bootstrap_servers, name, [(f"k{n}", n) for n in range(1, 4)])
        wait_for(
            lambda: len([1 for _, one in failed if told in str(one["error"])]) > 1,
            timeout=60,
            what="it stands still",
        )
        assert read_offsets(name) == {0: 1}
        assert read_skipped(name) == {}
        admin.execute(restore)
        wait_for(lambda: read_offsets(name) == {0: 4}, timeout=60, what="it goes on")
    for _, fields in upkeep:
        assert (fields["loop"], told in str(fields["error"])) == ("maintenance", True)
    assert read_skipped(name) == {}
    found = admin.execute("select n from rows order by n").fetchall()
    assert [n for (n,) in found if n] == [1, 2, 3]


@pytest.mark.guarantee("W71", "I28")
def test_a_read_model_equals_its_topic_once_skipped_records_are_read_again(
    make,
    admin,
    database,
    bootstrap_servers,
    topic,
    read_offsets,
    read_skipped,
    wait_for,
):
    admin.execute("create table rows (key text primary key, version bigint, n int)")
    name = topic(1)
    app = make()
    fixed = threading.Event()

    @app.read_model(name, table="rows", key="key", group=f"{name}-g", on_error="skip")
    def row(record):
        if record.value % 3 == 0 and not fixed.is_set():
            raise LookupError("no price")
        return {"n": record.value}

    # The newest states of some keys are skipped, and older ones of others.
    states = [(f"k{n % 8}", n) for n in range(30)]
    produce(bootstrap_servers, name, states)
    with heard("origins.lost"), running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 30}, timeout=60, what="all is read")
        assert read_skipped(name).keys() == {*range(0, 30, 3)}
        fixed.set()
        (rewound,) = replay(app.settings, database, f"{name}-g", name)
        assert (rewound.before, rewound.after, rewound.skipped) == (30, 0, 10)
        wait_for(
            lambda: (
                read_offsets(name) == {0: 30}
                and dict(admin.execute("select key, n from rows").fetchall())
                == dict(states)
            ),
            timeout=60,
            what="the model equals the topic",
        )
    assert read_skipped(name) == {}


def lose_connection(conn) -> None:
    conn.execute("select pg_terminate_backend(pg_backend_pid())")


def wait_for_lock(conn) -> None:
    conn.execute("set local lock_timeout = '10ms'")
    conn.execute("lock table locked")


def use_missing_table(conn) -> None:
    conn.execute("select from missing")


def call_partner(conn) -> None:
    raise ConnectionRefusedError("the partner is away")


@pytest.mark.guarantee("W70")
@pytest.mark.parametrize(
    "fail", [lose_connection, wait_for_lock, use_missing_table, call_partner]
)
def test_a_record_that_is_not_at_fault_is_tried_again(
    make, admin, connect, bootstrap_servers, topic, seen, read_offsets, read_skipped,
    wait_for, fail, read_seen
):  # fmt: skip
    name = topic(1)
    app = make()
    fixed = threading.Event()
    admin.execute("create table locked ()")
    locking = connect()
    locking.execute("lock table locked")

    @app.consumer(name, group=f"{name}-g", on_error="skip")
    def handle(record, conn) -> None:
        if record.value == 5 and not fixed.is_set():
            fail(conn)
        conn.execute(seen, (record.partition, record.value))

    produce(bootstrap_servers, name, [("k", n) for n in range(10)])
    with (
        heard("record.failed") as failed,
        heard("loop.failed"),
        running(app, "consumers"),
    ):
        wait_for(lambda: len(failed) > 2, timeout=60, what="it is tried again")
        fixed.set()
        wait_for(lambda: read_offsets(name) == {0: 10}, timeout=60, what="all is in")
    assert {fields["offset"] for _, fields in failed} == {5}
    assert read_skipped(name) == {}
    assert read_seen() == [*range(10)]


@pytest.mark.guarantee("W70")
def test_a_record_that_fails_only_once_is_not_skipped(
    make,
    admin,
    bootstrap_servers,
    topic,
    seen,
    read_offsets,
    read_skipped,
    wait_for,
    read_seen,
):
    name = topic(1)
    app = make()
    failed: set[int] = set()

    @app.consumer(name, group=f"{name}-g", on_error="skip")
    def handle(record, conn) -> None:
        if record.value in (0, 5) and record.value not in failed:
            failed.add(record.value)
            # Nobody can tell that it was a deadlock, which is over now.
            raise LookupError("no price")
        conn.execute(seen, (record.partition, record.value))

    produce(bootstrap_servers, name, [("k", n) for n in range(10)])
    with running(app, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 10}, timeout=60, what="all is in")
    assert read_skipped(name) == {}
    assert read_seen() == [*range(10)]


@pytest.mark.guarantee("W70")
def test_a_process_that_has_lost_its_partition_skips_nothing(
    make, admin, bootstrap_servers, topic, read_skipped, wait_for
):
    name = topic(1)
    app = make(stale_after=600.0)
    calls = 0
    # This process lives, so that the partition is not taken again.
    (other,) = admin.execute(
        "insert into jobs_lib.processes (id, pod, roles, host, pid, version)"
        " values (gen_random_uuid(), 'other', '{}', '', 1, '') returning id"
    ).fetchone()

    @app.consumer(name, group=f"{name}-g", on_error="skip")
    def handle(record, conn) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            admin.execute(
                "update jobs_lib.origins set epoch = epoch + 1, owner = %s"
                " where role like 'consume:%%'",
                (other,),
            )
            fenced.set()
        raise LookupError("no price")

    fenced = threading.Event()
    produce(bootstrap_servers, name, [("k", 1)])
    with (
        heard("loop.failed") as failed,
        heard("record.skipped") as skipped,
        heard("origins.lost"),
        running(app, "consumers"),
    ):
        assert fenced.wait(60)
        wait_for(lambda: failed, timeout=30, what="it is refused")
    assert "FencedError" in failed[0][1]["error"]
    assert calls == 2
    assert not skipped
    assert read_skipped(name) == {}
