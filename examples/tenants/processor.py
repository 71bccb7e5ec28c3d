"""The processor: it keeps the table, and registers each tenant at a payment provider.

`jobs-lib run examples.tenants.processor:app` runs it.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import httpx

from examples.tenants.tenants import Tenant, app
from jobs_lib import Job, Record, exponential

if TYPE_CHECKING:
    from psycopg import Connection

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
provider = httpx.Client(base_url=os.environ.get("PROVIDER_ADDRESS", ""), timeout=1)

NOTE_NEW = """
    insert into registrations (tenant) select unnest(%s::text[])
    on conflict do nothing returning tenant
"""
FORGET = "delete from registrations where tenant = any (%s) and registered_at is null"


@app.job(group="tenant", retry=exponential(first=0.2, cap=5))
def register(job: Job, tenant: str) -> None:
    """Register a tenant at the provider, which fails and hangs now and then."""
    with app.transaction() as conn:
        row = conn.execute(
            "select account from tenants_rm where id = %s", (tenant,)
        ).fetchone()
    if row is None:
        return  # it was deleted meanwhile
    reply = provider.post(
        "/registrations",
        json={"tenant": tenant, "account": row[0]},
        # The same for each attempt and each job, so also if the table is built anew.
        headers={"Idempotency-Key": tenant},
    )
    reply.raise_for_status()
    with job.transaction() as conn:
        conn.execute(
            "update registrations set registered_at = now() where tenant = %s",
            (tenant,),
        )


def register_new(records: list[Record[Tenant | None]], conn: Connection[Any]) -> None:
    """Enqueue a job for each tenant that is new, in the transaction of its row."""
    conn.execute(FORGET, ([one.key for one in records if one.value is None],))
    here = [one.key for one in records if one.value is not None]
    new = conn.execute(NOTE_NEW, (here,)).fetchall()
    register.enqueue_many(conn, [{"tenant": tenant} for (tenant,) in new])


@app.read_model(
    "tenants",
    table="tenants_rm",
    key="id",
    group="tenants",
    value=Tenant,
    on_change=register_new,
)
def tenants_rm(record: Record[Tenant]) -> dict[str, Any]:
    """The row of one tenant; the library adds its key."""
    tenant = record.value
    return {
        "email": tenant.email,
        "name": tenant.name,
        "country": tenant.country,
        "account": tenant.account,
    }
