"""A handler that returns work instead of doing it has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib import Item  # noqa: TC001 - the app reads the annotation
from tests.support.apps import HOME, count, executing

if TYPE_CHECKING:
    from jobs_lib import Job


async def work_later() -> None: ...


def yield_work():
    yield


def return_coroutine(job: Job) -> Any:
    return work_later()


def return_generator(job: Job) -> Any:
    return yield_work()


async def return_inner_coroutine(job: Job) -> Any:
    return work_later()


def return_of_batch(items: list[Item[int]]) -> Any:
    return work_later()


@pytest.mark.guarantee("FJ4")
@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (return_coroutine, "returned a coroutine, which was never awaited"),
        (return_generator, "returned a generator, which was never looped over"),
        (return_inner_coroutine, "returned a coroutine, which was never awaited"),
        (return_of_batch, "returned a coroutine, which was never awaited"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_handler_that_returns_work_has_failed(
    app, admin, connect, wait_for, handler, said
):
    if handler is return_of_batch:
        work = app.batch(name="work", retry=1)(handler)
        payload = {"payload": 7}
    else:
        work = app.job(name="work", retry=1)(handler)
        payload = {}
    with connect() as connection:
        work.enqueue(connection, **payload)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "discarded") == 1, what="it has failed")
    ((errors,),) = admin.execute("select errors from jobs_lib.discarded").fetchall()
    assert said in errors[-1]["error"]
    assert "`async def`" in errors[-1]["error"]


def test_a_plain_value_that_a_handler_returns_is_ignored(app, admin, connect, wait_for):
    @app.job()
    def work(job: Job) -> Any:
        return [1, 2, 3]

    with connect() as connection:
        work.enqueue(connection)
    with executing(app, HOME):
        wait_for(lambda: count(admin, "history") == 1, what="it has run")
    assert count(admin, "discarded") == 0
