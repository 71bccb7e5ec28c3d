"""FastStream on confluent-kafka: a batch subscriber that upserts and commits.

At least once: it commits the offsets after the handler has returned. Its own decoder
fails at a tombstone, and then passes the whole batch over.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import psycopg
from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker, KafkaMessage

from benchmarks.consume.loops.common import BROKER, DATABASE, GROUP, TOPIC
from benchmarks.consume.statements import COLUMNS, DELETE, UPSERT

broker = KafkaBroker(BROKER, logger=None)
app = FastStream(broker, logger=None)
connections: list[psycopg.AsyncConnection[Any]] = []


async def connect() -> None:
    """Open the one connection."""
    connections.append(await psycopg.AsyncConnection.connect(DATABASE))


async def decode(message: KafkaMessage) -> list[dict[str, Any] | None]:
    """Decode a batch by the library that FastStream uses."""
    values = [m.value() for m in message.raw_message]
    return [orjson.loads(value) if value else None for value in values]


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


app.on_startup(connect)
broker.subscriber(
    TOPIC,
    batch=True,
    max_records=1_000,
    polling_interval=0.02,
    group_id=GROUP,
    auto_offset_reset="earliest",
    session_timeout_ms=6_000,
    decoder=decode,
    ack_policy=AckPolicy.ACK,
)(handle)

if __name__ == "__main__":
    asyncio.run(app.run())
