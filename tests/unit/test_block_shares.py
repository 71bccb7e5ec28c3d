"""Re-exports share the room of a block evenly, and what one leaves others may use."""

from __future__ import annotations

import pytest

from jobs_lib.outbox.block import BatchRows


def make_rows(reexport: int, rows: int, newer: bool | None = None):
    """Rows of a re-export that runs, as they are read."""
    return [
        (n, b"", "states", "k", "things", reexport, newer, "running", None)
        for n in range(rows)
    ]


@pytest.mark.parametrize(
    ("rows", "shares"),
    [
        ({1: 10, 2: 90}, {1: 10, 2: 90}),
        ({1: 200, 2: 90}, {1: 50, 2: 50}),
        ({1: 200, 2: 10, 3: 100}, {1: 45, 2: 10, 3: 45}),
        ({}, {}),
    ],
)
def test_the_room_of_a_block_is_shared(rows, shares):
    found = BatchRows(row for one in rows.items() for row in make_rows(*one))
    assert found.share(100) == shares


def test_only_rows_that_were_there_before_are_dropped_for_a_live_one():
    rows = make_rows(1, 3, newer=True) + make_rows(2, 2, newer=False)
    found = BatchRows(rows, {0, 1})
    assert [row_id for _, row_id, _ in found.dropped] == [0, 1]
    assert (found.left, found.waiting, found.reexports) == (3, {}, {1})
