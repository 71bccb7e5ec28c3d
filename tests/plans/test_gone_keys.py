"""Very many keys are gone: a read model's statements cost what they did before."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from jobs_lib.consuming.read_model import ReadModel
from jobs_lib.postgres.queries import load_queries
from jobs_lib.schemas.codec import JsonCodec
from tests.plans.test_old_snapshots import count_pages

GONE = 100_000
ROWS = 20
COLUMNS = {True: ("name",), False: None}


@pytest.fixture
def model(admin) -> ReadModel:
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
    codec = JsonCodec(TypeAdapter(dict))
    queries = load_queries("jobs_lib")
    made = ReadModel(lambda record: {}, "model", "id", codec, lambda: queries)
    made._types = {"id": "text", "version": "bigint", "name": "text"}
    return made


@pytest.mark.guarantee("FP25")
@pytest.mark.parametrize("analyzed", [True, False])
@pytest.mark.parametrize("has_version", [True, False], ids=["versions", "places"])
@pytest.mark.parametrize("is_state", [True, False], ids=["states", "ends"])
def test_a_record_reads_as_much_with_very_many_keys_gone(
    model, admin, analyzed, has_version, is_state
):
    if analyzed:
        admin.execute("analyze jobs_lib.model_keys, model")
    statement = model._compose(has_version, COLUMNS[is_state])
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
    }
    assert count_pages(admin, statement, values) < 30 * ROWS
