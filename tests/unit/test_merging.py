"""Rows of a search are merged with states that updates have returned."""

from __future__ import annotations

from types import SimpleNamespace
from uuid import UUID

import pytest

from jobs_lib import AnswerError, App, EntityState
from jobs_lib.consuming.merging import choose_newest

ROWS = [
    {"tail": "N1", "version": 5, "airport": "JFK", "seats": 2},
    {"tail": "N2", "version": 5, "airport": "JFK", "seats": 4},
]


@pytest.fixture
def aircraft():
    app = App("test")

    @app.read_model("states", table="aircraft_rm", key="tail", group="g")
    def aircraft_rm(record):
        return record.value

    return app.answers(aircraft_rm)


def at_jfk(row) -> bool:
    return row["airport"] == "JFK"


@pytest.mark.guarantee("W74")
@pytest.mark.parametrize(("version", "airport"), [(6, "LAX"), (5, "JFK"), (4, "JFK")])
def test_only_a_newer_state_replaces_the_columns_of_its_row(aircraft, version, airport):
    merged = aircraft.merge(ROWS, [EntityState("N1", version, {"airport": "LAX"})])
    assert merged == [
        {"tail": "N1", "version": max(version, 5), "airport": airport, "seats": 2},
        ROWS[1],
    ]
    assert ROWS[0]["airport"] == "JFK"


@pytest.mark.guarantee("W74")
def test_a_removed_entity_disappears_unless_its_row_is_newer(aircraft):
    gone = [EntityState("N1", 6, None), EntityState("N2", 4, None)]
    gone.append(EntityState("N3", 1, None))
    assert aircraft.merge(ROWS, gone, belongs=at_jfk) == [ROWS[1]]


@pytest.mark.guarantee("W74")
def test_a_changed_row_stays_and_a_new_one_comes_only_where_the_caller_says_so(
    aircraft,
):
    newer = [
        EntityState("N1", 6, {"airport": "LAX"}),
        EntityState("N3", 1, {"airport": "JFK", "seats": 9}),
        EntityState("N4", 1, {"airport": "LAX", "seats": 9}),
    ]
    new = {"tail": "N3", "version": 1, "airport": "JFK", "seats": 9}
    assert aircraft.merge(ROWS, newer, belongs=at_jfk) == [ROWS[1], new]
    assert [row["tail"] for row in aircraft.merge(ROWS, newer)] == ["N1", "N2"]


def test_the_caller_gives_the_order(aircraft):
    newer = [EntityState("N3", 1, {"airport": "JFK", "seats": 3})]
    merged = aircraft.merge(ROWS, newer, belongs=at_jfk, sort=lambda row: row["seats"])
    assert [row["tail"] for row in merged] == ["N1", "N3", "N2"]


def test_the_newest_of_several_states_of_a_key_counts(aircraft):
    newer = [EntityState("N1", n, {"seats": n}) for n in (7, 9, 8)]
    assert choose_newest(newer) == [newer[1]]
    assert aircraft.merge(ROWS[:1], newer)[0]["seats"] == 9


@pytest.mark.parametrize("known", [{}, {"version": None}])
def test_a_row_without_a_version_yields(aircraft, known):
    rows = [{"tail": "N1", "airport": "JFK", **known}]
    (row,) = aircraft.merge(rows, [EntityState("N1", 1, {"airport": "LAX"})])
    assert row == {"tail": "N1", "airport": "LAX", "version": 1}


def test_the_rows_may_call_key_and_version_otherwise(aircraft):
    newer = [EntityState("N1", 6, {"airport": "LAX"})]
    rows = [{"id": "N1", "v": 6, "airport": "JFK"}]
    assert aircraft.merge(rows, newer, key="id", version="v") == rows
    assert aircraft.merge([{**rows[0], "v": 5}], newer, key="id", version="v") == [
        {"id": "N1", "v": 6, "airport": "LAX"}
    ]


@pytest.mark.parametrize(
    ("of_state", "of_row"),
    [("7", 7), (7, "7"), (UUID(int=7), str(UUID(int=7))), (b"\0a", memoryview(b"\0a"))],
)
def test_a_key_is_the_same_in_each_type_that_it_may_have(aircraft, of_state, of_row):
    merged = aircraft.merge([{"tail": of_row}], [EntityState(of_state, 1, {"a": 1})])
    assert merged == [{"tail": of_row, "a": 1, "version": 1}]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (("s3cret", 1), "a row is of the type tuple: give mappings"),
        (SimpleNamespace(tail="s3cret"), "a row is of the type SimpleNamespace"),
        ({"name": "s3cret"}, "a row has no 'tail': select the read model's key"),
    ],
)
def test_rows_of_another_form_are_refused_without_their_values(aircraft, row, told):
    with pytest.raises(AnswerError, match=told) as refused:
        aircraft.merge([row], [])
    assert "s3cret" not in str(refused.value)
