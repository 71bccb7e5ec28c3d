"""Each record of a state and its end have a version, in every way of sending."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from jobs_lib import Gone, PayloadError
from jobs_lib.outbox.capture import capture_changes
from jobs_lib.partitioner import choose_shard
from tests.support.apps import count, heard, make_app, running
from tests.support.records import read_topic


@dataclass
class Aircraft:
    """A state that counts its changes."""

    tail: str
    version: int


@pytest.fixture
def app(database_url, bootstrap_servers):
    """An app with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)


@pytest.fixture
def states(app, topic, admin):
    """A topic of states, with its entities in a table, some marked as deleted."""
    admin.execute(
        "create table aircraft"
        " (tail text primary key, version bigint, deleted bool default false)"
    )
    declared = app.topic(topic(1), value=Aircraft, compacted=True)

    @app.entity(declared, source="aircraft", key="tail")
    def load(connection, tails: list[str]) -> dict[str, Aircraft | Gone]:
        rows = connection.execute(
            "select * from aircraft where tail = any (%s)", (tails,)
        )
        return {
            tail: Gone(version) if deleted else Aircraft(tail, version)
            for tail, version, deleted in rows
        }

    return declared


@pytest.fixture
def relayed(app, states, admin, bootstrap_servers, wait_for):
    """A function that relays all rows, and returns keys, versions and ends."""

    def relayed() -> list[tuple[str, str | None, bool]]:
        with running(app, "relay"):
            wait_for(
                lambda: count(admin, "outbox") == 0, timeout=60, what="all is sent"
            )
        return [
            (record.key, record.headers.get("ce_version"), record.value is None)
            for record in read_topic(bootstrap_servers, states.name)
        ]

    return relayed


@pytest.mark.guarantee("W45")
def test_the_end_of_a_state_has_a_version_whoever_writes_it(states, connect, relayed):
    with connect() as connection:
        states.send(connection, key="a", value=Aircraft("a", 41))
        states.tombstone(connection, key="b", version=42)
        connection.execute(
            "select jobs_lib.send(%s, 'c', null, version => 43)", [states.name]
        )
        states.send_current(connection, key="d", version=44)
        connection.execute(
            "select jobs_lib.send_current(%s, 'e', 'aircraft', version => 45)",
            [states.name],
        )
    assert sorted(relayed()) == [
        ("a", "41", False),
        ("b", "42", True),
        ("c", "43", True),
        ("d", "44", True),
        ("e", "45", True),
    ]


@pytest.mark.guarantee("W45")
def test_a_captured_delete_has_the_version_that_follows_the_rows(
    states, admin, relayed
):
    capture_changes(admin, "aircraft", topic=states.name, key="tail")
    admin.execute("insert into aircraft values ('N1', 41), ('N2', 7)")
    admin.execute("update aircraft set version = 42 where tail = 'N1'")
    admin.execute("delete from aircraft where tail = 'N1'")
    assert sorted(relayed()) == [("N1", "43", True), ("N2", "7", False)]


@pytest.mark.guarantee("W45")
def test_the_version_grows_when_a_change_is_sent_after_the_delete(
    app, topic, admin, connect, bootstrap_servers, wait_for
):
    # Nothing is merged here, so the record of the update finds the row gone, too.
    admin.execute("create table things (id text primary key, edition bigint)")
    each = app.topic(topic(1), value=dict, compacted=True, merge=False)

    @app.entity(each, source="things", key="id")
    def load(connection, keys: list[str]) -> dict[str, dict[str, int]]:
        rows = connection.execute("select * from things where id = any (%s)", (keys,))
        return {key: {"version": edition} for key, edition in rows}

    capture_changes(admin, "things", topic=each.name, key="id", version="edition")
    admin.execute("insert into things values ('a', 1)")
    admin.execute("update things set edition = 2")
    admin.execute("delete from things")
    admin.execute("insert into things values ('b', 1)")
    with running(app, "relay"):
        wait_for(lambda: count(admin, "outbox") == 0, timeout=60, what="all is sent")
    versions: dict[str, list[str]] = {}
    for record in read_topic(bootstrap_servers, each.name):
        versions.setdefault(record.key, []).append(record.headers["ce_version"])
    assert versions == {"a": ["1", "2", "3"], "b": ["1"]}


