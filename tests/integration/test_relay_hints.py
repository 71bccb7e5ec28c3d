"""A hint of a row wakes the thread of its shard, and the others a while later."""

from __future__ import annotations

import threading
from itertools import count

import pytest

from jobs_lib.outbox.listener import Listener

LONG = 3_600.0


@pytest.fixture
def listen(database, wait_for):
    """A function that starts a listener, and returns what it has heard."""
    stopping = threading.Event()
    started: list[Listener] = []

    def start(rest: float) -> list[frozenset[int] | None]:
        heard: list[frozenset[int] | None] = []
        listener = Listener(database, heard.append, rest, stopping)
        started.append(listener)
        listener.start()
        # Once it listens, all threads look.
        wait_for(lambda: heard == [None], timeout=60, what="it listens")
        heard.clear()
        return heard

    yield start
    stopping.set()
    for listener in started:
        listener.stop()


def send(admin, database, *hints: str) -> None:
    """Send hints in one transaction."""
    with admin.transaction():
        for hint in hints:
            admin.execute("select pg_notify(%s, %s)", (database.outbox_channel, hint))


def test_a_hint_tells_of_its_shard_alone(listen, admin, database, wait_for):
    heard = listen(rest=LONG)
    send(admin, database, "3", "1023")
    wait_for(lambda: heard, timeout=30, what="it hears")
    assert heard == [{3, 1023}]


def test_a_while_after_a_hint_all_shards_are_looked_at(
    listen, admin, database, wait_for
):
    heard = listen(rest=0.05)
    send(admin, database, "3")
    wait_for(lambda: len(heard) > 1, timeout=30, what="all are told")
    assert heard == [{3}, None]


def test_hints_that_go_on_do_not_put_the_others_off(listen, admin, database, wait_for):
    heard = listen(rest=0.2)
    numbers = count()

    def is_told() -> bool:
        send(admin, database, str(next(numbers) % 16))
        return None in heard

    wait_for(is_told, timeout=30, what="all are told")


@pytest.mark.parametrize("hint", ["", "all", "-1", "9" * 5_000, "٣" * 5])
def test_any_other_hint_is_for_all_shards(listen, admin, database, wait_for, hint):
    heard = listen(rest=LONG)
    send(admin, database, "3", hint)
    wait_for(lambda: heard, timeout=30, what="it hears")
    assert heard == [None]
