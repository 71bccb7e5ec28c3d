"""Loaders that cost the relay its connection: whose fault is it?

A server that restarts takes all connections along, and so does a network that fails. A
loader that waits for longer than a connection may be silent, or whose statement kills
its backend, costs its own. So the first loss of a shard in a loader is not held against
it. From the second in a row on the loader is left alone for a while, and the keys that
it would have been asked for are held: the other rows must not wait for it.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from jobs_lib.masking import describe

_IN_A_ROW = 2
_REST = 4
"""Times as long as the last loss took the loader is left alone, for all shards."""
_SHORTEST_REST = 1.0
"""Seconds of that."""


class _Rest(NamedTuple):
    until: float
    """By the monotonic clock."""
    error: str


class Losses:
    """What the loaders have lost, in this process; of a shard one thread tells."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str], int] = {}
        self._rests: dict[str, _Rest] = {}

    def why_not(self, entity: str, *, retried: bool) -> str | None:
        """Why a loader is not to be asked now; None if it is.

        Args:
            entity: whose loader.
            retried: whether it is about a row that is held already. Only such a one
                tries a loader out: good rows may stand beside others.
        """
        rest = self._rests.get(entity)
        if rest is None or (retried and rest.until <= time.monotonic()):
            return None
        return f"the loader keeps costing the relay its connection: {rest.error}"

    def note(self, shard: int, entity: str, error: BaseException, took: float) -> None:
        """A loader has cost a shard its connection, after so many seconds."""
        count = self._counts.get((shard, entity), 0) + 1
        self._counts[shard, entity] = count
        if count >= _IN_A_ROW or entity in self._rests:
            until = time.monotonic() + max(_SHORTEST_REST, _REST * took)
            self._rests[entity] = _Rest(until, describe(error))

    def clear(self, shard: int, entity: str) -> None:
        """A loader has cost a shard nothing, whether it failed or not."""
        if self._counts or self._rests:
            self._counts.pop((shard, entity), None)
            self._rests.pop(entity, None)
