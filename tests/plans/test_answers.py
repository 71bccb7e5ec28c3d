"""A read model is asked by its key, however many rows and entries there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from psycopg import sql

from jobs_lib import App

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = 100_000
ENTRIES = 1_000
VALUES = {
    "model": "model",
    "own": "model",
    "key": "7",
    "version": "9",
    "value": "{}",
    "bytes": "2",
    "group": "g",
    "topic": "t",
    "seconds": "300",
    "most": "1000",
    "most_bytes": "1000000",
    "keys": "{}",
    "versions": "{}",
}
COUNTED = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter")


@pytest.fixture
def steps(admin):
    """What asks a read model with many rows, for which many entries are kept."""
    admin.execute("create table model (id int primary key, version bigint, name text)")
    admin.execute(
        "insert into model select n, n, 'Ada' from generate_series(1, %s) n", (ROWS,)
    )
    admin.execute(
        "insert into jobs_lib.model_keys (model, key, version)"
        " select 'model', 'gone' || n, n from generate_series(1, %s) n",
        (ROWS,),
    )
    # Entries of other read models count for nothing.
    admin.execute(
        "insert into jobs_lib.answers (model, key, version, value, bytes,"
        " consumer_group, topic) select model, n, n + 1, '{}', 2, 'g', 't'"
        " from generate_series(1, %s) n, unnest(array['model', 'other']) model",
        (ENTRIES,),
    )
    app = App("test")
    app.read_model("t", table="model", key="id", group="g")(lambda record: {})
    return app.answers("model")._steps


@pytest.mark.guarantee("FP25")
@pytest.mark.parametrize("analyzed", [True, False])
@pytest.mark.parametrize(
    ("template", "entries"),
    [
        ("read_known", 1),
        ("read_newer", ENTRIES),
        ("put_answer", ENTRIES),
        ("forget_reached", ENTRIES),
    ],
)
def test_a_question_looks_at_the_rows_that_it_is_about(
    steps, admin, analyzed, template, entries
):
    if analyzed:
        admin.execute("analyze jobs_lib.model_keys, jobs_lib.answers, model")
    preparing = steps._prepare(template, [])
    next(preparing)
    with pytest.raises(StopIteration) as prepared:
        preparing.send([("id", "integer")])
    statement = sql.SQL(prepared.value.value.named)
    explain = sql.SQL("explain (analyze, format json) ")
    ((((plan,),)),) = admin.execute(explain + statement, VALUES).fetchall()
    assert entries <= sum(count_rows(plan["Plan"])) < 20 * entries


def count_rows(node: dict[str, Any]) -> Iterator[int]:
    """Count the rows that each part of a plan has found or passed over."""
    rows = sum(node.get(name, 0) for name in COUNTED)
    yield rows * node["Actual Loops"]
    for one in node.get("Plans", []):
        yield from count_rows(one)
