"""The place that a job keeps of the record in whose handling it was enqueued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib.jobs.context import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    # Only for types: declaring consumers must not import either of the two.
    import psycopg
    from confluent_kafka import Message

    from jobs_lib.postgres.queries import Queries


@dataclass(slots=True, eq=False)
class Placing:
    """Gives places to the jobs that are enqueued while a partition is handled."""

    source: int
    """The partition's number in the table ``sources``."""
    queries: Queries
    in_sql: bool = False
    """Whether jobs were enqueued in SQL in an earlier block of the partition.

    Their place is that of the transaction, so the database must know each record. This
    costs a statement for each, which handlers that enqueue in Python do without. Until
    it is known, the first record of the block stands for all of it.
    """

    def name(self, first: Message) -> str:
        """The place of a record, or of a block, as ``insert_job`` reads it."""
        return f"record {self.source} {first.offset()}"

    def begin(
        self, connection: psycopg.Connection[Any], messages: Sequence[Message]
    ) -> Place:
        """Make the place for one call of a handler, and tell the database if needed."""
        name = self.name(messages[0])
        if self.in_sql:
            connection.execute(
                self.queries["place_record"], {"place": name}, prepare=True
            )
        return Place(name)
