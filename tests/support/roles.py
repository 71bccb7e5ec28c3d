"""A role of each kind, with the rights of `jobs-lib grants`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import psycopg
from sqlalchemy.engine import make_url

from jobs_lib.operating import apply_grants
from jobs_lib.postgres.database import Database

if TYPE_CHECKING:
    from jobs_lib.operating.grants import Kind


def as_role(url: str, kind: str) -> str:
    """The URL of this database for a role of a kind, which is made if it is missing.

    Tables that a test makes belong to its application: the role may use them.
    """
    role = f"suite_{kind}"
    with psycopg.connect(url, autocommit=True) as connection:
        if not connection.execute(
            "select from pg_roles where rolname = %s", (role,)
        ).rowcount:
            connection.execute(f"create role {role} login password '{role}'")
        connection.execute(f"grant create on schema public to {role}")
        for things in ("tables", "sequences"):
            connection.execute(f"grant all on all {things} in schema public to {role}")
            connection.execute(
                "alter default privileges in schema public"
                f" grant all on {things} to {role}"
            )
    apply_grants(Database(url), cast("Kind", kind), role)
    changed = make_url(url).set(username=role, password=role)
    return changed.render_as_string(hide_password=False)
