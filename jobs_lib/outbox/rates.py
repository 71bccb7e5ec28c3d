"""The rates of re-exports: what may leave now, and what is taken once more.

    take ─▶ load the states ─▶ old by now? take anew ─▶ Kafka ─▶ late? take once more

What the database grants is to be in the topic within 0.6 seconds: see ``take_records``.
Grants that wait for a loader, in a process that is stopped, or for a broker that hangs
would pile up, and leave together with new ones.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import psycopg

    from jobs_lib.outbox.block import Block
    from jobs_lib.outbox.pace import BatchPace
    from jobs_lib.postgres.queries import Queries

_OLD_SECONDS = 0.3
"""A grant that is older when its records go to Kafka is not used: half of the time that
it has. While records are longer on their way, nothing is granted."""
_LATE_SECONDS = 0.6
"""Records that are longer on their way are late: the time that ``take_records`` leaves
them."""
_USUAL = 1.5
"""While every block takes long, a late one takes this many times as long."""
_BLOCKS = 16
"""The number of blocks that tell how long one takes at least."""


class Rates:
    """Asks the rates of re-exports; the threads of a relay share it.

    Args:
        queries: of the database.
        pace: notes re-exports whose rate allows too few records.
    """

    def __init__(self, queries: Queries, pace: BatchPace) -> None:
        self._queries = queries
        self.pace = pace
        self._ahead: dict[int, int] = {}
        """By re-export whose states take long to load: the rows to load before its rate
        is asked. Asked before, each of its grants would be too old, and half of the
        rate would be lost."""
        self._sending: dict[int, float] = {}
        """By shard whose block is on its way: when its records were granted."""
        self._took: deque[float] = deque(maxlen=_BLOCKS)
        """The seconds from the grant of the last blocks until they had left."""

    def take(
        self, connection: psycopg.Connection[Any], reexport_id: int, wanted: int
    ) -> int:
        """Take records of a re-export from its rate; returns how many may be sent."""
        row = connection.execute(
            self._queries["take_records"],
            {"reexport": reexport_id, "wanted": wanted},
            prepare=True,
        ).fetchone()
        allowed = cast("tuple[int]", row)[0]
        if allowed < wanted:
            self.pace.spend(reexport_id)
        return allowed

    def allow(
        self,
        connection: psycopg.Connection[Any],
        block: Block,
        wanted: Mapping[int, int],
    ) -> dict[int, int]:
        """Find out how many rows of each re-export may be loaded for a block now."""
        block.granted_at = time.monotonic()
        allowed = {}
        for reexport_id, rows in wanted.items():
            ahead = self._ahead.get(reexport_id)
            if ahead is None:
                allowed[reexport_id] = self.take(connection, reexport_id, rows)
            else:
                allowed[reexport_id] = min(rows, ahead)
                block.granted_at = 0.0
        return allowed

    def give_back(
        self, connection: psycopg.Connection[Any], left: Mapping[int, int]
    ) -> None:
        """Give back what was granted to records that had no room in their block."""
        for reexport_id, records in left.items():
            # Those that load their states ahead have taken nothing yet.
            if records and reexport_id not in self._ahead:
                self._owe(connection, reexport_id, -records)

    def note_load(self, loaded: Mapping[int, int], seconds: float) -> None:
        """Note how long it took to load so many rows of these re-exports."""
        for reexport_id, rows in loaded.items():
            if seconds <= _OLD_SECONDS:
                self._ahead.pop(reexport_id, None)
            elif rows:
                self._ahead.setdefault(reexport_id, rows)

    def is_stuck(self) -> bool:
        """Whether records have been on their way for so long that they may be late.

        What is granted meanwhile would leave together with them.
        """
        # Before they are late: what a thread asks for now is granted a while later.
        long = self._find_long(_OLD_SECONDS)
        now = time.monotonic()
        return any(now - at > long for at in [*self._sending.values()])

    @contextmanager
    def leaving(
        self, connection: psycopg.Connection[Any], block: Block
    ) -> Iterator[None]:
        """Keep to the rates while the records of a block leave.

        Rows that may not leave now are taken out of it before. Late records are taken
        from their rates once more, whether they are in the topic or not.
        """
        if time.monotonic() - block.granted_at > _OLD_SECONDS:
            self._take_anew(connection, block)
        if not block.limited:
            yield
            return
        counts = {one: len(records) for one, records in block.limited.items()}
        self._sending[block.shard] = block.granted_at
        try:
            yield
        finally:
            took = time.monotonic() - block.granted_at
            try:
                if took > self._find_long(_LATE_SECONDS):
                    self._take_once_more(connection, counts)
            finally:
                # Only now: another thread would take what these still owe.
                del self._sending[block.shard]
                self._took.append(took)

    def _find_long(self, least: float) -> float:
        """The seconds that are long for a block, so many at the least."""
        return max(least, _USUAL * min([*self._took], default=0.0))

    def _take_anew(self, connection: psycopg.Connection[Any], block: Block) -> None:
        """Leave those rows of a block in the outbox that its rates do not allow now."""
        # Some are refused, or dropped, since their states were loaded.
        there = {*map(id, block.records)}
        found, block.limited = block.limited, {}
        # They would leave together with those that are late.
        is_stuck = self.is_stuck()
        block.granted_at = time.monotonic()
        for reexport_id, records in found.items():
            waiting = [one for one in records if id(one[0]) in there]
            if not waiting:
                continue
            if is_stuck:
                block.leave(waiting)
                continue
            allowed = self.take(connection, reexport_id, len(waiting))
            # One held row tells nothing of how many can be loaded for a block.
            if reexport_id in self._ahead and not block.retried:
                more = 2 * allowed if allowed == len(waiting) else allowed
                self._ahead[reexport_id] = max(1, more)
            if allowed:
                block.limited[reexport_id] = waiting[:allowed]
            block.leave(waiting[allowed:])

    def _take_once_more(
        self, connection: psycopg.Connection[Any], counts: Mapping[int, int]
    ) -> None:
        for reexport_id, records in counts.items():
            # The bucket may be full by now, and must not be fuller than that.
            self.take(connection, reexport_id, 0)
            self._owe(connection, reexport_id, records)

    def _owe(
        self, connection: psycopg.Connection[Any], reexport_id: int, records: int
    ) -> None:
        connection.execute(
            self._queries["owe_records"],
            {"reexport": reexport_id, "records": records},
            prepare=True,
        )
