"""What was written to the outbox before a place was done, and is not in Kafka yet."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs_lib.kafka.member import Partition
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.postgres.session import Session

_SHARE = 0.1
"""The most of the time that looks at the outbox may take: dead rows make them slow."""


@dataclass(slots=True)
class _Awaited:
    """Offsets that are done once some rows of the outbox have left."""

    offsets: dict[Partition, int]
    ends: dict[int, int]
    """By shard: the highest id that was there when the offsets were done."""
    starts: dict[int, int]
    """By shard: no row below waits any more."""


class Sent:
    """Keeps offsets back until all that was written before them is in Kafka.

    Rows are written in the transactions that move the offsets or complete the jobs. So
    all of them are there when the offsets are read as done. The ids that the outbox has
    then are noted; once no row up to them is left, the relay has sent them all. Rows
    that a hold keeps are left.

    One object serves one connection.
    """

    def __init__(self, queries: Callable[[], Queries]) -> None:
        self._queries = queries
        self._awaited: _Awaited | None = None
        self._sent: dict[Partition, int] = {}
        self._server: int | None = None
        self._next_at = 0.0

    def find(
        self, connection: Session[Any], offsets: Mapping[Partition, int]
    ) -> dict[Partition, int]:
        """Find up to where all that was written is in Kafka.

        Args:
            connection: on which these offsets were read as done, in a transaction that
                has ended.
            offsets: of the partitions that are owned now.

        Returns an offset for each partition of which one is known; it is not above the
        given one.
        """
        self._set_back(offsets)
        if time.monotonic() >= self._next_at:
            began = time.monotonic()
            self._look(connection, dict(offsets))
            took = time.monotonic() - began
            self._next_at = began + took / _SHARE
        return {
            one: min(at, self._sent[one])
            for one, at in offsets.items()
            if one in self._sent
        }

    def _set_back(self, offsets: Mapping[Partition, int]) -> None:
        """Go back with offsets: what is done again writes rows that have to leave."""
        awaited = {} if self._awaited is None else self._awaited.offsets
        for known in (self._sent, awaited):
            for one, at in offsets.items():
                if at < known.get(one, at):
                    known[one] = at

    def _look(self, connection: Session[Any], offsets: dict[Partition, int]) -> None:
        if self._awaited is not None and self._has_left(connection, self._awaited):
            self._sent, self._awaited = self._awaited.offsets, None
        if self._awaited is None:
            self._awaited = self._begin(connection, offsets)
            # Mostly nothing waits, and the offsets need not wait for the next look.
            if not self._awaited.ends:
                self._sent, self._awaited = self._awaited.offsets, None

    def _begin(
        self, connection: Session[Any], offsets: dict[Partition, int]
    ) -> _Awaited:
        rows = connection.execute(self._queries()["find_outbox_ends"]).fetchall()
        server = rows[0][2]
        if server != self._server:
            # It may lack commits: what was sent before may be written again.
            self._server, self._sent = server, {}
        ends = {shard: at for shard, at, _ in rows if shard is not None}
        return _Awaited(offsets, ends, dict.fromkeys(ends, 0))

    def _has_left(self, connection: Session[Any], awaited: _Awaited) -> bool:
        asked = {
            "shards": [*awaited.ends],
            "ends": [*awaited.ends.values()],
            "starts": [*awaited.starts.values()],
        }
        rows = connection.execute(self._queries()["find_unsent"], asked).fetchall()
        awaited.starts = dict(rows)
        awaited.ends = {shard: awaited.ends[shard] for shard in awaited.starts}
        return not awaited.ends
