"""Schemas of Avro are compared, and two other libraries judge the comparison."""

from __future__ import annotations

import json
from io import BytesIO

import avro.schema
import fastavro
import pytest
from avro.compatibility import (
    ReaderWriterCompatibilityChecker,
    SchemaCompatibilityType,
)
from fastavro.utils import generate_one
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs_lib.schemas.avro import parse_schema
from jobs_lib.schemas.compatibility import list_misfits


def record(*fields, name="Aircraft", **more):
    made = [dict(zip(("name", "type", "default"), one, strict=False)) for one in fields]
    return {"type": "record", "name": name, "fields": made, **more}


def enum(*symbols, name="Status", **more):
    return {"type": "enum", "name": name, "symbols": [*symbols], **more}


def logical(type_, name, **more):
    return {"type": type_, "logicalType": name, **more}


def misfits(reader, writer) -> list[tuple[str, str]]:
    found = list_misfits(
        parse_schema(json.dumps(reader)), parse_schema(json.dumps(writer))
    )
    return [(one.path, one.reason) for one in found]


TAIL = ("tail", "string")
NODE = record(("next", ["null", "Node"]), ("n", "int"), name="Node")
LONGER = record(("next", ["null", "Node"]), ("n", "int"), ("m", "int"), name="Node")
FITTING = [
    (record(TAIL), record(TAIL, ("seats", "int"))),
    (record(TAIL, ("seats", "int", 0)), record(TAIL)),
    (record(TAIL, ("seats", ["null", "int"], None)), record(TAIL)),
    (record(("seats", "long")), record(("seats", "int"))),
    (record(("seats", ["null", "long"])), record(("seats", "int"))),
    ("double", "float"),
    ("bytes", "string"),
    (enum("A", "B"), enum("A")),
    (enum("A", default="A"), enum("A", "B")),
    (["null", enum("A", default="A")], ["null", enum("A", "B")]),
    ({"type": "array", "items": "long"}, {"type": "array", "items": "int"}),
    ({"type": "map", "values": "long"}, {"type": "map", "values": "int"}),
    (record(TAIL, name="new.Aircraft"), record(TAIL, name="old.Aircraft")),
    (record(TAIL, name="Plane", aliases=["Aircraft"]), record(TAIL)),
    (NODE, NODE),
    (NODE, LONGER),
    (["int", "string"], "int"),
    (["string", "int", "null"], ["null", "string"]),
    (logical("string", "uuid"), "string"),
]
NOT_FITTING = [
    (record(TAIL, ("seats", "int")), record(TAIL), "seats"),
    (record(("seats", "int")), record(("seats", "long")), "seats"),
    (record(("seats", "int")), record(("seats", ["null", "int"])), "seats"),
    (enum("A"), enum("A", "B"), ""),
    (record(("s", enum("A"))), record(("s", enum("A", "B"))), "s"),
    ("int", "string", ""),
    (record(TAIL, name="Plane"), record(TAIL), ""),
    (LONGER, NODE, "m"),
    (
        record(("crew", {"type": "array", "items": record(TAIL, name="Person")})),
        record(("crew", {"type": "array", "items": record(name="Person")})),
        "crew[].tail",
    ),
    (
        record(("crew", {"type": "map", "values": "int"})),
        record(("crew", {"type": "map", "values": "string"})),
        "crew{}",
    ),
    (
        record(("pilot", ["null", record(TAIL, name="Person")])),
        record(("pilot", ["null", record(name="Person")])),
        "pilot.tail",
    ),
    (["null", "int"], ["null", "string"], ""),
    (
        {"type": "fixed", "name": "Id", "size": 8},
        {"type": "fixed", "name": "Id", "size": 4},
        "",
    ),
]


def judge(reader, writer) -> bool:
    """Return the verdict of Avro's own library."""
    checked = ReaderWriterCompatibilityChecker().get_compatibility(
        avro.schema.parse(json.dumps(reader)), avro.schema.parse(json.dumps(writer))
    )
    return checked.compatibility is SchemaCompatibilityType.compatible


