"""Screening: notes the first payment to each payee. It waits for relations alone."""

from __future__ import annotations

from typing import Any

from psycopg import Connection  # noqa: TC002

from examples.payments.calls import Api
from examples.payments.payments import Payment
from jobs_lib import App, Record

app = App("screening")
relations = Api(app, "relations")


@app.consumer(
    "payments",
    group="screening",
    value=Payment,
    per="block",
    block=500,
    after=[("payments", "relations")],
)
def screen(records: list[Record[Payment]], conn: Connection[Any]) -> None:
    """Ask relations about the payments of the block."""
    times = relations.ask([record.value.id for record in records])
    with conn.cursor() as cursor, cursor.copy("copy screened from stdin") as copy:
        for record in records:
            number = record.value.id
            copy.write_row((number, times.get(number)))
