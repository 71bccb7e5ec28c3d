"""Very many keys are gone: a read model's statements cost what they did before."""

from __future__ import annotations

import pytest

from jobs_lib.consuming.read_model import _CHANGE, _ENDS, _STATES, _STATES_AGAIN
from jobs_lib.consuming.table_statements import TableStatements
from jobs_lib.postgres.queries import load_queries
from tests.plans.test_old_snapshots import count_pages

GONE = 100_000
ROWS = 20


@pytest.fixture
def model(admin) -> TableStatements:
    """A model whose table has many rows, and very many keys are gone."""
    admin.execute("create table model (id text primary key, version bigint, name text)")
    admin.execute(
        "insert into model select 'k' || n, n, 'Ada' from generate_series(1, %s) n",
        (GONE,),
    )
    admin.execute(
        "insert into jobs_lib.model_keys (model, key, version)"
        " select 'model', 'k' || n, n from generate_series(1, %s) n",
        (GONE,),
    )
    queries = load_queries("jobs_lib")
    table = TableStatements("model", "id", lambda: queries)
    table.learn_types(admin, {"version", "name"})
    return table


@pytest.mark.guarantee("FP25")
@pytest.mark.parametrize("analyzed", [True, False])
@pytest.mark.parametrize("has_version", [True, False], ids=["versions", "places"])
@pytest.mark.parametrize("templates", [_STATES, _STATES_AGAIN, _ENDS])
def test_a_record_reads_as_much_with_very_many_keys_gone(
    model, admin, analyzed, has_version, templates
):
    if analyzed:
        admin.execute("analyze jobs_lib.model_keys, model")
    is_state = templates is not _ENDS
    template = templates[has_version]
    statement = model.compose(template, ["name"] if is_state else [], _CHANGE)
    numbers = range(7, 7 + ROWS)
    values = {
        "record_key": [f"k{n}" for n in numbers],
        "version": [str(n) for n in numbers],
        "record_offset": [str(n) for n in numbers],
        "appended_ms": ["0"] * ROWS,
        "column_0": ["Ada"] * ROWS,
        "model": "model",
        "topic_id": None,
        "partition": 0,
        "again": templates is _STATES_AGAIN,
    }
    assert count_pages(admin, statement, values) < 30 * ROWS
