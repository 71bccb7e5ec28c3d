"""Offsets are kept back until what was written before them has left the outbox."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from jobs_lib.consuming.sent import Sent
from tests.support.apps import make_app

PLACE = ("payments", 0)
QUERIES: Any = {"find_outbox_ends": "", "find_unsent": ""}
KEYS = [f"k{n}" for n in range(40)]
"""They fall into several shards."""


@pytest.fixture
def app(database_url):
    app = make_app(database_url)
    yield app
    app.close()


@pytest.fixture
def topic(app):
    return app.topic("transfers", value=dict)


@pytest.fixture
def find(app, connect, monkeypatch):
    """A function that finds what was sent, of offsets that are done."""
    monkeypatch.setattr("jobs_lib.consuming.sent._SHARE", 1e9)
    sent = Sent(lambda: app.database().queries)
    connection = connect(autocommit=True)

    def find(offset: int) -> int | None:
        found: int | None = sent.find(connection, {PLACE: offset}).get(PLACE)
        return found

    return find


def delete(admin, *keys: str) -> None:
    """Delete rows as the relay does once Kafka has them."""
    admin.execute("delete from jobs_lib.outbox where key = any(%s)", ([*keys],))


@pytest.mark.guarantee("K5")
def test_an_offset_is_kept_back_until_no_row_that_was_there_is_left(
    app, topic, admin, connect, find
):
    assert find(3) == 3
    with connect() as conn:
        topic.send_many(conn, [(key, {}, None) for key in KEYS])
    assert find(7) == 3
    delete(admin, *KEYS[1:])
    assert find(7) == 3
    # Rows that came later do not count.
    with connect() as conn:
        topic.send(conn, key="later", value={})
    delete(admin, KEYS[0])
    assert find(9) == 7
    assert find(9) == 7
    delete(admin, "later")
    assert find(9) == 9


@pytest.mark.guarantee("K5")
def test_a_row_that_was_committed_late_keeps_the_offset_of_its_own_transaction(
    app, topic, admin, connect, find
):
    late = connect()
    topic.send(late, key=KEYS[0], value={})
    with connect() as conn:
        topic.send(conn, key=KEYS[1], value={})
    assert find(5) is None
    late.commit()
    # The offset that this transaction has moved is done now.
    delete(admin, KEYS[1])
    assert find(6) in (None, 5)
    delete(admin, KEYS[0])
    assert find(6) == 6


@pytest.mark.guarantee("K5")
def test_an_offset_is_kept_back_while_a_hold_keeps_a_row(
    app, topic, admin, connect, find
):
    assert find(3) == 3
    with connect() as conn:
        topic.send(conn, key="held", value={})
        topic.send(conn, key="sent", value={})
    assert find(7) == 3
    # Kafka refuses the one, and takes the other.
    admin.execute(
        "insert into jobs_lib.holds (topic, key, error, retry_at)"
        " values (%s, 'held', 'too large', now())",
        [topic.name],
    )
    admin.execute(
        "with moved as (delete from jobs_lib.outbox where key = 'held' returning *)"
        " insert into jobs_lib.held_rows select shard, class, id, topic, key, value,"
        " headers, entity, version, cause, reexport_id, created_at from moved"
    )
    delete(admin, "sent")
    assert find(8) == 3
    # A process that begins to look now knows nothing of it.
    other = Sent(lambda: app.database().queries)
    with connect(autocommit=True) as connection:
        assert other.find(connection, {PLACE: 9}) == {}
    admin.execute("select jobs_lib.lift_hold(%s, 'held', null)", [topic.name])
    assert find(8) == 3
    delete(admin, "held")
    assert find(8) == 8


@pytest.mark.guarantee("K5")
def test_an_offset_that_is_set_back_is_not_sent_further(topic, find):
    assert find(9) == 9
    assert find(4) == 4


@pytest.mark.guarantee("K5")
def test_what_is_done_again_after_a_rewind_has_to_leave_again(
    app, topic, admin, connect, find
):
    assert find(9) == 9
    with connect() as conn:
        topic.send(conn, key=KEYS[0], value={})
    assert find(10) == 9
    assert find(4) == 4
    with connect() as conn:
        topic.send(conn, key=KEYS[1], value={})
    assert find(5) == 4
    delete(admin, KEYS[0])
    assert find(5) == 4
    delete(admin, KEYS[1])
    assert find(5) == 5


@pytest.mark.guarantee("K5")
def test_another_server_may_lack_what_was_sent(monkeypatch):
    monkeypatch.setattr("jobs_lib.consuming.sent._SHARE", 1e9)
    connection = answer(
        [(None, None, 1)],  # nothing waits
        [(None, None, 1), (0, 5, 1)],  # a row waits
        [],  # it is gone, and so is the server
        [(None, None, 2), (0, 5, 2)],  # it was written again
        [],
        [(None, None, 2)],
    )
    sent = Sent(lambda: QUERIES)
    assert sent.find(connection, {PLACE: 7}) == {PLACE: 7}
    assert sent.find(connection, {PLACE: 9}) == {PLACE: 7}
    assert sent.find(connection, {PLACE: 9}) == {}
    assert sent.find(connection, {PLACE: 9}) == {PLACE: 9}


def test_looks_that_take_long_are_rare(monkeypatch):
    connection = answer([(None, None, 1)], [(None, None, 1)])
    clock = iter([10.0, 10.0, 11.0, 15.0, 19.9, 21.0, 21.0, 21.0])
    monkeypatch.setattr(
        "jobs_lib.consuming.sent.time", Mock(monotonic=lambda: next(clock))
    )
    sent = Sent(lambda: QUERIES)
    assert sent.find(connection, {PLACE: 1}) == {PLACE: 1}
    assert sent.find(connection, {PLACE: 2}) == {PLACE: 1}
    assert sent.find(connection, {PLACE: 2}) == {PLACE: 1}
    assert sent.find(connection, {PLACE: 2}) == {PLACE: 2}


def answer(*rows: list[tuple[int | None, ...]]) -> Any:
    """A connection whose server gives these answers."""
    connection = Mock()
    connection.execute.return_value.fetchall.side_effect = rows
    return connection
