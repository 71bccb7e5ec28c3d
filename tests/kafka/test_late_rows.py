"""Rows that are committed late are sent in order, wherever a relay begins to read."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from itertools import count

import pytest

from jobs_lib.outbox.starts import Start, Starts
from tests.support import apps
from tests.support.apps import make_app, running
from tests.support.records import read_topic

STEPS = 400
PAUSE = 20
WRITERS = 8
KEYS = [None, None, *(f"k{n}" for n in range(12))]


@pytest.fixture
def app(database_url, bootstrap_servers):
    """An app with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)


@pytest.fixture
def events(app, topic):
    """A topic in which each row is a record."""
    return app.topic(topic(4), value=int)


@pytest.fixture
def made(monkeypatch):
    """The group starts of the senders, one for each connection, in order."""
    made: list[Starts] = []

    class Told(Starts):
        def __init__(self, queries) -> None:
            super().__init__(queries)
            made.append(self)

    monkeypatch.setattr("jobs_lib.outbox.relay_thread.Starts", Told)
    return made


@pytest.fixture
def emptied(admin, wait_for):
    """A function that waits until the outbox is empty."""
    return lambda: wait_for(
        lambda: apps.count(admin, "outbox") == 0, timeout=60, what="all is sent"
    )


@pytest.mark.guarantee("W8", "W12")
def test_rows_that_are_committed_late_leave_in_order(
    app, events, made, connect, bootstrap_servers, emptied, monkeypatch
):
    # Every poll counts as slow, as beside an old snapshot; rows without a lock are late
    # at once.
    monkeypatch.setattr("jobs_lib.outbox.starts._QUICK", -1.0)
    monkeypatch.setattr("jobs_lib.outbox.starts._MARGIN", 0.0)
    chance = random.Random(19)
    writers = [connect() for _ in range(WRITERS)]
    keys: dict[int, str | None] = {}
    """The keys of the rows that are not committed yet, by writer."""
    values = count()
    written: dict[int, int] = {}
    committed: defaultdict[str | None, list[int]] = defaultdict(list)

    def write(number: int, key: str | None) -> None:
        keys[number], written[number] = key, next(values)
        events.send(writers[number], key=key, value=written[number])

    def end(number: int, *, lost: bool) -> None:
        key = keys.pop(number)
        if lost:
            writers[number].rollback()
            return
        writers[number].commit()
        committed[key].append(written[number])

    with running(app, "relay"):
        for step in range(STEPS):
            number = chance.randrange(WRITERS)
            if number in keys:
                key = keys[number]
                end(number, lost=chance.random() < 0.2)
                # The next row of the key follows at once, and must not leave first.
                write(number, key)
                end(number, lost=False)
            else:
                key = chance.choice(KEYS)
                if key is None or key not in keys.values():
                    write(number, key)
            if step % PAUSE == 0:
                emptied()
        for number in [*keys]:
            end(number, lost=False)
        emptied()
    found: defaultdict[str | None, list[int]] = defaultdict(list)
    for record in read_topic(bootstrap_servers, events.name):
        found[record.key or None].append(record.json)
    assert sorted(found.pop(None)) == sorted(committed.pop(None))
    assert found == committed
    assert any(starts._settled for starts in made)


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FP7")
def test_a_new_connection_forgets_which_ids_were_settled(
    app, events, made, admin, connect, bootstrap_servers, emptied, monkeypatch
):
    # No look is a complete one by itself.
    monkeypatch.setattr("jobs_lib.outbox.starts._QUICK", math.inf)
    sent = "select pid from pg_stat_activity where application_name like %s"
    with running(app, "relay"):
        with connect() as connection:
            events.send(connection, key="k", value=1)
        emptied()
        for starts in made:
            starts._starts = {n: Start(10**9, 10**9, starts._server) for n in range(16)}
        # A server that lacks commits draws this id again; by its id the row was sent
        # before.
        with connect() as connection:
            events.send(connection, key="k", value=2)
        pids = [pid for (pid,) in admin.execute(sent, ["jobs_lib relay %"])]
        assert pids
        admin.execute("select pg_terminate_backend(p) from unnest(%s::int[]) p", [pids])
        emptied()
    values = [record.json for record in read_topic(bootstrap_servers, events.name)]
    assert values == [1, 2]
