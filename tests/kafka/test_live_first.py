"""A live record passes a re-export that nothing limits."""

from __future__ import annotations

import threading

import pytest

from jobs_lib import reexport
from jobs_lib.partitioner import choose_shard
from tests.support.apps import make_app, running
from tests.support.records import read_topic
from tests.support.reexports import write_reexport

pytestmark = [pytest.mark.expects("fenced"), pytest.mark.timeout(300)]

ROWS, BLOCK = 6_000, 100


@pytest.mark.guarantee("W34", "W30")
@pytest.mark.parametrize("shards", [1, 16])
def test_a_live_record_waits_for_one_block_of_a_re_export_at_most(
    database_url,
    bootstrap_servers,
    topic,
    admin,
    connect,
    database,
    wait_for,
    monkeypatch,
    shards,
):
    # One thread sends all shards, so their blocks leave one after the other.
    monkeypatch.setattr("jobs_lib.outbox.relay.SENDERS", 1)
    monkeypatch.setattr("jobs_lib.outbox.pace._MOST_BATCH", BLOCK)
    app = make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)
    states = app.topic(topic(1), value=int, compacted=True)
    met = threading.Event()

    def load(_connection, keys):
        # The re-export is not over before the first of the live ones.
        if reexport.status(database, "items").sent >= ROWS // 2:
            met.wait(120)
        return dict.fromkeys(keys, 1)

    app.entity(states, source="items", key="id")(load)
    # The rows lie in the shard of the live ones, or in all.
    shard = choose_shard(states.name, "live-0", 16)
    keys = [f"live-{n}" for n in range(400)]
    keys = [key for key in keys if choose_shard(states.name, key, 16) == shard]
    write_reexport(
        admin,
        states.name,
        "items",
        ROWS,
        rate=10_000_000,
        first=shard,
        shards=shards,
    )
    committed: dict[str, int] = {}
    with running(app, "relay"), connect() as connection:
        for part, key in enumerate(keys[:10], 1):
            wait_for(
                lambda part=part: (
                    reexport.status(database, "items").sent >= part * ROWS // 20
                ),
                timeout=120,
                what=lambda: f"some are sent: {reexport.status(database, 'items')}",
            )
            states.send(connection, key=key, value=1)
            connection.commit()
            # What is deleted by now had left before.
            committed[key] = reexport.status(database, "items").sent
            met.set()
        wait_for(
            lambda: reexport.status(database, "items").state == "finished",
            timeout=120,
            what=lambda: f"all are sent: {reexport.status(database, 'items')}",
        )
    sent = [record.key for record in read_topic(bootstrap_servers, states.name)]
    for key, before in committed.items():
        ahead = [one for one in sent[: sent.index(key)] if one.startswith("batch-")]
        # The block under way, and one that was read just before the commit.
        assert len(ahead) - before <= 2 * BLOCK, key
    assert min(committed.values()) <= ROWS // 2 + BLOCK
