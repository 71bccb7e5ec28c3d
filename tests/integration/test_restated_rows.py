"""A re-synchronisation replaces a row that is written otherwise, and no other row."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Message

from jobs_lib import App

TYPES = {
    "smallint": ("1", "2"),
    "integer": ("1", "2"),
    "bigint": ("1", "2"),
    "numeric": ("1.0", "1.00"),
    "numeric(9, 2)": ("1.00", "1.01"),
    "double precision": ("0", "-0"),
    "real": ("1.5", "1.25"),
    "boolean": ("true", "false"),
    "text": ("a", "A"),
    "varchar(3)": ("a", "a "),
    "uuid": (
        "5f0f2b1e-5a3c-4f4e-9a34-1d7a1f1d2a10",
        "5f0f2b1e-5a3c-4f4e-9a34-1d7a1f1d2a11",
    ),
    "bytea": ("\\x01", "\\x02"),
    "date": ("2026-01-01", "infinity"),
    "timestamp": ("2026-01-01 10:00:00.000001", "2026-01-01 10:00:00.000002"),
    "timestamptz": ("2026-01-01 10:00:00.000001+00", "infinity"),
    "interval": ("1 day", "24 hours"),
    "json": ('{"a": 1}', '{"a":1}'),
    "jsonb": ('{"a": 1.0}', '{"a": 1.00}'),
    "int[]": ("{1,2}", "{2,1}"),
}
"""Two values of each type that differ in their text, though some are equal."""


@pytest.fixture(params=TYPES)
def kind(request, admin) -> str:
    """The type of the column of a model's table."""
    kind: str = request.param
    admin.execute(
        f"create table model (id text primary key, version bigint, v {kind})".encode()
    )
    return kind


@pytest.fixture
def write(database, admin):
    """Write a state of version 1, as a service or a re-synchronisation."""
    app = App("test")

    @app.read_model("states", table="model", key="id", group="g")
    def row(record):
        return {"v": record.value["v"]}

    (declared,) = app.consumers
    assert declared.model is not None
    service, resync = declared.model, declared.model.make_anew()

    def write(value: str | None, *, again: bool = True) -> None:
        model = resync if again else service
        message = Message(
            "states",
            0,
            offset=1,
            key=b"a",
            value=json.dumps({"v": value}).encode(),
            headers=[("ce_version", b"1")],
        )
        changes = model.read([message])
        with database.connect("test") as connection, connection.transaction():
            model.learn_types(connection, changes)
            model.write(connection, changes, None)

    return write


@pytest.mark.guarantee("W64")
def test_a_row_is_replaced_where_its_text_differs_and_else_left_alone(
    kind, write, admin
):
    def read() -> tuple[str, str | None]:
        row = admin.execute("select xmin::text, v::text from model").fetchone()
        assert row is not None
        return row

    right, wrong = TYPES[kind]
    write(wrong, again=False)
    written, found = read()
    write(wrong)
    assert read() == (written, found)
    write(right)
    assert read()[1] != found
    written, found = read()
    write(right)
    assert read() == (written, found)
    write(None)
    assert read()[1] is None
    written, _ = read()
    write(None)
    assert read() == (written, None)
