"""The tables of the board, as its migration makes them.

The demo connects as one role. A real service gives the table a writer and readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib import create_read_model

if TYPE_CHECKING:
    import psycopg


def make_tables(connection: psycopg.Connection) -> None:
    """Make the table that has the same states as the topic aircraft-state."""
    create_read_model(
        connection,
        "aircraft_rm",
        key="tail",
        columns={
            "airport": "text not null",
            "flights": "int not null",
            "minutes_late": "int not null",
        },
    )
