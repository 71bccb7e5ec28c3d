"""Faust (faust-streaming): an agent that takes batches, upserts and commits.

At least once: Faust commits the offsets in the background.
"""

from __future__ import annotations

import json
import os
from typing import Any

import faust
import psycopg

from benchmarks.consume.loops.common import BROKER, DATABASE, GROUP, TOPIC
from benchmarks.consume.statements import COLUMNS, DELETE, UPSERT

app = faust.App(
    GROUP,
    broker=f"kafka://{BROKER}",
    store="memory://",
    topic_disable_leader=True,
    topic_allow_declare=False,
    consumer_auto_offset_reset="earliest",
    broker_session_timeout=6,
    broker_heartbeat_interval=1,
    web_enabled=False,
    datadir=os.environ["BENCH_SCRATCH"],
)
topic = app.topic(TOPIC, value_serializer="raw", key_serializer="raw")


async def handle(stream: Any) -> None:
    """Write the newest record of each key."""
    connection = await psycopg.AsyncConnection.connect(DATABASE)
    async for events in stream.take_events(1_000, within=0.02):
        newest = {event.key: event.value for event in events}
        states = [json.loads(value) for value in newest.values() if value]
        async with connection.cursor() as cursor:
            rows = [tuple(state[c] for c in COLUMNS) for state in states]
            await cursor.executemany(UPSERT, rows)
            gone = [(key.decode(),) for key, value in newest.items() if not value]
            await cursor.executemany(DELETE, gone)
        await connection.commit()


app.agent(topic)(handle)

if __name__ == "__main__":
    app.main()
