"""One call sends many records."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy

from jobs_lib.errors import PayloadError
from tests.support.apps import count, make_app
from tests.support.engines import sqlalchemy_url

ODD = ["a\tb", "back\\slash", "new\nline", "ünal", "\\N"]


@pytest.fixture
def topic(database_url):
    return make_app(database_url).topic("t", value=dict)


def rows(admin):
    return admin.execute(
        "select key, convert_from(value, 'UTF8')::jsonb, version, headers, shard"
        " from jobs_lib.outbox order by id"
    ).fetchall()


@pytest.mark.guarantee("FP24")
@pytest.mark.parametrize("driver", ["psycopg", "inserts"])
def test_send_many_writes_the_same_rows_as_single_sends(
    topic, admin, connect, database_url, driver
):
    records: list[Any] = [(key, {"text": key}, n or None) for n, key in enumerate(ODD)]
    records.append((None, {"text": None}, None))
    headers = {"tenant": "a\\b\t"}
    if driver == "psycopg":
        with connect() as connection:
            assert topic.send_many(connection, records, headers=headers) == len(records)
    else:
        engine = sqlalchemy.create_engine(
            sqlalchemy_url(database_url).set(drivername="postgresql+psycopg2")
        )
        with engine.begin() as connection:
            assert topic.send_many(connection, records, headers=headers) == len(records)
        engine.dispose()
    many = rows(admin)
    admin.execute("delete from jobs_lib.outbox")
    with connect() as connection:
        for key, value, version in records:
            topic.send(
                connection, key=key, value=value, version=version, headers=headers
            )
    keyed = [row for row in rows(admin) if row[0] is not None]
    assert [row for row in many if row[0] is not None] == keyed
    assert many[-1][:4] == (None, {"text": None}, None, headers)


@pytest.mark.guarantee("FP24")
def test_a_hundred_thousand_keys_take_a_lock_for_each_shard(topic, connect):
    with connect() as connection:
        sent = topic.send_many(
            connection, ((f"k{n}", {"n": n}, n) for n in range(100_000))
        )
        assert sent == 100_000
        (locks,) = connection.execute(
            "select count(*) from pg_locks"
            " where pid = pg_backend_pid() and locktype = 'advisory'"
        ).fetchone()
        assert locks == 16
        connection.rollback()


@pytest.mark.guarantee("FP24")
@pytest.mark.parametrize("many", [10, 100])
def test_a_key_that_was_sent_by_many_keeps_its_order(
    topic, admin, connect, wait_for, many
):
    first, second = connect(), connect()
    topic.send_many(first, [(f"k{n}", {"n": 1}, None) for n in range(many)])
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(topic.send, second, key="k0", value={"n": 2})
        wait_for(
            lambda: (
                admin.execute(
                    "select from pg_locks where locktype = 'advisory' and not granted"
                ).rowcount
            ),
            what="the second waits",
        )
        topic.send_many(first, [("k0", {"n": 1}, None)])
        first.commit()
        waiting.result(timeout=30)
    second.commit()
    of_key = [value for key, value, *_ in rows(admin) if key == "k0"]
    assert of_key == [{"n": 1}, {"n": 1}, {"n": 2}]


def test_send_many_writes_nothing_when_a_record_is_refused(topic, admin, connect):
    with connect() as connection:
        connection.execute("select 1")
        with pytest.raises(PayloadError):
            topic.send_many(connection, [("a", {}, None), ("", {}, None)])
        with pytest.raises(PayloadError, match="64 bits"):
            topic.send_many(connection, [("a", {}, 1), ("b", {}, 2**63)])
        with pytest.raises(PayloadError, match="NUL"):
            topic.send_many(connection, [("a", {}, 1)], headers={"a": "\0"})
        assert not topic.send_many(connection, [])
        connection.execute("select 1")
    assert not count(admin, "outbox")
