"""Decide whether a loader is to blame for the relay's lost connections.

A restart of the server or a network failure loses all connections. A loader loses its
own if it waits for longer than a connection may be silent, or if its statement kills
its backend. So a shard's first loss in a loader is not held against the loader. From
the second loss in a row on, the loader is not called for a while, and the keys that it
should load are held, so that the other rows need not wait for it.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from jobs_lib.masking import describe

_IN_A_ROW = 2
_REST = 4
"""The loader rests, for all shards, this many times as long as the last loss took."""
_SHORTEST_REST = 1.0
"""Seconds that a rest takes at least."""


class _Rest(NamedTuple):
    until: float
    """A time of the monotonic clock."""
    error: str


class Losses:
    """The connections that loaders lost in this process; one thread for each shard."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str], int] = {}
        self._rests: dict[str, _Rest] = {}

    def why_not(self, entity: str, *, retried: bool) -> str | None:
        """Return why a loader must not be called now; None if it may be.

        Args:
            entity: the entity of the loader.
            retried: whether the row is held already. Only held rows try a loader again
                after its rest: a block may also hold good rows.
        """
        rest = self._rests.get(entity)
        if rest is None or (retried and rest.until <= time.monotonic()):
            return None
        return f"the loader keeps costing the relay its connection: {rest.error}"

    def note(self, shard: int, entity: str, error: BaseException, took: float) -> None:
        """Note that a loader cost a shard its connection, after ``took`` seconds."""
        count = self._counts.get((shard, entity), 0) + 1
        self._counts[shard, entity] = count
        if count >= _IN_A_ROW or entity in self._rests:
            until = time.monotonic() + max(_SHORTEST_REST, _REST * took)
            self._rests[entity] = _Rest(until, describe(error))

    def clear(self, shard: int, entity: str) -> None:
        """Note that a loader kept a shard's connection, whether it failed or not."""
        if self._counts or self._rests:
            self._counts.pop((shard, entity), None)
            self._rests.pop(entity, None)
