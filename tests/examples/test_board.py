"""The board of the flights: its table and its read model fit each other."""

from __future__ import annotations

from examples.flights.board import aircraft_rm
from examples.flights.board_tables import make_tables
from jobs_lib.testing import make_record


def test_the_boards_table_takes_the_rows_of_its_read_model(admin):
    make_tables(admin)
    state = {"tail": "N1", "flights": 3, "airport": "IAH", "delay": -4, "version": 4}
    row = aircraft_rm(make_record(state, key="N1", topic="aircraft-state"))
    found = admin.execute(
        "select attname from pg_attribute"
        " where attrelid = 'aircraft_rm'::regclass and attnum > 0"
    )
    columns = {name for (name,) in found}
    assert row == {"airport": "IAH", "flights": 3, "minutes_late": -4}
    assert columns == {"tail", "version", *row}
