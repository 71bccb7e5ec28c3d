"""A cancellation that nobody requested is a failure: it counts, and has its backoff."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jobs_lib import exponential
from tests.faults.helpers import attempts, count
from tests.support.apps import HOME, executing, heard


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def raise_it(job) -> None:
    raise asyncio.CancelledError


async def cancel_itself(job) -> None:
    for _ in range(2):
        this_task().cancel()
    await asyncio.sleep(60)


async def await_what_is_cancelled(job) -> None:
    inner = asyncio.create_task(asyncio.sleep(60))
    inner.cancel()
    await inner


async def cancel_in_a_transaction(job) -> None:
    async with job.transaction() as connection:
        this_task().cancel()
        await connection.execute("select 1")


async def cancel_every_task(job) -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(60)


def raise_it_on_a_thread(job) -> None:
    raise asyncio.CancelledError


@pytest.mark.guarantee("FJ4")
@pytest.mark.parametrize(
    "handler",
    [
        raise_it,
        cancel_itself,
        await_what_is_cancelled,
        cancel_in_a_transaction,
        cancel_every_task,
        raise_it_on_a_thread,
    ],
    ids=lambda handler: handler.__name__,
)
def test_an_unrequested_cancellation_burns_an_attempt(
    url, app, admin, connect, wait_for, handler
):
    rude = app.job(name="rude", retry=exponential(first=0.2, cap=0.2, max_attempts=3))(
        handler
    )

    @app.job()
    async def quick(job) -> None: ...

    with connect() as connection:
        rude.enqueue(connection)
    with heard("job.ran") as ran, executing(app, HOME, workers=2):
        wait_for(lambda: count(url) == 0, what=lambda: f"it has ended: {ran}")
        with connect() as connection:
            quick.enqueue_many(connection, [{}] * 20)
        wait_for(lambda: count(url) == 0, what="the loop goes on")
    assert attempts(url) == {("completed", 1), ("discarded", 3)}
    outcomes = [fields["outcome"] for _, fields in ran]
    assert outcomes[:3] == ["retried", "retried", "discarded"]
    (errors,) = admin.execute("select errors from jobs_lib.discarded").fetchone()
    assert [error["error"].split(":")[0] for error in errors] == 3 * ["CancelledError"]
