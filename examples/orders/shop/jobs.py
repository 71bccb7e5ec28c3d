"""The shop's work after its answer. ``jobs-lib run shop.jobs:app`` runs it."""

from __future__ import annotations

import logging
import os
from datetime import datetime, timedelta

import httpx

from jobs_lib import Item, Job, Rate, exponential
from shop.app import app, order_state

__all__ = ["app"]

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
PARTNER = os.environ.get("PARTNER_URL", "http://127.0.0.1:8010")
partner = httpx.Client(base_url=PARTNER, timeout=5)

STATE = "select state from orders where id = %s"
SETTLE = "update orders set state = %s, version = version + 1 where id = %s"
FORGET = "delete from orders where placed_at < %s returning id, version"
ADD_UP = """
    insert into totals
    select customer, coalesce(sum(cents) filter (where state = 'paid'), 0) from orders
    where customer = %s group by customer
    on conflict (customer) do update set cents = excluded.cents
"""


def ask_partner(job: Job, path: str, **what: str | int) -> None:
    """Call the partner; if that fails, the job fails and is tried again."""
    reply = partner.post(
        path,
        json=what,
        # The key is the same in each attempt: the last answer may have been lost.
        headers={"Idempotency-Key": job.idempotency_key},
    )
    reply.raise_for_status()


@app.job(group="customer", retry=exponential(first=0.2, cap=60))
def charge(job: Job, customer: str, order: int, cents: int) -> None:
    """Let the partner charge a customer, one order after the other."""
    ask_partner(job, "/charges", customer=customer, order=order, cents=cents)
    # All of this commits together with the end of the job, or not at all.
    with job.transaction() as conn:
        conn.execute(SETTLE, ("paid", order))
        order_state.send_current(conn, key=str(order))
        pack.enqueue(conn, order)
        send_text.enqueue(conn, customer=customer, order=order)
        add_up.enqueue(conn, customer=customer)


@app.job(group="customer", retry=exponential(first=0.2, cap=60))
def refund(job: Job, customer: str, order: int, cents: int) -> None:
    """Give the money back. In the group of ``charge``, it never runs before that."""
    with app.transaction() as conn:
        if conn.execute(STATE, (order,)).fetchone() == ("refunded",):
            return  # It was asked for again, after the first job had ended.
    ask_partner(job, "/refunds", customer=customer, order=order, cents=cents)
    with job.transaction() as conn:
        conn.execute(SETTLE, ("refunded", order))
        order_state.send_current(conn, key=str(order))
        add_up.enqueue(conn, customer=customer)


@app.batch(size=100)
def pack(items: list[Item[int]]) -> None:
    """Write many parcels in one transaction; existing ones stay."""
    with app.transaction() as conn, conn.cursor() as cursor:
        cursor.executemany(
            "insert into parcels values (%s) on conflict do nothing",
            [(item.payload,) for item in items],
        )


@app.job(rate=Rate(50, per=1), time_limit=30)
async def send_text(job: Job, customer: str, order: int) -> None:
    """Send a text message; all pods together send at most 50 in a second."""
    async with httpx.AsyncClient(base_url=partner.base_url) as client:
        reply = await client.post(
            "/texts",
            json={"customer": customer, "order": order},
            headers={"Idempotency-Key": job.idempotency_key},
        )
    reply.raise_for_status()


def name_total(customer: str) -> str:
    """Name another group: in that of ``charge``, sums would wait for the partner."""
    return f"total:{customer}"


@app.job(group=name_total, last_only=True, debounce=0.2, max_wait=2)
def add_up(job: Job, customer: str) -> None:
    """Add up what a customer has paid: once for many orders."""
    with job.transaction() as conn:
        conn.execute(ADD_UP, (customer,))


@app.periodic("30 3 * * *", tz="Europe/Zurich")
@app.job()
def forget(job: Job, tick: datetime) -> None:
    """Delete orders older than a year, here and wherever the topic is read."""
    with job.transaction() as conn:
        a_year_ago = tick - timedelta(days=365)
        for order, version in conn.execute(FORGET, (a_year_ago,)).fetchall():
            order_state.tombstone(conn, key=str(order), version=version + 1)
