"""procrastinate: it fetches and finishes one row at a time, on one event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import procrastinate
import uvloop

from benchmarks.peers.adapter import (
    database_address,
    enqueue_for,
    group_of,
    make_sink,
    payload_of,
    read_command,
    say,
    send_in_turn,
)

_SLICE = 1_000


def make_app(connections: int) -> Any:
    """An app with a pool of this size."""
    connector = procrastinate.PsycopgConnector(
        conninfo=database_address(), min_size=connections, max_size=connections
    )
    return procrastinate.App(connector=connector)


def declare(app: Any, sink: Any = None) -> Any:
    """The task that does nothing."""

    async def noop(i: int, k: str | None = None) -> None:
        sink.note(i, k)

    return app.task(name="noop")(noop)


async def setup(given: dict[str, Any]) -> None:
    """Make the tables."""
    async with make_app(1).open_async() as app:
        await app.schema_manager.apply_schema_async()


async def enqueue(given: dict[str, Any]) -> None:
    """Enqueue one job per transaction."""
    async with make_app(given["connections"]).open_async() as app:
        task = declare(app)
        await task.defer_async(i=0)
        calls = [lambda: task.defer_async(i=1)] * given["connections"]
        await enqueue_for(given["seconds"], calls)


async def bulk(given: dict[str, Any]) -> None:
    """Enqueue many jobs per call; its locks serve as groups."""
    jobs, mode = given["jobs"], given["mode"]
    async with make_app(1).open_async() as app:
        task = declare(app)
        began = time.perf_counter()
        for start in range(0, jobs, _SLICE):
            numbers = range(start, min(start + _SLICE, jobs))
            if mode == "plain":
                await task.batch_defer_async(*[{"i": number} for number in numbers])
                continue
            made = [
                task.configure(lock=group_of(number, mode)).job.evolve(
                    task_kwargs=payload_of(number, mode)
                )
                for number in numbers
            ]
            await app.job_manager.batch_defer_jobs_async(made)
        say(jobs=jobs, seconds=time.perf_counter() - began)


async def work(given: dict[str, Any]) -> None:
    """Run jobs until the process is ended."""
    concurrency = given["settings"]["concurrency"]
    async with make_app(concurrency + 2).open_async() as app:
        declare(app, make_sink(given))
        say(event="ready", at=time.monotonic_ns())
        await app.run_worker_async(
            concurrency=concurrency,
            delete_jobs=given["settings"]["delete_jobs"],
            install_signal_handlers=False,
        )


async def send(given: dict[str, Any]) -> None:
    """Enqueue one job after the other."""
    async with make_app(given["connections"]).open_async() as app:
        task = declare(app)
        calls = [lambda number: task.defer_async(i=number)] * given["connections"]
        await send_in_turn(given, calls)


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    command, given = read_command()
    asyncio.run(globals()[command](given))
