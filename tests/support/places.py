"""A partition whose jobs have places, without Kafka: what its owner would tell."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from jobs_lib.jobs.context import Place, holding

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from jobs_lib.postgres.database import Database

GROUP, TOPIC = "board", "flights"


class Partition:
    """One partition, which this object owns."""

    def __init__(
        self,
        database: Database,
        admin: psycopg.Connection[Any],
        number: int = 0,
        *,
        stored: int = 100,
    ) -> None:
        self.owner = uuid4()
        self.epoch = 1
        self._database = database
        self._admin = admin
        self._where = {"group": GROUP, "topics": [TOPIC], "partitions": [number]}
        self._origin = f"{TOPIC}/{number}"
        queries = database.queries
        admin.execute(queries["make_offsets"], self._where)
        admin.execute(queries["make_sources"], self._where)
        ((_, _, self.source),) = admin.execute(queries["read_sources"], self._where)
        admin.execute(
            "insert into jobs_lib.origins (role, origin, owner, epoch)"
            " values (%s, %s, %s, 1)",
            (f"consume:{GROUP}", self._origin, self.owner),
        )
        self.store(stored)

    def store(
        self, offset: int, connection: psycopg.Connection[Any] | None = None
    ) -> None:
        """Set the offset, as an operator may."""
        (connection or self._admin).execute(
            "update jobs_lib.offsets set next_offset = %s where partition = %s",
            (offset, self._where["partitions"][0]),
        )

    def place(self, offset: int) -> str:
        """The place of a record."""
        return f"record {self.source} {offset}"

    @contextmanager
    def handling(self, offset: int) -> Iterator[None]:
        """Handle a record of this offset inside the block."""
        with holding(Place(self.place(offset))):
            yield

    @property
    def asked(self) -> dict[str, Any]:
        """What the owner asks with."""
        return {
            "group": GROUP,
            "owner": self.owner,
            "origins": [self._origin],
            "epochs": [self.epoch],
            "rows": 1_000,
        }

    def tell(self) -> int | None:
        """Return what the owner tells now; None if it is not the owner."""
        self._admin.execute(self._database.queries["sweep_places"], self.asked)
        return self.find(self._admin)

    def find(self, connection: psycopg.Connection[Any]) -> int | None:
        """The same by another connection, and without a sweep."""
        found = connection.execute(
            self._database.queries["find_done"], self.asked
        ).fetchall()
        return found[0][2] if found else None

    def advance(
        self, connection: psycopg.Connection[Any], expected: int, following: int
    ) -> None:
        """Move the offset in a transaction, as the end of a block does."""
        connection.execute(
            self._database.queries["advance_offset"],
            {
                "group": GROUP,
                "topic": TOPIC,
                "partition": self._where["partitions"][0],
                "owner": self.owner,
                "epoch": self.epoch,
                "expected": expected,
                "next_offset": following,
                "appended_at": None,
                "block": None,
            },
        )
