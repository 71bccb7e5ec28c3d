"""Where a read of the outbox begins, while an old snapshot keeps deleted rows.

A read usually begins at the start of each shard and finds the waiting rows at once.
Under an old snapshot it first walks over every row that has left. So after a slow read,
reads begin behind the ids below which no row with a key can still appear. That limit is
known, not guessed: a later row of a key must never leave before an earlier one.

- A transaction takes an advisory lock before it draws the id of a row with a key, and
  holds it until it ends. Once every transaction that held such a lock at some moment
  has ended, no id that was known at that moment can appear any more.
- Lifting a hold puts its rows back, so no read begins behind the first held row.

Rows without that lock have no order to keep: rows without a key, rows whose state is
read when they leave, and rows of re-exports. A complete read, which is repeated from
time to time, finds those that were committed late.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs_lib.backoff import rest
from jobs_lib.postgres.values import int_array

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import psycopg
    from psycopg import sql

_QUICK = 0.002
"""Seconds in the server; after a faster read, all reads are complete ones."""
_SHARE = 0.0125
"""The share of time for complete reads: a twentieth for four relay threads together."""
_MARGIN = 2.0
"""Seconds: even a row without a lock is found at once if it is committed within this
time after its id was drawn."""
_PREPARED = "prepared"
"""The name that `open_writers` gives to all prepared transactions."""


class Start(NamedTuple):
    """The ids from which a read of a shard begins."""

    live: int = 0
    batch: int = 0
    server: int = 0
    """The server they are valid for: another may lack commits and reuse ids."""


class _Mark(NamedTuple):
    """A moment: the highest known id, and the writers that may hold a lower one."""

    at: float
    top: int
    writers: frozenset[str]


class Starts:
    """What a relay thread knows of its shards; valid for one connection."""

    def __init__(self, queries: Mapping[str, sql.Composed]) -> None:
        self._queries = queries
        self._server = 0
        self._with_live: set[int] = set()
        self._with_batch: set[int] = set()
        self._forget()

    def _forget(self) -> None:
        self.due_at = math.inf
        """When the next complete read is due; infinite while every read is complete."""
        self._rest = 0.0
        """Seconds between the last complete read and the next one."""
        self._starts: dict[int, Start] = {}
        self._top = 0
        """The highest id that was seen."""
        self._settled = 0
        """No row with a key can appear at or below this id, except one that is held."""
        self._mark: _Mark | None = None

    def get(self, shard: int) -> Start:
        """The ids from which to read a shard."""
        return self._starts.get(shard, Start(server=self._server))

    def has_live(self, shard: int) -> bool:
        """Whether the last poll found live rows in a shard."""
        return shard in self._with_live

    def has_batch(self, shard: int) -> bool:
        """Whether the last poll found rows of re-exports in a shard."""
        return shard in self._with_batch

    def reach(self, row_id: int) -> None:
        """Note an id that was seen."""
        self._top = max(self._top, row_id)

    def find_pending(
        self, connection: psycopg.Connection[Any], shards: Sequence[int]
    ) -> list[tuple[int, int]]:
        """The shards that have rows, each with the server that reported them."""
        if not shards:
            return []  # Kafka has let none of them in.
        if time.monotonic() >= self.due_at:
            self._read_all(connection, shards)
        starts = [self.get(shard) for shard in shards]
        *found, (_, server, _, _, _, took) = connection.execute(
            self._queries["pending_shards"],
            {
                "shards": int_array(shards),
                "live_from": int_array(start.live for start in starts),
                "batch_from": int_array(start.batch for start in starts),
                "server": self._server,
            },
            prepare=True,
        ).fetchall()
        self._meet(server)
        for _, _, row_id, *_ in found:
            self.reach(row_id)
        self._with_live = {shard for shard, _, _, live, _, _ in found if live}
        self._with_batch = {shard for shard, _, _, _, batch, _ in found if batch}
        if took > _QUICK and self.due_at == math.inf:
            self.due_at = time.monotonic()
        return [(shard, server) for shard, *_ in found]

    def _read_all(
        self, connection: psycopg.Connection[Any], shards: Sequence[int]
    ) -> None:
        # Read the writers first: the next statement sees what they have committed.
        ((writers, server, took),) = connection.execute(
            self._queries["open_writers"], prepare=True
        ).fetchall()
        rows = connection.execute(
            self._queries["first_rows"], {"shards": int_array(shards)}, prepare=True
        ).fetchall()
        now = time.monotonic()
        slowest = max(seconds for *_, seconds in rows)
        same = {server, *(row[4] for row in rows)} == {self._server}
        if not same or slowest <= _QUICK:
            self._forget()
            return
        self._rest = rest(took + slowest, _SHARE, self._rest)
        self.due_at = now + self._rest
        self._settle(now, frozenset(writers))
        for shard, live, batch, held, *_ in rows:
            first = self._settled + 1 if held is None else min(self._settled + 1, held)
            self._starts[shard] = Start(
                first if live is None else min(first, live),
                first if batch is None else min(first, batch),
                server,
            )

    def _settle(self, now: float, writers: frozenset[str]) -> None:
        """Once all writers of the last mark ended, raise the settled id; mark anew."""
        mark = self._mark
        if mark is not None:
            # A writer that was prepared since then has another name now.
            if mark.writers & writers or _PREPARED in writers:
                return
            if now - mark.at < _MARGIN:
                return
            self._settled = max(self._settled, mark.top)
        self._mark = _Mark(now, self._top, writers)

    def _meet(self, server: int) -> None:
        """Forget everything if another server answers."""
        if server != self._server:
            self._forget()
            self._server = server
