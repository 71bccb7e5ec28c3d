"""The command that finds where the newest change of a key is, and what it waits for."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
from click.testing import CliRunner

from jobs_lib.cli.main import cli
from jobs_lib.errors import OperatingError
from jobs_lib.kafka.places import find_committed_ends
from jobs_lib.operating.where import where
from jobs_lib.outbox.capture import capture_changes
from tests.support.apps import count, make_app, running
from tests.support.canary import VALUE
from tests.support.records import produce
from tests.support.topics import create_topic, delete_topics
from tests.support.transactions import open_transaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib import App
    from jobs_lib.operating.where import Where
    from jobs_lib.operating.where_places import Place

APP = "service_of_where:app"
NOBODY = "127.0.0.1:1"
VERSION = {"ce_version": "1"}


@dataclass
class Aircraft:
    """A state that counts its changes."""

    tail: str
    note: str
    version: int


@pytest.fixture
def name(topic) -> str:
    """A topic of one partition."""
    return topic(1)


@pytest.fixture
def app(make, admin, name) -> App:
    """An app that sends the states of a table, and keeps another table equal to them.

    The function of the read model leaves out what is hidden, and fails at what is bad.
    """
    app = make()
    declare(app, admin, name)
    return app


def declare(app: App, admin: Any, name: str) -> None:
    states = app.topic(name, value=Aircraft, compacted=True, partitions=1)
    admin.execute(
        "create table aircraft (tail text primary key, note text, version int);"
        " create table aircraft_rm (tail text primary key, version bigint, note text)"
    )
    capture_changes(admin, "aircraft", topic=name, key="tail")

    @app.entity(states, source="aircraft", key="tail")
    def load(conn, keys: list[str]) -> dict[str, Aircraft]:
        rows = conn.execute("select * from aircraft where tail = any (%s)", (keys,))
        return {row[0]: Aircraft(*row) for row in rows}

    @app.read_model(name, table="aircraft_rm", key="tail", group=f"{name}-board")
    def aircraft_rm(record) -> dict[str, str] | None:
        note = record.value["note"]
        if note == "bad":
            raise ValueError("a note that nobody can read")
        return None if note == "hidden" else {"note": note}


@pytest.fixture
def write(admin) -> Callable[..., None]:
    """A function that inserts an aircraft, or changes it to the next version."""

    def write(tail: str, note: str = VALUE) -> None:
        admin.execute(
            "insert into aircraft as a values (%s, %s, 1) on conflict (tail) do"
            " update set note = excluded.note, version = a.version + 1",
            (tail, note),
        )

    return write


@pytest.fixture
def await_arrival(app, name, wait_for) -> Callable[[str], Where]:
    """A function that waits until the change of a key has arrived."""

    def await_arrival(key: str) -> Where:
        found: list[Where] = []

        def has_arrived() -> bool:
            found.append(where(app, name, key))
            return found[-1].has_arrived

        wait_for(has_arrived, timeout=30, what=lambda: f"{key} arrives: {found[-1:]}")
        return found[-1]

    return await_arrival


@pytest.fixture
def call(app, monkeypatch) -> Callable[..., Any]:
    """A function that calls the command."""
    module = types.ModuleType("service_of_where")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "service_of_where", module)
    return lambda *words: CliRunner().invoke(cli, ["where", APP, *words])


def find(found: Where, beginning: str) -> Place:
    """Find the one place that is called so."""
    (place,) = [one for one in found.places if one.place.startswith(beginning)]
    return place


def states(found: Where) -> list[str]:
    return [place.state for place in found.places]


@pytest.mark.guarantee("W83")
def test_a_change_is_found_at_each_place_that_it_has_not_passed_yet(
    app, admin, name, write, await_arrival, wait_for
):
    write("N1")
    found = where(app, name, "N1")
    assert states(found) == ["passed", "stuck", "not there", "not there"]
    assert find(found, "table").version == 1
    outbox = find(found, "outbox")
    assert (outbox.version, outbox.since is not None) == (1, True)
    assert found.verdict.startswith(
        "It is stuck at the outbox: 1 row of the key; no process owns shard/"
    )

    def is_relayed() -> bool:
        # The record is in the topic before the row is gone.
        return states(where(app, name, "N1"))[1:3] == ["passed", "passed"]

    with running(app, "relay"):
        wait_for(is_relayed, timeout=30, what="the record is in the topic")
    found = where(app, name, "N1")
    assert states(found) == ["passed", "passed", "passed", "stuck"]
    topic = find(found, "topic")
    assert (topic.version, topic.why) == (1, "has a record at offset 0")
    assert topic.since is not None
    assert found.verdict.endswith(
        f"1 record behind; no process owns {name}/0. Does `jobs-lib run` run?"
    )
    with running(app, "relay", "consumers"):
        found = await_arrival("N1")
        assert states(found) == ["passed"] * 4
        assert [place.version for place in found.places] == [1, None, 1, 1]
        assert found.verdict == "It has arrived everywhere with version 1."
        write("N1", "hidden")
        found = await_arrival("N1")
        assert find(found, "read model").why == "its function has left the row out"
        write("N1", "shown")
        assert await_arrival("N1").verdict.endswith("with version 3.")
        admin.execute("delete from aircraft")
        found = await_arrival("N1")
    assert found.verdict == "It has arrived everywhere: the entity was removed."
    assert states(found) == ["not there", "passed", "passed", "passed"]
    assert find(found, "read model").why == "the row was removed"
    # Something else writes the table.
    admin.execute("insert into aircraft_rm values ('N1', 3, '')")
    found = where(app, name, "N1")
    assert "still has the row after its tombstone" in found.verdict


@pytest.mark.guarantee("W83")
def test_a_held_row_is_named_with_its_error_and_the_way_out(
    make, admin, topic, write, wait_for
):
    limit = {"max.message.bytes": "2000", "compression.type": "uncompressed"}
    name = topic(1, config=limit)
    app = make()
    declare(app, admin, name)
    write("N1", VALUE + "x" * 4_000)
    with running(app, "relay"):
        wait_for(
            lambda: admin.execute("select from jobs_lib.held_rows").rowcount,
            timeout=30,
            what="the row is held",
        )
    found = where(app, name, "N1")
    outbox = find(found, "outbox")
    assert (outbox.state, outbox.version) == ("stuck", 1)
    assert outbox.since is not None
    assert "SIZE_TOO_LARGE" in outbox.why
    assert f"`jobs-lib outbox retry --topic {name} --key N1`" in found.verdict
    assert VALUE not in repr(found)


@pytest.mark.guarantee("W83")
def test_a_consumer_that_stands_still_is_named_with_the_record_and_its_error(
    app, name, write, wait_for, call
):
    def stands_still(key: str) -> bool:
        return "stands still" in where(app, name, key).verdict

    with running(app, "relay", "consumers"):
        for key, note in (("N1", "bad"), ("N2", VALUE)):
            write(key, note)
            wait_for(partial(stands_still, key), timeout=30, what=f"{key} is stuck")
        result = call(name, "N2", "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.output)
    *others, model = found["places"]
    assert [one["state"] for one in others] == ["passed"] * 3
    assert (model["state"], model["version"]) == ("stuck", None)
    assert model["since"] is not None
    assert "stands still at offset 0: ValueError" in model["why"]
    assert found["verdict"].startswith("It is stuck at the read model aircraft_rm of")
    assert VALUE not in result.output


@pytest.mark.guarantee("W83")
def test_a_record_that_was_skipped_is_no_arrival(
    make, name, bootstrap_servers, admin, wait_for
):
    app = make()

    @app.consumer(name, group=f"{name}-g", on_error="skip")
    def handle(record, conn) -> None:
        if record.key == "bad":
            raise KeyError("price")

    produce(bootstrap_servers, name, [("bad", VALUE), ("good", VALUE)])
    with running(app, "consumers"):
        wait_for(
            lambda: where(app, name, "good").has_arrived,
            timeout=30,
            what="the record after it is handled",
        )
    found = where(app, name, "bad")
    assert states(found) == ["passed", "stuck"]
    assert "has skipped it: KeyError" in found.verdict
    assert "`jobs-lib readmodel replay` applies it" in found.verdict
    assert where(app, name, "good").verdict == "It has arrived everywhere."


@pytest.mark.guarantee("W83")
def test_a_change_that_nothing_has_sent_is_stuck_at_its_table(app, name, write, admin):
    admin.execute("alter table aircraft disable trigger jobs_lib_capture")
    write("N1")
    found = where(app, name, "N1")
    assert states(found) == ["stuck", "passed", "not there", "not there"]
    assert "no record of the row was ever sent. Its trigger is sw" in found.verdict
    admin.execute("drop trigger jobs_lib_capture on aircraft")
    assert "No trigger of `capture_changes`" in where(app, name, "N1").verdict


def test_a_version_that_was_not_sent_is_stuck_at_its_table(
    make, admin, name, bootstrap_servers, write
):
    app = make()
    states_ = app.topic(name, value=Aircraft, compacted=True, partitions=1)
    admin.execute(
        "create table aircraft (tail text primary key, note text, version int)"
    )

    @app.entity(states_, source="aircraft", key="tail")
    def load(conn, keys: list[str]) -> dict[str, Aircraft]:
        return {}

    produce(bootstrap_servers, name, [("N1", {}), ("N2", {})], headers=VERSION)
    write("N1")
    assert where(app, name, "N1").has_arrived
    write("N1")
    assert "version 2 was not sent, only 1" in where(app, name, "N1").verdict
    assert "the row is gone, and no tomb" in where(app, name, "N2").verdict


@pytest.mark.guarantee("W83")
def test_a_change_behind_an_open_transaction_is_stuck_at_its_topic(
    app, name, write, admin, bootstrap_servers, await_arrival, wait_for
):
    with running(app):
        write("N1")
        await_arrival("N1")
        producer = open_transaction(bootstrap_servers, name, 1)
        assert where(app, name, "N1").has_arrived
        write("N1")
        wait_for(
            lambda: not count(admin, "outbox"),
            timeout=30,
            what="the row is sent",
        )
        found = where(app, name, "N1")
        assert states(found) == ["passed", "passed", "stuck", "passed"]
        assert found.verdict.startswith(
            f"It is stuck at the topic {name}/0: a transaction is open from offset "
            f"{find_committed_ends(app.settings, name)[0]} on, and hides what follows"
        )
        producer.abort_transaction(60)
        await_arrival("N1")


@pytest.mark.guarantee("W83")
def test_a_key_that_is_nowhere_is_said_to_be_so_for_each_place(app, name, call):
    found = where(app, name, "N9")
    assert states(found) == ["not there", "passed", "not there", "not there"]
    assert find(found, "table").why == "has no such row"
    assert find(found, "outbox").why == "no row of the key waits"
    assert find(found, "topic").why == "has no record of the key"
    assert found.verdict.startswith("No place has a record of the key 'N9'")
    result = call(name, "N9")
    assert (result.exit_code, "No place has a record" in result.output) == (1, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("other", "N1"), "neither declares nor reads a topic 'other'; it knows: "),
        (("{name}", ""), "no record has this key"),
        (("{name}", "\udc80"), "no record has this key"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(call, name, words, told):
    result = call(*(word.format(name=name) for word in words))
    assert isinstance(result.exception, OperatingError)
    assert told in str(result.exception)


@pytest.mark.guarantee("W83")
def test_a_topic_that_is_missing_is_where_its_records_are_stuck(
    app, admin, name, kafka_admin, bootstrap_servers
):
    delete_topics(kafka_admin, [name])
    found = where(app, name, "N1")
    assert find(found, "topic").state == "stuck"
    assert f"has no topic '{name}'" in found.verdict
    create_topic(kafka_admin, name, 1)
    # The offset of the group is one of the topic before.
    admin.execute(
        "insert into jobs_lib.offsets (consumer_group, topic, partition, next_offset,"
        " topic_id) values (%s, %s, 0, 7, %s)",
        (f"{name}-board", name, uuid4()),
    )
    produce(bootstrap_servers, name, [("N1", None)])
    assert "is of an earlier topic of this name" in where(app, name, "N1").verdict
    assert "does not exist" in find(where(app, name, "N1", partition=7), "topic").why


@pytest.mark.guarantee("W83")
def test_a_server_that_does_not_answer_leaves_only_its_own_places_unknown(
    app, name, admin, write
):
    write("N1")
    admin.execute("delete from jobs_lib.outbox")
    admin.execute("insert into aircraft_rm values ('N1', 1, '')")
    app._settings = app.settings.model_copy(update={"kafka_bootstrap_servers": NOBODY})
    found = where(app, name, "N1")
    assert states(found) == ["passed", "passed", "unknown", "unknown"]
    assert find(found, "read model").version == 1
    told = f"What the topic {name} has is not known: no Kafka broker at {NOBODY} an"
    assert (found.verdict.startswith(told), found.has_arrived) == (True, False)


def test_a_database_that_does_not_answer_leaves_the_topic_known(
    bootstrap_servers, name
):
    app = make_app(
        f"postgresql://nobody@{NOBODY}/none", kafka_bootstrap_servers=bootstrap_servers
    )
    app.topic(name)
    app.consumer(name, group="g")(lambda record, conn: None)
    produce(bootstrap_servers, name, [("N1", {})])
    found = where(app, name, "N1")
    assert states(found) == ["unknown", "passed", "unknown"]
    assert found.verdict.startswith("What the outbox has is not known: the database at")
    assert not found.has_arrived


def test_a_read_model_is_asked_by_the_declared_type_of_its_keys(
    make, topic, admin, bootstrap_servers, wait_for
):
    app = make()
    keys = {int: ("bigint", "7"), bytes: ("bytea", "é"), UUID: ("uuid", str(uuid4()))}
    names = {}
    for kind in ("row", "side"):
        for key_type, (sql_type, key) in keys.items():
            table, name = f"{kind}_{sql_type}", topic(1)
            names[name] = key
            column = "version bigint, " if kind == "row" else ""
            admin.execute(
                f"create table {table} (id {sql_type} primary key, {column}n int)"
            )
            app.read_model(
                name,
                table=table,
                key="id",
                group=f"{name}-g",
                key_type=key_type,
                versions=kind,
            )(lambda record: {"n": record.value["n"]})
            records = [(key, {"n": 1}), ("0x", {"n": "no number"})]
            produce(bootstrap_servers, name, records, headers=VERSION)
    with running(app, "consumers"):
        for name, key in names.items():
            wait_for(
                lambda name=name, key=key: where(app, name, key).has_arrived,
                timeout=30,
                what=f"{key} is read",
            )
    for name, key in names.items():
        assert find(where(app, name, key), "read model").version == 1
        # It can be no key of the type, and no statement fails.
        found = find(where(app, name, "0x"), "read model")
        assert (found.state, found.version) == ("stuck", None)


@pytest.mark.guarantee("W83")
def test_rows_of_the_outbox_wait_for_a_living_relay_a_re_export_or_a_topic(
    make, admin, name, write
):
    # The relay lives as long as the test asks.
    app = make(stale_after=600.0)
    declare(app, admin, name)

    def tell() -> tuple[str, str]:
        outbox = find(where(app, name, "N1"), "outbox")
        return outbox.state, outbox.why

    write("N1")
    pod = uuid4()
    admin.execute(
        "insert into jobs_lib.processes (id, pod, roles, host, pid, version)"
        " values (%s, 'pod-1', '{relay}', '', 1, '')",
        [pod],
    )
    admin.execute(
        "insert into jobs_lib.origins (role, origin, owner)"
        " select 'relay', 'shard/' || n, %s from generate_series(0, 15) n",
        [pod],
    )
    told = "1 row of the key; 0 rows of shard/"
    assert tell()[0] == "under way"
    assert tell()[1].startswith(told)
    assert tell()[1].endswith(" before; pod-1 sends them")
    admin.execute("update jobs_lib.processes set heartbeat_at = now() - interval '1 h'")
    assert "pod-1 owns shard/" in tell()[1]
    assert "has given no sign since " in tell()[1]
    admin.execute("update jobs_lib.processes set heartbeat_at = now()")
    admin.execute(
        "with gone as (delete from jobs_lib.outbox returning *), made as ("
        " insert into jobs_lib.reexports (entity, topic, rate, state, total)"
        " select 'aircraft', topic, 60, 'paused', 1 from gone returning id)"
        " insert into jobs_lib.outbox (shard, class, topic, key, reexport_id, cause)"
        " select shard, 1, topic, key, made.id, 'reexport' from gone, made"
    )
    told = "a row of a re-export; it is paused: `jobs-lib reexport resume` goes on"
    assert tell() == ("stuck", f"{told} with it")
    admin.execute(
        "with gone as (delete from jobs_lib.outbox returning *), held as ("
        " insert into jobs_lib.holds (topic, error, retry_at)"
        " select topic, 'no such topic', now() from gone)"
        " insert into jobs_lib.held_rows (shard, class, id, topic, key, cause,"
        " created_at) select shard, 0, id, topic, key, 'live', now() from gone"
    )
    assert tell()[1].startswith("1 row the whole topic is held: no such topic. When")
    assert f"`jobs-lib outbox retry --topic {name}` tries" in tell()[1]


@pytest.mark.guarantee("W83")
def test_a_topic_that_was_read_in_part_says_from_which_offset_on(
    make, name, bootstrap_servers, wait_for
):
    app = make()
    app.topic(name)
    records: list[tuple[str, Any]] = [(f"k{number}", {}) for number in range(1_500)]
    produce(bootstrap_servers, name, records)
    found = where(app, name, "k0", seconds=0)
    told = "not among the records from offset 500 on; --seconds 60 looks further"
    assert (find(found, "topic").why, found.has_arrived) == (told, False)
    assert told in found.verdict
    assert where(app, name, "k0", seconds=60).has_arrived
    # A consumer that has read what lies before has the record, wherever it is.
    app.consumer(name, group=f"{name}-g")(lambda record, conn: None)
    behind = where(app, name, "k0", seconds=0)
    assert "up to 500 records behind; no process owns" in behind.verdict
    with running(app, "consumers"):
        wait_for(
            lambda: where(app, name, "k0", seconds=0).has_arrived,
            timeout=30,
            what="the consumer has read it",
        )
    found = where(app, name, "k0", seconds=0)
    assert find(found, "topic").why.endswith("; the consumers have all before")
