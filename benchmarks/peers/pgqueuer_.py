"""pgqueuer, with asyncpg: its fastest driver."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer, Queries

from benchmarks.peers.adapter import (
    enqueue_for,
    make_sink,
    payload_of,
    read_command,
    say,
    send_in_turn,
)

_SLICE = 5_000
_ADDRESS = {
    "host": os.environ["PGHOST"],
    "port": int(os.environ["PGPORT"]),
    "user": os.environ["PGUSER"],
    "password": os.environ["PGPASSWORD"],
    "database": os.environ["PGDATABASE"],
}


async def connect() -> Any:
    """Its queries, on a connection of their own."""
    return Queries.from_asyncpg_connection(await asyncpg.connect(**_ADDRESS))


async def setup(given: dict[str, Any]) -> None:
    """Make the tables."""
    await (await connect()).install()


async def enqueue(given: dict[str, Any]) -> None:
    """Enqueue one job per transaction."""
    opened = [await connect() for _ in range(given["connections"])]
    await opened[0].enqueue("noop", b'{"i":0}')

    def call(queries: Any) -> Any:
        return lambda: queries.enqueue("noop", b'{"i":1}')

    await enqueue_for(given["seconds"], [call(queries) for queries in opened])


async def bulk(given: dict[str, Any]) -> None:
    """Enqueue many jobs per call."""
    queries = await connect()
    jobs = given["jobs"]
    began = time.perf_counter()
    for start in range(0, jobs, _SLICE):
        payloads = [
            json.dumps(payload_of(number, given["mode"])).encode()
            for number in range(start, min(start + _SLICE, jobs))
        ]
        many = len(payloads)
        await queries.enqueue(["noop"] * many, payloads, [0] * many)
    say(jobs=jobs, seconds=time.perf_counter() - began)


async def work(given: dict[str, Any]) -> None:
    """Run jobs until the process is ended."""
    sink, settings = make_sink(given), given["settings"]
    pool = await asyncpg.create_pool(
        **_ADDRESS, min_size=settings["pool"], max_size=settings["pool"]
    )
    worker = PgQueuer.from_asyncpg_pool(pool)

    async def noop(job: Any) -> None:
        sink.note(json.loads(job.payload)["i"])

    worker.entrypoint("noop")(noop)
    say(event="ready", at=time.monotonic_ns())
    await worker.run(batch_size=settings["batch_size"])


async def send(given: dict[str, Any]) -> None:
    """Enqueue one job after the other."""
    opened = [await connect() for _ in range(given["connections"])]

    def call(queries: Any) -> Any:
        return lambda number: queries.enqueue("noop", b'{"i":%d}' % number)

    await send_in_turn(given, [call(queries) for queries in opened])


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    command, given = read_command()
    asyncio.run(globals()[command](given))
