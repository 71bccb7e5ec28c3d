"""Where a read of the outbox begins, while an old snapshot keeps what has left.

A read begins at the start of each shard, where it finds at once what is there. Under an
old snapshot it walks over all that came and left first. So after a look that took long
reads begin where nothing with a key can appear any more, which is known, not guessed: a
later row of a key must never leave before an earlier one.

- Whoever writes a row with a key holds an advisory lock before it draws the row's id,
  and until its transaction ends. Once all have ended that held one at a moment, no id
  that was known by then can appear.
- A hold that is lifted puts its rows back: nothing begins behind the first held row.

Rows that need no lock have no order to keep: those without a key, those whose state is
read when they leave, and those of re-exports. A complete look, which comes again and
again, finds what was committed late of them.
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
"""Seconds of the server; after a look that takes less all are complete."""
_SHARE = 0.0125
"""Of the time goes into complete looks: of four senders together a twentieth."""
_MARGIN = 2.0
"""Seconds between a row's id and its commit, within which even those without a lock are
found at once."""
_PREPARED = "prepared"
"""Stands for all prepared transactions, as `open_writers` has it."""


class Start(NamedTuple):
    """The first ids of a shard that a read looks at."""

    live: int = 0
    batch: int = 0
    server: int = 0
    """For which they count: another one may lack commits, and give ids again."""


class _Mark(NamedTuple):
    """A moment: the highest id that was known, and who might have drawn a lower one."""

    at: float
    top: int
    writers: frozenset[str]


class Starts:
    """What a sender knows of its shards through one connection; used by its thread."""

    def __init__(self, queries: Mapping[str, sql.Composed]) -> None:
        self._queries = queries
        self._server = 0
        self._forget()

    def _forget(self) -> None:
        self.due_at = math.inf
        """When the next complete look is due; infinite while all are complete."""
        self._rest = 0.0
        """Seconds between the last complete look and the next one."""
        self._starts: dict[int, Start] = {}
        self._top = 0
        """The highest id that was seen."""
        self._settled = 0
        """Ids up to which no row with a key can appear, unless it is held."""
        self._mark: _Mark | None = None

    def get(self, shard: int) -> Start:
        """Where to read a shard from."""
        return self._starts.get(shard, Start(server=self._server))

    def reach(self, row_id: int) -> None:
        """Note an id that was seen."""
        self._top = max(self._top, row_id)

    def find_pending(
        self, connection: psycopg.Connection[Any], shards: Sequence[int]
    ) -> list[tuple[int, int]]:
        """The shards that have rows, each with the server that says so."""
        if time.monotonic() >= self.due_at:
            self._look_at_all(connection, shards)
        starts = [self.get(shard) for shard in shards]
        *found, (_, server, _, took) = connection.execute(
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
        for _, _, row_id, _ in found:
            self.reach(row_id)
        if took > _QUICK and self.due_at == math.inf:
            self.due_at = time.monotonic()
        return [(shard, server) for shard, _, _, _ in found]

    def _look_at_all(
        self, connection: psycopg.Connection[Any], shards: Sequence[int]
    ) -> None:
        # The writers first: what they have committed is seen by the statement after.
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
        """Note who is writing now, and what those of the last mark have left behind."""
        mark = self._mark
        if mark is not None:
            # One of them may have been prepared since, and have another name now.
            if mark.writers & writers or _PREPARED in writers:
                return
            if now - mark.at < _MARGIN:
                return
            self._settled = max(self._settled, mark.top)
        self._mark = _Mark(now, self._top, writers)

    def _meet(self, server: int) -> None:
        """Forget what was true of another server."""
        if server != self._server:
            self._forget()
            self._server = server