def reexport(admin, states, *keys: str) -> None:
    """Write the outbox rows that a re-export of these keys writes."""
    admin.execute(
        "insert into jobs_lib.reexports (id, entity, topic, rate, state, total)"
        " values (1, 'aircraft', %s, 60000, 'running', %s)",
        (states.name, len(keys)),
    )
    for key in keys:
        admin.execute(
            "insert into jobs_lib.outbox"
            " (shard, class, topic, key, entity, cause, reexport_id)"
            " values (%s, 1, %s, %s, 'aircraft', 'reexport', 1)",
            (choose_shard(states.name, key, 16), states.name, key),
        )


@pytest.mark.guarantee("W45", "W25")
def test_a_re_export_gives_the_end_of_a_deleted_row_its_version(states, admin, relayed):
    admin.execute("insert into aircraft values ('N1', 8, false), ('N2', 9, true)")
    reexport(admin, states, "N1", "N2")
    assert sorted(relayed()) == [("N1", "8", False), ("N2", "9", True)]


@pytest.mark.guarantee("W45", "W25")
def test_a_re_export_sends_no_end_of_unknown_version(states, admin, relayed):
    admin.execute("insert into aircraft values ('N1', 8)")
    reexport(admin, states, "N1", "gone")
    with heard("version.missing") as told:
        assert relayed() == [("N1", "8", False)]
    assert [fields["topic"] for _, fields in told] == [states.name]
    counted = admin.execute("select state, sent, superseded from jobs_lib.reexports")
    assert counted.fetchone() == ("finished", 1, 1)


def test_a_re_export_of_states_without_versions_sends_ends(
    app, topic, admin, bootstrap_servers, wait_for
):
    plain = app.topic(topic(1), value=dict[str, int], compacted=True)
    app.entity(plain, source="aircraft", key="id")(lambda connection, keys: {})
    reexport(admin, plain, "gone")
    with running(app, "relay"):
        wait_for(lambda: count(admin, "outbox") == 0, timeout=60, what="all is sent")
    (end,) = read_topic(bootstrap_servers, plain.name)
    assert (end.key, end.value, end.headers.get("ce_version")) == ("gone", None, None)


@pytest.mark.guarantee("W45")
def test_an_end_from_sql_without_a_version_is_reported(states, app, connect, relayed):
    app.topic("plain", value=int, compacted=True)
    send = "select jobs_lib.send(%s, %s, %s)"
    with connect() as connection:
        states.send(connection, key="a", value=Aircraft("a", 1))
        connection.execute(send, (states.name, "b", None))
        connection.execute(send, (states.name, "b", '{"tail": "b", "version": 1}'))
        connection.execute(send, (states.name, "c", None))
    with heard("version.missing") as told:
        assert len(relayed()) == 3
    ((_, fields),) = told
    assert fields["topic"] == states.name
    assert fields["entity"] is None


@pytest.mark.guarantee("W45")
def test_a_merged_end_has_the_version_of_the_rows_it_replaces(
    states, admin, connect, relayed
):
    capture_changes(admin, "aircraft", topic=states.name, key="tail")
    admin.execute("insert into aircraft values ('N1', 42), ('N2', 1)")
    admin.execute("delete from aircraft")
    admin.execute("insert into aircraft values ('N2', 7)")
    with connect() as connection:
        # The sender of these knows no version.
        states.send_current(connection, key="N1")
        states.send_current(connection, key="N2")
        states.send(connection, key="N3", value=Aircraft("N3", 5))
        states.send_current(connection, key="N3")
        states.tombstone(connection, key="N4", version=8)
        states.send(connection, key="N4", value=Aircraft("N4", 9))
    with heard("version.missing") as told:
        assert sorted(relayed()) == [
            ("N1", "43", True),
            ("N2", "7", False),
            ("N3", "6", True),
            ("N4", "9", False),
        ]
    assert not told


@pytest.mark.guarantee("W45")
def test_ends_of_unknown_version_are_reported_once(states, connect, relayed):
    with connect() as connection:
        states.send_current(connection, key="gone")
        states.send_current(connection, key="gone, too")
    with heard("version.missing") as told:
        assert {version for _, version, _ in relayed()} == {None}
    ((_, fields),) = told
    assert fields["topic"] == states.name
    assert fields["entity"] == "aircraft"


