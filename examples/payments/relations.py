"""Relations: who has paid whom, and how often. Others ask it over HTTP.

It handles the records themselves, so its group is what others wait for.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from psycopg import Connection  # noqa: TC002

from examples.payments.payments import Payment
from jobs_lib import App, Record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

app = App("relations")


@app.consumer("payments", group="relations", value=Payment, per="block", block=1000)
def relate(records: list[Record[Payment]], conn: Connection[Any]) -> None:
    """Count each payment of the block; one that is known already stays as it is."""
    payments = [record.value for record in records]
    conn.execute(
        """
        with paid as (
            select *, row_number() over same as nth, min(payment) over same as first
            from unnest(%s::int[], %s::text[], %s::text[]) as p(payment, payer, payee)
            window same as (partition by payer, payee order by payment)
        )
        insert into relations (payment, payer, payee, times)
        select payment, payer, payee, nth + coalesce((
            select r.times from relations r
            where (r.payer, r.payee) = (paid.payer, paid.payee)
                and r.payment < paid.first
            order by r.payment desc limit 1
        ), 0)
        from paid
        on conflict do nothing
        """,
        (
            [one.id for one in payments],
            [one.payer for one in payments],
            [one.payee for one in payments],
        ),
    )


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Close the connections when the server stops."""
    yield
    app.close()


web = FastAPI(title="relations", lifespan=lifespan)


@web.post("/")
def find(payments: list[int]) -> dict[int, int]:
    """For each payment, how often its payer had paid its payee.

    Unknown ones are left out.
    """
    with app.transaction() as conn:
        rows = conn.execute(
            "select payment, times from relations where payment = any(%s)", (payments,)
        )
        return dict(rows.fetchall())
