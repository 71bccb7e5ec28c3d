"""Unreadable records stop only their partition."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from jobs_lib.operating.schemas import register_schemas
from tests.support.apps import heard, make_app, running
from tests.support.canary import VALUE
from tests.support.records import produce

NULLS = {
    "type": "record",
    "name": "Row",
    "fields": [{"name": "many", "type": {"type": "array", "items": "null"}}],
}
CHAIN = {
    "type": "record",
    "name": "Chain",
    "fields": [{"name": "next", "type": ["null", "Chain"]}],
}
UNREADABLE = {
    "deep JSON": (None, b"[" * 100_000 + b"]" * 100_000, "recursion limit"),
    "a key that is no text": (None, b"[]", "cannot be read: its key is not UTF-8"),
    "a huge integer": (None, b"1" * 900_000, "number out of range"),
    "a list of nothing": (NULLS, b"\x80\x84\xaf\x5f\0", "10000 items"),
    "a deep chain": (CHAIN, b"\2" * 100_000 + b"\0", "200 levels"),
}


@pytest.mark.guarantee("FK12", "FS16")
def test_unreadable_records_are_reported_and_other_topics_go_on(
    database_url, admin, bootstrap_servers, topic, wait_for
):
    app = make_app(
        database_url,
        kafka_bootstrap_servers=bootstrap_servers,
        schema_registry_url=f"mock://{uuid.uuid4()}",
    )
    expected: dict[str, str] = {}
    records: dict[str, list[tuple[Any, bytes]]] = {}
    group = f"g-{uuid.uuid4()}"
    for schema, poison, reason in UNREADABLE.values():
        name = topic(1)
        app.consumer(name, group=group, value=Any, schema=schema and "registered")(
            lambda record, connection: None
        )
        good = b"[]"
        if schema:
            states = app.topic(name, value=Any, schema=schema)
            register_schemas(app)
            good = states.encode({"many": []} if schema is NULLS else {"next": None})
            poison = good[:5] + poison
        bad = b"\xff" + VALUE.encode() if poison == good else "k"
        records[name] = [("k", good), (bad, poison), ("k", good)]
        expected[f"{name}/0"] = reason
    fine = topic(1)
    app.consumer(fine, group=group, value=Any)(lambda record, connection: None)
    with heard("record.failed") as failed, running(app, "consumers"):
        for name, made in records.items():
            produce(bootstrap_servers, name, made)
        wait_for(
            lambda: {fields["origin"] for _, fields in failed} == set(expected),
            timeout=60,
            what="each of them is reported",
        )
        produce(bootstrap_servers, fine, [("k", 1)])
        rows = "select topic, next_offset from jobs_lib.offsets where next_offset > 0"
        stopped = dict.fromkeys(records, 1)
        wait_for(
            lambda: dict(admin.execute(rows).fetchall()) == {**stopped, fine: 1},
            timeout=60,
            what="the others go on",
        )
    for _, fields in failed:
        assert fields["offset"] == 1
        assert "RecordError: the record at" in fields["error"]
        assert expected[fields["origin"]] in fields["error"]
        assert len(fields["error"]) < 500
