"""Check the outbox: who changes rows, what captures them, and how they are found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.operating.checks.finding import Finding
from jobs_lib.postgres.values import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.operating.checks.finding import Target


def check_outbox(target: Target) -> Iterator[Finding]:
    """Check that every row is relayed as it was written."""
    for operation, role, application, times, at in target.rows("check_touched"):
        yield Finding(
            "warn",
            "outbox",
            f"the role {role} ({application or 'unnamed'}) has changed the outbox by "
            f"{operation} {times:,} times, the last at {at:%Y-%m-%d %H:%M:%S} UTC: "
            "consumers may lack what was committed",
            "export again what they lack, then delete from "
            f"{quote(target.database.schema)}.touched",
        )
    for trigger, namespace, table in target.rows(
        "check_triggers", schema=target.database.schema
    ):
        yield Finding(
            "error",
            "outbox",
            f"the trigger {trigger} of the table {table} is switched off: its changes "
            "are not noticed",
            f"alter table {quote(namespace)}.{quote(table)} enable trigger "
            f"{quote(trigger)}; then export again what has changed meanwhile",
        )
    for namespace, table in target.rows(
        "check_truncates", schema=target.database.schema
    ):
        yield Finding(
            "warn",
            "outbox",
            f"the table {table} is captured, and a truncate of it is not refused: it "
            "lacks the trigger. Consumers would keep all rows",
            f"create trigger jobs_lib_capture_truncate before truncate on "
            f"{quote(namespace)}.{quote(table)} for each statement execute function "
            f"{quote(target.database.schema)}.refuse_truncate()",
        )
    if not target.rows("check_reexport_index", schema=target.database.schema):
        schema = quote(target.database.schema)
        yield Finding(
            "warn",
            "outbox",
            "the outbox lacks the index outbox_of_reexport, or it is invalid: relays "
            "read all waiting rows of re-exports again and again",
            f"drop index if exists {schema}.outbox_of_reexport; then create index "
            f"concurrently outbox_of_reexport on {schema}.outbox "
            "(coalesce(reexport_id, 0), shard, id) where class = 1",
        )
