"""Rows of the outbox come from SQL, and from a trigger that captures changes."""

from __future__ import annotations

import json
import threading

import psycopg
import pytest

from jobs_lib.outbox.capture import capture_changes, stop_capturing
from jobs_lib.partitioner import choose_shard
from tests.support.apps import count, make_app
from tests.support.canary import VALUE

KEYS = ["a", "ключ", "0" * 300, "a/b c"]


def rows(admin) -> list[tuple[str | None, ...]]:
    return admin.execute(
        "select topic, key, convert_from(value, 'UTF8'), entity from jobs_lib.outbox"
        " order by id"
    ).fetchall()


def test_sql_writes_what_python_would(admin):
    for key in [*KEYS, None]:
        admin.execute("select jobs_lib.send('t', %s, '{\"n\": 1}')", (key,))
        if key is not None:
            admin.execute("select jobs_lib.send('other', %s, null)", (key,))
            admin.execute("select jobs_lib.send_current('t', %s, 'things')", (key,))
    found = admin.execute("select topic, key, shard from jobs_lib.outbox").fetchall()
    assert len(found) == 3 * len(KEYS) + 1
    for topic, key, shard in found:
        assert shard == choose_shard(topic, key, 16)
    kinds = {
        (v and json.dumps(json.loads(v)), entity) for _, _, v, entity in rows(admin)
    }
    assert kinds == {('{"n": 1}', None), (None, None), (None, "things")}


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ("send('not a topic', 'k', '1')", "no name for a topic"),
        ("send(null, 'k', '1')", "no name for a topic"),
        ("send('t', '', '1')", "is empty"),
        ("send('t', null, null)", "has no key"),
        ("send('t', 'k', '1', headers => '[1]')", "no object of strings"),
        ("send('t', 'k', '1', headers => '{\"a\": 1}')", "no object of strings"),
        ("send('t', 'k', '1', version => -1)", "a version of .* t is below 0"),
        ("send('t', 'k', null, version => -1)", "a version of .* t is below 0"),
        ("send_current('t', 'k', 'things', -1)", "a version of .* t is below 0"),
        ("send_current('t', null, 'things')", "lacks its key"),
        ("send_current('t', 'k', null)", "lacks its key"),
    ],
)
def test_the_sql_functions_refuse_invalid_records_with_a_hint(admin, call, match):
    with pytest.raises(psycopg.Error, match=match) as refused:
        admin.execute(f"select jobs_lib.{call}")
    assert refused.value.diag.message_hint
    assert not count(admin, "outbox")


@pytest.mark.guarantee("W43")
@pytest.mark.parametrize("ways", ["sql sql", "python python", "python sql"])
def test_the_ids_of_a_key_rise_in_the_order_of_commits(
    connect, admin, database_url, wait_for, ways
):
    topic = make_app(database_url).topic("t", value=int)

    def send(way: str, connection, value: int) -> None:
        if way == "python":
            topic.send(connection, key="k", value=value)
        else:
            connection.execute("select jobs_lib.send('t', 'k', %s)", (str(value),))

    first, second = connect(), connect()
    send(ways.split()[0], first, 1)
    waiting = "select from pg_stat_activity where wait_event = 'advisory'"
    other = threading.Thread(target=send, args=(ways.split()[1], second, 2))
    other.start()
    wait_for(lambda: admin.execute(waiting).rowcount, what="the second waits")
    first.commit()
    other.join()
    second.commit()
    assert [value for _, _, value, _ in rows(admin)] == ["1", "2"]


@pytest.fixture
def aircraft(admin):
    """A table with captured changes."""
    admin.execute('create schema "own"')
    admin.execute('create table own."Aircraft" (tail text primary key, seats int)')
    capture_changes(admin, "own.Aircraft", topic="aircraft-state", key="tail")
    return 'own."Aircraft"'


@pytest.mark.guarantee("W6", "W14")
def test_each_change_of_a_captured_table_is_a_row_with_the_id_alone(admin, aircraft):
    admin.execute(f"insert into {aircraft} values ('N1', 1), ('N2', 2)")
    admin.execute(f"update {aircraft} set seats = 3 where tail = 'N2'")
    admin.execute(f"delete from {aircraft} where tail = 'N1'")
    expected = [
        ("aircraft-state", key, None, "own.Aircraft")
        for key in ("N1", "N2", "N2", "N1")
    ]
    assert rows(admin) == expected
    stop_capturing(admin, "own.Aircraft")
    admin.execute(f"delete from {aircraft}")
    assert rows(admin) == expected


def test_a_number_below_0_in_a_captured_row_is_no_version(admin):
    admin.execute("create table planes (tail text primary key, version bigint)")
    capture_changes(admin, "planes", topic="planes", key="tail")
    admin.execute("insert into planes values ('a', -5), ('b', -1), ('c', 0)")
    admin.execute("update planes set version = version - 1 where tail <> 'c'")
    admin.execute("update planes set tail = tail")
    admin.execute("delete from planes")
    found = admin.execute(
        "select key, array_agg(version order by id) from jobs_lib.outbox"
        " group by 1 order by 1"
    ).fetchall()
    assert found == [("a", 4 * [None]), ("b", 4 * [None]), ("c", [0, 1, 1])]


def test_a_change_that_is_rolled_back_is_none(admin, connect, aircraft):
    with connect() as connection:
        connection.execute(f"insert into {aircraft} values ('N1', 1)")
        connection.rollback()
    assert rows(admin) == []


@pytest.mark.guarantee("W42")
def test_a_key_that_changes_is_refused(admin, aircraft):
    admin.execute(f"insert into {aircraft} values ('{VALUE}', 1)")
    with pytest.raises(
        psycopg.errors.IntegrityConstraintViolation,
        match=r'the key tail of own."Aircraft" was to become another',
    ) as refused:
        admin.execute(f"update {aircraft} set tail = tail || '2'")
    assert VALUE not in str(refused.value)
    assert len(rows(admin)) == 1


def test_a_truncate_of_a_captured_table_is_refused_with_the_way_out(admin, aircraft):
    admin.execute(f"insert into {aircraft} values ('{VALUE}', 1)")
    with pytest.raises(
        psycopg.errors.IntegrityConstraintViolation,
        match=r'the changes of own."Aircraft" are sent',
    ) as refused:
        admin.execute(f"truncate {aircraft}")
    assert VALUE not in str(refused.value)
    disable = f"alter table {aircraft} disable trigger jobs_lib_capture_truncate"
    assert disable in str(refused.value.diag.message_hint)
    admin.execute(disable)
    admin.execute(f"truncate {aircraft}")
    assert len(rows(admin)) == 1


def test_a_table_that_is_captured_no_more_can_be_truncated(admin, aircraft):
    stop_capturing(admin, "own.Aircraft")
    admin.execute(f"truncate {aircraft}")
    assert rows(admin) == []


def test_a_table_without_the_trigger_of_truncates_can_stop(admin, aircraft):
    admin.execute(f"drop trigger jobs_lib_capture_truncate on {aircraft}")
    stop_capturing(admin, "own.Aircraft")
    admin.execute(f"insert into {aircraft} values ('N1', 1)")
    assert rows(admin) == []


def test_ten_thousand_changes_at_once_are_captured(admin, aircraft):
    # A lock for each key would not fit into the server's table of locks.
    admin.execute(
        f"insert into {aircraft} select n, 1 from generate_series(1, 10000) n"
    )
    assert count(admin, "outbox") == 10_000
