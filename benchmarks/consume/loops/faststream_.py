"""FastStream on confluent-kafka: a batch subscriber that upserts and commits.

At least once: it commits the offsets after the handler has returned.
"""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker, KafkaMessage

from benchmarks.consume.loops.common import (
    BROKER,
    COLUMNS,
    DATABASE,
    DELETE,
    GROUP,
    TOPIC,
    UPSERT,
)

broker = KafkaBroker(BROKER, logger=None)
app = FastStream(broker, logger=None)
connections: list[psycopg.AsyncConnection[Any]] = []


@app.on_startup
async def connect() -> None:
    """Open the one connection."""
    connections.append(await psycopg.AsyncConnection.connect(DATABASE))


@broker.subscriber(
    TOPIC,
    batch=True,
    max_records=1_000,
    polling_interval=0.02,
    group_id=GROUP,
    auto_offset_reset="earliest",
    session_timeout_ms=6_000,
    ack_policy=AckPolicy.ACK,
)
async def handle(states: list[dict[str, Any] | None], message: KafkaMessage) -> None:
    """Write the newest record of each key."""
    raw = message.raw_message
    newest = {m.key(): state for m, state in zip(raw, states, strict=True)}
    (connection,) = connections
    async with connection.cursor() as cursor:
        rows = [tuple(s[c] for c in COLUMNS) for s in newest.values() if s]
        await cursor.executemany(UPSERT, rows)
        gone = [(key.decode(),) for key, state in newest.items() if not state]
        await cursor.executemany(DELETE, gone)
    await connection.commit()


if __name__ == "__main__":
    asyncio.run(app.run())
