"""Blocks that cannot end by time begin small, and grow as far as their time allows."""

from __future__ import annotations

import pytest

from jobs_lib.consuming.progress import FIRST_WHOLE_SIZE, Progress
from tests.support.apps import make_app
from tests.support.fake_records import fake_record


@pytest.fixture
def progress() -> Progress:
    """A partition with many waiting records, whose blocks cannot end by time."""
    progress = Progress(("t", 0), epoch=1, stored=0, most=5_000, size=FIRST_WHOLE_SIZE)
    progress.share.is_busy = False
    progress.push([fake_record(n, size=10) for n in range(20_000)])
    return progress


def apply(progress: Progress, each: float, budget: float, blocks: int) -> list[int]:
    """Apply blocks of which each record takes so many seconds; returns their sizes."""
    sizes = []
    for _ in range(blocks):
        block = progress.choose()
        sizes.append(len(block))
        progress.adapt(len(block), each * len(block), 0.0, budget)
        progress.move((block[-1].offset() or 0) + 1, len(block))
    return sizes


@pytest.mark.parametrize(
    ("each", "budget", "sizes"),
    [
        # Fast ones have large blocks soon.
        (0.000_02, 1.0, [20, 160, 1_280, 5_000]),
        (0.05, 1.0, [20, 20, 20]),
        # At the limit of a call, half of it is the goal.
        (0.05, 10.0, [20, 40, 80, 160, 160]),
        (0.2, 1.0, [20, 10, 5, 5]),
    ],
)
@pytest.mark.guarantee("W77")
def test_a_block_takes_no_longer_than_it_should_from_the_first_one_on(
    progress, each, budget, sizes
):
    assert apply(progress, each, budget, len(sizes)) == sizes


@pytest.mark.guarantee("W77")
def test_a_partition_that_is_taken_anew_goes_on_with_blocks_of_the_size_that_fits():
    app = make_app("")
    app.consumer("t", group="g", per="block", timeout=3)(lambda records, conn: None)
    app.consumer("u", group="g")(lambda record, conn: None)
    app.read_model("v", table="v", key="k", group="g")(lambda record: {})
    whole, single, model = app.consumers
    assert [one.ends_in_time for one in (whole, single, model)] == [False, True, False]
    assert (whole.timeout, single.timeout > 1e9) == (3, True)
    first = Progress(("t", 0), epoch=1, stored=0, size=40)
    first.shrink(40)
    assert (first.size, first.share.size) == (20, 20)
