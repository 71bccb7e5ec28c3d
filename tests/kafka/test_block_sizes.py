"""How many rows of a re-export leave in one block."""

from __future__ import annotations

import itertools
import time

import pytest

from jobs_lib import reexport, telemetry
from jobs_lib.partitioner import choose_shard
from tests.support.apps import make_app, running
from tests.support.reexports import SHARDS, write_reexport

pytestmark = [pytest.mark.expects("fenced"), pytest.mark.timeout(300)]

SHARD = 3


@pytest.fixture
def send_all(
    database_url,
    bootstrap_servers,
    topic,
    admin,
    connect,
    database,
    wait_for,
    monkeypatch,
):
    """A function that re-exports rows of one shard; it returns the sizes of blocks.

    `send_all(count, rate=…, seconds=…, live=…)`: `seconds` is how long each load takes,
    `live` sends a live row first.
    """
    monkeypatch.setattr("jobs_lib.outbox.relay.SENDERS", 1)

    def send_all(
        count: int, *, rate: int, seconds: float = 0.0, live: bool = False
    ) -> list[int]:
        app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
        states = app.topic(topic(1), value=int, compacted=True)

        def load(_connection, keys):
            time.sleep(seconds)
            return dict.fromkeys(keys, 1)

        app.entity(states, source="items", key="id")(load)
        write_reexport(admin, states.name, "items", count, rate=rate, first=SHARD)
        if live:
            # In the same shard, so that it comes with the first block.
            keys = (f"live-{n}" for n in itertools.count())
            key = next(k for k in keys if choose_shard(states.name, k, SHARDS) == SHARD)
            with connect() as connection:
                states.send(connection, key=key, value=1)
        sizes: list[int] = []
        remove = telemetry.listen(
            lambda _, fields: sizes.append(len(fields["rows"])), only={"block.deleted"}
        )
        try:
            with running(app, "relay"):
                wait_for(
                    lambda: reexport.status(database, "items").state == "finished",
                    timeout=120,
                    what=lambda: f"all are sent: {reexport.status(database, 'items')}",
                )
        finally:
            remove()
        return sizes

    return send_all


@pytest.mark.guarantee("W34")
def test_blocks_grow_while_no_live_row_comes(send_all):
    assert send_all(4_000, rate=10_000_000) == [100, 200, 400, 800, 1_000, 1_000, 500]


@pytest.mark.guarantee("W34")
def test_blocks_last_a_tenth_of_a_second_while_live_rows_come(send_all, monkeypatch):
    monkeypatch.setattr("jobs_lib.outbox.pace._QUIET_SECONDS", 600.0)
    sizes = send_all(600, rate=10_000_000, seconds=0.2, live=True)
    # The first block has the live row, too.
    assert sizes == [101, 100, 100, 100, 100, 100]


@pytest.mark.guarantee("W28")
def test_blocks_have_no_more_rows_than_the_rate_allows(send_all):
    # At 6,000 a minute the bucket holds 90 records.
    sizes = send_all(300, rate=6_000)
    assert sum(sizes) == 300
    assert max(sizes) <= 91
