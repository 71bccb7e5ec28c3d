"""Check the tables of read models: their columns, and who may write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.consuming.table_faults import find_marked
from jobs_lib.operating.checks.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.operating.checks.finding import Target

_NAME = "read models"


def check_tables(target: Target) -> Iterator[Finding]:
    """Check the tables that ``create_read_model`` has made.

    Nobody notes which role the consumer connects as: it is the checked one if that was
    granted the right to write, else the only one that was.
    """
    found = find_marked(target.connection, target.database.queries, target.role)
    for table in found:
        for fault in table.find_faults():
            yield Finding("error", _NAME, fault.what, fault.way_out)
        others = list(table.find_others(table.only_writer))
        for fault in others:
            yield Finding("error", _NAME, fault.what, fault.way_out)
        granted = table.is_writer or table.others
        if not others and (table.owner_writes or not granted):
            yield Finding(
                "warn",
                _NAME,
                f"roles are not separated: {table.owner} owns the read model's table "
                f"{table.name} and may write it, and so may whoever connects as it",
                "let the consumer connect as a role of its own, its writer: see "
                "read-models.md",
            )
