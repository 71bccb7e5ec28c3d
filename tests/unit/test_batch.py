"""Each statement of a batch has the reader of its rows beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib.executor.batch import Batch, ignore

if TYPE_CHECKING:
    from jobs_lib.executor.round_trip import Statement

LOOK: Statement = "look", {}
SWEEP: Statement = "sweep", {}
END: Statement = "end_claims", {}


def test_each_reader_gets_the_rows_of_its_statement_and_then_the_batch_is_read():
    read: list[Any] = []
    batch = Batch(
        [
            (LOOK, lambda rows: read.append(("look", rows))),
            (END, ignore),
            (SWEEP, lambda rows: read.append(("sweep", rows))),
        ],
        lambda: read.append("all"),
    )
    assert batch.statements == [LOOK, END, SWEEP]
    batch.answer = [[(1,)], [], [(2,), (3,)]]
    batch.read()
    assert read == [("look", [(1,)]), ("sweep", [(2,), (3,)]), "all"]


def test_no_reader_is_called_for_a_batch_that_may_not_have_committed():
    read: list[Any] = []
    Batch([(LOOK, read.append)], lambda: read.append("all")).read()
    assert read == []
