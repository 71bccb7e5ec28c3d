"""Detection: finds payments that do not fit their payer.

It asks relations and profiles about each payment, so it waits until both know it.
"""

from __future__ import annotations

from typing import Any

from psycopg import Connection  # noqa: TC002

from examples.payments.calls import Api
from examples.payments.payments import Payment
from jobs_lib import App, Record

app = App("detection")
relations = Api(app, "relations")
profiles = Api(app, "profiles")


@app.consumer(
    "payments",
    group="detection",
    value=Payment,
    per="block",
    block=500,
    after=[("payments", "relations"), ("payments", "profiles.done")],
)
def detect(records: list[Record[Payment]], conn: Connection[Any]) -> None:
    """Ask both services about the payments of the block, and judge each."""
    payments = [record.value for record in records]
    numbers = [one.id for one in payments]
    times = relations.ask(numbers)
    totals = profiles.ask(numbers)
    with conn.cursor() as cursor, cursor.copy("copy checked from stdin") as copy:
        for record in records:
            number = record.value.id
            known = times.get(number), *totals.get(number, (None, None))
            suspicious = None not in known and is_suspicious(record.value, *known)
            copy.write_row(
                (number, record.partition, record.offset, *known, suspicious)
            )


def is_suspicious(payment: Payment, times: int, payments: int, cents: int) -> bool:
    """Whether it is the first to its payee, and more than three usual ones."""
    if times > 1 or payments == 1:
        return False
    usual = (cents - payment.cents) / (payments - 1)
    return payment.cents > 3 * usual