@pytest.mark.guarantee("W45")
def test_the_end_of_a_soft_deleted_row_has_the_version_of_that_change(
    app, topic, admin, bootstrap_servers, wait_for
):
    admin.execute("create table things (id text primary key, version int, gone bool)")
    each = app.topic(topic(1), value=dict, compacted=True, merge=False)

    @app.entity(each, source="things", key="id")
    def load(connection, keys: list[str]) -> dict[str, dict[str, int]]:
        rows = connection.execute(
            "select id, version from things where id = any (%s) and not gone", (keys,)
        )
        return {key: {"version": version} for key, version in rows}

    capture_changes(admin, "things", topic=each.name, key="id")
    changes = [
        "insert into things values ('a', 1, false), ('b', 1, false)",
        # The first counts its changes, the second does not.
        "update things set gone = true, version = version + (id = 'a')::int",
        "update things set gone = false, version = version + 1",
    ]
    with running(app, "relay"):
        for change in changes:
            admin.execute(change)
            wait_for(lambda: count(admin, "outbox") == 0, timeout=60, what="it is sent")
    found: dict[str, list[tuple[str, bool]]] = {"a": [], "b": []}
    for record in read_topic(bootstrap_servers, each.name):
        end = record.value is None
        found[record.key].append((record.headers["ce_version"], end))
    assert found["a"] == [("1", False), ("2", True), ("3", False)]
    assert found["b"] == [("1", False), ("2", True), ("2", False)]


@pytest.mark.guarantee("W45", "W63")
@pytest.mark.parametrize("way", ["one by one", "merged"])
def test_a_key_that_comes_back_is_in_the_read_models_again(
    app, states, admin, connect, wait_for, way
):
    # A sequence gives the row that comes back the version that its end had.
    admin.execute("create sequence versions")
    admin.execute("alter table aircraft alter version set default nextval('versions')")
    capture_changes(admin, "aircraft", topic=states.name, key="tail")
    admin.execute("create table model (tail text primary key, version bigint)")
    app.read_model(states.name, table="model", key="tail", group="g")(lambda record: {})
    insert = "insert into aircraft (tail) values ('N1')"
    again = [insert, "delete from aircraft where tail = 'N1'", insert]
    with connect() as connection:
        # The offsets are higher than the versions.
        for _ in range(50):
            states.send(connection, key="other", value=Aircraft("other", 1))
            states.send(connection, key="some", value=Aircraft("some", 1))

    def is_read() -> bool:
        return count(admin, "outbox") == 0 and equal()

    def equal() -> bool:
        of_source, of_model = (
            admin.execute(f"select tail, version from {table} order by tail").fetchall()
            for table in ("aircraft", "model where tail like 'N%'")
        )
        return of_source == of_model

    with running(app, "relay", "consumers"):
        if way == "merged":
            with connect() as connection:
                for change in again:
                    connection.execute(change)
        else:
            for change in again:
                admin.execute(change)
                wait_for(is_read, timeout=60, what="it is read")
        wait_for(is_read, timeout=60, what="it is read")
        # A re-export of the key does not block it either, whether it finds the row or
        # not.
        admin.execute("delete from aircraft")
        wait_for(is_read, timeout=60, what="it is gone")
        reexport(admin, states, "N1")
        wait_for(is_read, timeout=60, what="it is still gone")
        admin.execute(insert)
        wait_for(is_read, timeout=60, what="it is back")


def test_a_column_that_holds_no_version_costs_no_change(states, admin, relayed):
    admin.execute("alter table aircraft alter version type text")
    capture_changes(admin, "aircraft", topic=states.name, key="tail")
    versions = ["", "1.5", "first", "9" * 19, "9223372036854775807", None, "12"]
    for n, version in enumerate(versions):
        admin.execute("insert into aircraft values (%s, %s)", (f"N{n}", version))
    admin.execute("delete from aircraft")
    ends = {key: version for key, version, _ in relayed()}
    # The highest bigint has no successor.
    numbers = {"N4": "9223372036854775807", "N6": "13"}
    assert ends == {**{f"N{n}": None for n in range(6)}, **numbers}


@pytest.mark.guarantee("W45")
def test_a_tombstone_without_a_version_is_refused_where_states_have_one(
    app, states, connect
):
    with connect() as connection:
        connection.execute("select 1")
        with pytest.raises(PayloadError, match="give version=, one more"):
            states.tombstone(connection, key="N1")
        # The transaction continues.
        states.tombstone(connection, key="N1", version=1)
        app.topic("plain", value=int, compacted=True).tombstone(connection, key="a")
