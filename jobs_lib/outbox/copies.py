"""Feed the copy of a topic: send the key of each change that was sent there, too.

The row for the copy holds only the key. So the copy gets the state that the key has
when that row leaves, which is never older than what the copy has already, whoever else
writes to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib.partitioner import choose_shard

if TYPE_CHECKING:
    import psycopg

    from jobs_lib.outbox.block import Block
    from jobs_lib.postgres.database import Database


class Copies:
    """Writes the rows for copies; used by one thread.

    Args:
        database: where the outbox is.
    """

    def __init__(self, database: Database) -> None:
        self._queries = database.queries
        self._shards: int | None = None

    def write(self, connection: psycopg.Connection[Any], block: Block) -> None:
        """Write rows for the records of a block that was sent, before it is deleted.

        Copies are looked for after the records were read. So a record for which there
        was none yet was committed before, and a re-export that begins later reads its
        state. After a crash the rows are written once more, which changes nothing.
        """
        found = connection.execute(self._queries["find_copies"]).fetchall()
        if not found:
            return
        copied = self._find_copied(connection, block)
        for topic, copy, entity in found:
            last = {
                record.key: record
                for record in block.records
                if record.topic == topic and record.key and record.of_table in copied
            }
            # A statement, and so a transaction, for each key: it holds one key's lock.
            for key, record in last.items():
                version = record.version
                if version is not None and record.value is not None:
                    # Of the tombstone, if the key is gone by then.
                    version += 1
                self._write_row(connection, copy, entity, key, version)

    def write_dropped(
        self,
        connection: psycopg.Connection[Any],
        topic: str,
        key: str,
        version: int | None,
    ) -> None:
        """Write rows for a record that is dropped: it never reaches its own topic.

        The copies have the states of the table, and nobody else would send them this
        one. A copy may take what the topic has refused.
        """
        for fed, copy, entity in connection.execute(
            self._queries["find_copies"]
        ).fetchall():
            if fed == topic:
                self._write_row(connection, copy, entity, key, version)

    def _find_copied(
        self, connection: psycopg.Connection[Any], block: Block
    ) -> set[int | None]:
        """Find the re-exports whose records are copied; None stands for changes.

        States of a table would double what their rate allows, and a re-export to the
        copy sends them. It sends no tombstone of a stale key, since it reads the table.
        """
        asked = {one.of_table for one in block.records if one.of_table}
        if not asked:
            return {None}
        rows = connection.execute(
            self._queries["find_stale_reexports"], {"reexports": [*asked]}
        ).fetchall()
        return {None, *(number for (number,) in rows)}

    def _write_row(
        self,
        connection: psycopg.Connection[Any],
        copy: str,
        entity: str,
        key: str,
        version: int | None,
    ) -> None:
        row = {
            "shard": str(choose_shard(copy, key, self._count_shards(connection))),
            "topic": copy,
            "key": key,
            "version": None if version is None else str(version),
            "entity": entity,
            # Each would take a lock of the whole server; relays look by themselves.
            "hint": None,
        }
        connection.execute(self._queries["write_current"], row, prepare=True)

    def _count_shards(self, connection: psycopg.Connection[Any]) -> int:
        if self._shards is None:
            row = connection.execute(self._queries["known_shards"]).fetchone()
            assert row is not None
            self._shards = int(row[0])
        return self._shards
