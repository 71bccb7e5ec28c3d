"""Profiles: how much each payer has spent. Others ask it over HTTP.

It handles a record by a job, so its group moves on before the work is done. Others wait
for the group ``profiles.done``, which ``done=True`` keeps.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from psycopg import Connection  # noqa: TC002

from examples.payments.payments import Payment
from jobs_lib import App, Item, Record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

app = App("profiles", home="payments")


def name_payer(payload: Payment) -> str:
    """The group of a payment's job: those of one payer run in their order."""
    return payload.payer


@app.batch(size=500, group=name_payer)
def add_up(items: list[Item[Payment]]) -> None:
    """Write the payer's profile at each payment; one that is known stays as it is."""
    payments = [item.payload for item in items]
    with app.transaction() as conn:
        conn.execute(
            """
            with paid as (
                select *, row_number() over same as nth, sum(cents) over same as spent,
                    min(payment) over same as first
                from unnest(%s::int[], %s::text[], %s::int[])
                    as p(payment, payer, cents)
                window same as (partition by payer order by payment)
            )
            insert into profiles (payment, payer, payments, cents)
            select payment, payer, nth + coalesce(before.payments, 0),
                spent + coalesce(before.cents, 0)
            from paid left join lateral (
                select p.payments, p.cents from profiles p
                where p.payer = paid.payer and p.payment < paid.first
                order by p.payment desc limit 1
            ) before on true
            on conflict do nothing
            """,
            (
                [one.id for one in payments],
                [one.payer for one in payments],
                [one.cents for one in payments],
            ),
        )


@app.consumer(
    "payments", group="profiles", value=Payment, per="block", block=1000, done=True
)
def note(records: list[Record[Payment]], conn: Connection[Any]) -> None:
    """Leave each payment of the block to a job."""
    add_up.enqueue_many(conn, [{"payload": record.value} for record in records])


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Close the connections when the server stops."""
    yield
    app.close()


web = FastAPI(title="profiles", lifespan=lifespan)


@web.post("/")
def find(payments: list[int]) -> dict[int, tuple[int, int]]:
    """For each payment, how many its payer had made, and their sum in cents.

    Unknown ones are left out.
    """
    with app.transaction() as conn:
        rows = conn.execute(
            "select payment, payments, cents from profiles where payment = any(%s)",
            (payments,),
        )
        return {payment: (count, cents) for payment, count, cents in rows}
