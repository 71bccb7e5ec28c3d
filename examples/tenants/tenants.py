"""The stream of tenants: what an event says, and what is checked before it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib import App, RefusedError, derive_key

if TYPE_CHECKING:
    from psycopg import Connection

app = App("tenants")


@dataclass
class Tenant:
    """The whole state of a tenant, as each event has it."""

    id: str
    email: str
    name: str
    country: str
    account: str
    """The bank account: the payment provider gets it, and no answer has it."""


class TakenError(RefusedError):
    """Another tenant has what must be unique."""


def derive_id(email: str) -> str:
    """Derive a tenant's id from its email: two requests with one email mean one tenant.

    So requests that know nothing of each other, and whose events are both on their way,
    cannot make two tenants.
    """
    return derive_key("tenants", email.lower())


def check_tenant(key: str, tenant: Tenant | None, conn: Connection[Any]) -> None:
    """Refuse a country that is not there, and the email of another tenant."""
    if tenant is None:
        return
    if key != derive_id(tenant.email):
        raise TakenError("a tenant keeps its email: create another tenant")
    found = conn.execute("select from countries where code = %s", (tenant.country,))
    if not found.rowcount:
        raise RefusedError("there is no such country")


def refuse_known(key: str, tenant: Tenant, conn: Connection[Any]) -> None:
    """Refuse to create a tenant that is there."""
    if conn.execute("select from tenants_rm where id = %s", (key,)).rowcount:
        raise TakenError("another tenant has this email")


def read_tenant(key: str, conn: Connection[Any]) -> Tenant | None:
    """Read the state that the table has of a tenant."""
    row = conn.execute(
        "select id, email, name, country, account from tenants_rm where id = %s", (key,)
    ).fetchone()
    return None if row is None else Tenant(*row)


tenants = app.stream(
    "tenants",
    value=Tenant,
    key="id",
    internal={"account"},
    check=check_tenant,
    current=read_tenant,
    partitions=6,
)
