"""The steps of a publish end as the functions end that they call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from jobs_lib.streams.steps import run, run_async

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.streams.steps import Steps


@pytest.mark.parametrize(
    "finish",
    [run, lambda steps: asyncio.run(run_async(steps))],
    ids=["publish", "publish_async"],
)
def test_a_check_that_asks_for_the_next_of_nothing_ends_the_publish(
    finish: Callable[[Steps[None]], None],
):
    def check() -> None:
        next(iter(()))

    def publish() -> Steps[None]:
        yield check

    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        finish(publish())
    assert isinstance(caught.value.__cause__, StopIteration)
