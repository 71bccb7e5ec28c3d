"""The index of the rows of re-exports, on tables that lack it."""

from __future__ import annotations

import pytest

from tests.support.upgrades import makes_index


@pytest.mark.guarantee("J27")
@pytest.mark.parametrize("rows", [10, 40_000], ids=["small", "large"])
def test_the_index_is_only_made_while_the_outbox_is_small(empty_url, rows, tmp_path):
    """While it is made, nobody can publish; a large one takes too long."""
    statements = [
        # Few rows to a page, so that few make a large table.
        "alter table jobs_lib.outbox set (fillfactor = 10)",
        (
            "insert into jobs_lib.outbox (shard, topic, value)"
            " select 0, 'states', convert_to(repeat('v', 200), 'utf8')"
            f" from generate_series(1, {rows})"
        ),
    ]
    made = makes_index(empty_url, tmp_path, statements, "outbox_of_reexport")
    assert made is (rows == 10)
