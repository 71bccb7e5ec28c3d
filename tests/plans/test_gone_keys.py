"""Very many keys are gone: a read model's statements cost what they did before."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from jobs_lib.consuming.read_model import ReadModel
from jobs_lib.schemas.codec import JsonCodec
from tests.plans.test_old_snapshots import count_pages

GONE = 100_000


@pytest.mark.guarantee("FP25")
@pytest.mark.parametrize("analyzed", [True, False])
def test_a_record_reads_as_much_with_very_many_keys_gone(admin, analyzed):
    admin.execute(
        "create table model (id text primary key, version bigint not null, name text)"
    )
    admin.execute(
        "insert into jobs_lib.model_keys (model, key, version)"
        " select 'model', 'k' || n, n from generate_series(1, %s) n",
        (GONE,),
    )
    if analyzed:
        admin.execute("analyze jobs_lib.model_keys")
    codec = JsonCodec(TypeAdapter(dict))
    model = ReadModel(lambda record: {}, "model", "id", codec, lambda: "jobs_lib")
    this = ("model", "k7")
    state = ("k7", 9, "Ada", *this, 9, 9)
    end = ("k7", 9, 9, *this, 9, *this, 9, 9)
    statements = [(model._upsert(("name",)), state), (model._remove, end)]
    for statement, values in statements:
        assert count_pages(admin, statement, values) < 30
