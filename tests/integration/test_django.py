"""Enqueue and send on Django's connection, in its own transactions."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from django import db
from django.db import transaction

from jobs_lib import NoTransactionError, PayloadError
from tests.support.apps import count, make_app
from tests.support.djangos import on_database

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def handler(database_url) -> Iterator[db.utils.ConnectionHandler]:
    """Django's connections to the database of this test and to SQLite."""
    with on_database(database_url) as connections:
        yield connections


@pytest.fixture
def app(database_url):
    """An app on the same database."""
    app = make_app(database_url)
    yield app
    app.close()


class UndoError(Exception):
    """Raised to roll a transaction back."""


@pytest.mark.guarantee("S2", "J38")
@pytest.mark.parametrize("way", ["django.db.connection", "one of its connections"])
def test_jobs_and_records_follow_djangos_transaction(app, notify, handler, admin, way):
    topic = app.topic("orders")
    connection = db.connection if way == "django.db.connection" else handler["default"]
    admin.execute("create table orders (id int)")
    later = []

    def work(*, fail: bool) -> None:
        with transaction.atomic():
            assert isinstance(notify.enqueue(connection, order=1, customer="ü%s"), int)
            with connection.cursor() as cursor:
                cursor.execute("insert into orders values (1)")
            with suppress(UndoError), transaction.atomic():
                notify.enqueue(connection, order=2)
                raise UndoError
            many = [{"order": n, "customer": "back\\slash"} for n in (3, 4)]
            assert notify.enqueue_many(connection, many) == 2
            topic.send(connection, key="k", value={"a": 1}, version=7)
            topic.send_many(connection, [("m", {"b": 2}, None)])
            transaction.on_commit(lambda: later.append(1))
            if fail:
                raise UndoError

    with pytest.raises(UndoError):
        work(fail=True)
    assert [count(admin, table) for table in ("jobs", "outbox")] == [0, 0]
    work(fail=False)
    found = admin.execute(
        "select (payload ->> 'order')::int, \"group\" from jobs_lib.jobs order by id"
    ).fetchall()
    assert found == [(1, "ü%s"), (3, "back\\slash"), (4, "back\\slash")]
    found = admin.execute("select key, version from jobs_lib.outbox order by id")
    assert found.fetchall() == [("k", 7), ("m", None)]
    assert admin.execute("select id from orders").fetchall() == [(1,)]
    assert later == [1]


@pytest.mark.guarantee("W15")
def test_enqueue_and_send_outside_of_an_atomic_block_are_refused(
    app, notify, handler, admin
):
    for call in (
        lambda: notify.enqueue(db.connection, order=1),
        lambda: notify.enqueue_many(db.connection, [{"order": 1}]),
        lambda: app.topic("orders").send(db.connection, key="1", value={}),
    ):
        with pytest.raises(
            NoTransactionError, match=r"wrap both in `with transaction\.atomic\(\):`"
        ):
            call()
        app.topics.clear()
    assert count(admin, "jobs") == 0


def test_a_job_is_stored_by_djangos_commit_when_autocommit_is_off(
    notify, handler, admin
):
    transaction.set_autocommit(False)
    notify.enqueue(db.connection, order=1)
    assert count(admin, "jobs") == 0
    transaction.commit()
    assert count(admin, "jobs") == 1


def test_enqueue_in_a_block_marked_for_rollback_asks_to_roll_back_first(
    notify, handler, admin
):
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(NoTransactionError, match="roll back first"):
            notify.enqueue(db.connection, order=1)
    with transaction.atomic():
        with (
            pytest.raises(db.DataError),
            transaction.atomic(savepoint=False),
            db.connection.cursor() as cursor,
        ):
            cursor.execute("select 1 / 0")
        with pytest.raises(NoTransactionError, match="roll back first"):
            notify.enqueue(db.connection, order=1)


def test_a_refused_payload_leaves_djangos_transaction_usable(notify, handler, admin):
    with transaction.atomic():
        with pytest.raises(PayloadError):
            notify.enqueue(db.connection, order="many")
        notify.enqueue(db.connection, order=1)
    assert count(admin, "jobs") == 1


def test_an_error_of_the_server_is_raised_as_djangos_error(notify, handler, admin):
    admin.execute("alter table jobs_lib.jobs rename to gone")
    with pytest.raises(db.ProgrammingError), transaction.atomic():
        notify.enqueue(db.connection, order=1)
    admin.execute("alter table jobs_lib.gone rename to jobs")
    with transaction.atomic():
        notify.enqueue(db.connection, order=1)
    assert count(admin, "jobs") == 1


def test_a_connection_to_another_server_is_refused(notify, handler):
    with (
        transaction.atomic(using="other"),
        pytest.raises(NoTransactionError, match="cannot write on sqlite: give a"),
    ):
        notify.enqueue(handler["other"], order=1)
    with pytest.raises(NoTransactionError, match=r'`connections\["default"\]`'):
        notify.enqueue(handler, order=1)