@pytest.mark.parametrize(("reader", "writer"), FITTING)
def test_fitting_schemas_have_no_misfits(reader, writer):
    assert misfits(reader, writer) == []
    assert judge(reader, writer)


@pytest.mark.parametrize(("reader", "writer", "path"), NOT_FITTING)
def test_a_misfit_names_its_field(reader, writer, path):
    (found,) = misfits(reader, writer)
    assert found[0] == path
    assert found[1]
    assert not judge(reader, writer)


def test_every_field_that_does_not_fit_is_named():
    reader = record(TAIL, ("seats", "int"), ("age", "int"), ("s", enum("A", "B")))
    writer = record(("tail", "int"), ("age", "int"), ("s", enum("C")))
    assert misfits(reader, writer) == [
        ("tail", "int cannot be read as string"),
        ("seats", "it is missing, and has no default"),
        ("s", "the enum Status has no default for C"),
    ]


def test_a_field_that_was_renamed_is_found_by_its_alias():
    renamed = {"name": "registration", "type": "string", "aliases": ["tail"]}
    reader = {"type": "record", "name": "Aircraft", "fields": [renamed]}
    assert misfits(reader, record(TAIL)) == []
    assert [path for path, _ in misfits(record(TAIL), reader)] == ["tail"]


@pytest.mark.parametrize(
    ("reader", "writer"),
    [
        (logical("long", "timestamp-micros"), logical("long", "timestamp-millis")),
        (logical("long", "timestamp-millis"), logical("int", "date")),
        (
            logical("bytes", "decimal", precision=9, scale=2),
            logical("bytes", "decimal", precision=9, scale=0),
        ),
    ],
)
def test_a_number_is_not_taken_for_another_unit(reader, writer):
    (found,) = misfits(record(("at", reader)), record(("at", writer)))
    assert found[0] == "at"
    assert "would be taken for" in found[1]
    assert misfits(reader, reader) == []


def test_bytes_are_no_string_as_not_all_of_them_are_text():
    assert misfits("string", "bytes") == [("", "bytes cannot be read as string")]


def types(slot: int):
    """Types of one field; named ones have the field's name."""
    plain = st.sampled_from(["int", "long", "double", "string", "boolean"])
    symbols = st.lists(st.sampled_from("ABCD"), min_size=1, unique=True)
    enums = st.builds(
        lambda symbols, has_default: enum(
            *symbols,
            name=f"Enum{slot}",
            **({"default": symbols[0]} if has_default else {}),
        ),
        symbols,
        st.booleans(),
    )
    records = st.builds(
        lambda fields: record(*fields, name=f"Record{slot}"),
        st.lists(
            st.tuples(st.sampled_from("abc"), plain),
            unique_by=lambda one: one[0],
            min_size=1,
        ),
    )
    whole = plain | enums | records
    return (
        whole
        | whole.map(lambda one: ["null", one])
        | whole.map(lambda one: {"type": "array", "items": one})
        | whole.map(lambda one: {"type": "map", "values": one})
    )


@st.composite
def schemas(draw):
    """Records with some of the same three fields; nullable fields may be missing."""
    fields = []
    for slot in range(3):
        type_ = draw(types(slot))
        if draw(st.booleans()):
            nullable = isinstance(type_, list) and draw(st.booleans())
            fields.append((f"f{slot}", type_, *([None] if nullable else [])))
    return record(*fields)


@given(schemas(), schemas())
@settings(max_examples=30, deadline=None)
def test_both_libraries_judge_any_two_schemas_alike(reader, writer):
    found = misfits(reader, writer)
    assert (found == []) == judge(reader, writer)
    if not found:
        written, wanted = fastavro.parse_schema(writer), fastavro.parse_schema(reader)
        value = generate_one(written)
        data = BytesIO()
        fastavro.schemaless_writer(data, written, value)
        data.seek(0)
        fastavro.schemaless_reader(data, written, wanted)
