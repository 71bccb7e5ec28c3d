"""Send statements in batches: one round trip, a transaction for each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jobs_lib.postgres.queries import Queries

Statement: TypeAlias = "tuple[str, Mapping[str, Any]]"
"""The name of a query, and its parameters."""
Answer: TypeAlias = "list[list[tuple[Any, ...]]]"
"""The rows of each statement of a batch."""


class RoundTrip:
    """Sends batches to the server, and returns the answers."""

    def __init__(
        self, connection: psycopg.Connection[Any], queries: Queries, *, prepare: bool
    ) -> None:
        self._connection = connection
        self._queries = queries
        self._prepare = prepare
        self.server: int | None = None
        """The server that must answer, once known; any other refuses all batches."""

    def exchange(
        self,
        *batches: Sequence[Statement],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> tuple[list[Answer | None], psycopg.Error | None]:
        """Send the batches in one round trip, each a transaction of its own.

        ``meanwhile`` is called once, unless they fail: while the server works, or after
        the answers if each batch was waited for.

        If batches shared a transaction, a failing claim would undo the completions
        before it. Behind PgBouncer each batch is a round trip of its own: at the end of
        the first transaction PgBouncer may give the server to another client, before
        the rest comes.

        Returns the answers, None for a batch that may not have committed, and the first
        error.
        """
        sent: list[list[psycopg.Cursor[Any]]] = []
        failure = None
        try:
            alone = len(batches) == len(batches[0]) == 1
            if alone and (self._prepare or self.server is None):
                # One batch needs no pipeline; making one costs more than a claim.
                sent.append(self._send(batches[0]))
                meanwhile()
            elif self._prepare:
                with self._connection.pipeline() as pipeline:
                    for batch in batches:
                        cursors = self._send(batch)
                        pipeline.sync()
                        sent.append(cursors)
                    meanwhile()
            else:
                for batch in batches:
                    with self._connection.pipeline():
                        if self.server is not None:
                            self._send([("expect_server", {"server": self.server})])
                        cursors = self._send(batch)
                    sent.append(cursors)
                meanwhile()
        except psycopg.Error as error:
            failure = error
        return [self._read(cursors) for cursors in sent], failure

    def _send(self, batch: Sequence[Statement]) -> list[psycopg.Cursor[Any]]:
        cursors = []
        for name, parameters in batch:
            cursor = self._connection.cursor(binary=True)
            cursor.execute(self._queries[name], parameters, prepare=self._prepare)
            cursors.append(cursor)
        return cursors

    def _read(self, cursors: list[psycopg.Cursor[Any]]) -> Answer | None:
        if self._connection.broken:
            return None
        answer = []
        for cursor in cursors:
            result = cursor.pgresult
            if result is None or result.status not in _GOOD:
                return None
            answer.append(cursor.fetchall() if cursor.description else [])
        return answer


_GOOD = (psycopg.pq.ExecStatus.TUPLES_OK, psycopg.pq.ExecStatus.COMMAND_OK)
