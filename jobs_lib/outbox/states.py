"""Load the states that id-only rows stand for.

How large states are is known only once they are there. So a block loads them in pieces
until they fill it. A piece has as many as are expected to fit, by the size of those
that were loaded before. Where they are small, one piece is all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from jobs_lib.kafka.checks import check_version
from jobs_lib.masking import describe
from jobs_lib.outbox.block import BATCH, BYTES, Refusal
from jobs_lib.outbox.losses import Losses
from jobs_lib.outbox.staged import fill_in_staged
from jobs_lib.outbox.topic import Gone, read_version
from jobs_lib.postgres.database import plain_errors
from jobs_lib.postgres.session import take_back

if TYPE_CHECKING:
    from collections.abc import Mapping

    import psycopg
    from psycopg import sql

    from jobs_lib.outbox.block import Block, OutboxRecord
    from jobs_lib.outbox.topic import Entity, Topic
    from jobs_lib.outbox.unversioned import Unversioned

_SEARCH_SECONDS = 5.0
"""Time for the search for the keys of a block whose states cannot be loaded."""
_CAUTIOUS = BYTES / 100
"""The expected size of a state while no other one of the topic was loaded."""


@dataclass(slots=True)
class _Filling:
    """The states of one block, while they are loaded."""

    room: int
    """Bytes that the next states may have. The last one may exceed it."""
    until: float
    """When the search for keys that fail ends, by the monotonic clock."""
    refusals: list[Refusal] = field(default_factory=list)
    superseded: list[OutboxRecord] = field(default_factory=list)
    """Records with staged states that must not be sent."""
    loaded: list[OutboxRecord] = field(default_factory=list)
    """Records of the last piece that have their state."""
    left: list[OutboxRecord] = field(default_factory=list)
    """Records that there was no room for."""
    called: set[str] = field(default_factory=set)
    """The entities whose loaders were called."""
    gave_up: bool = False
    """Whether keys were refused together, because the search took too long."""

    def take(self, record: OutboxRecord) -> None:
        """Take the room for a record's value."""
        if record.value is not None:
            self.room -= len(record.value)


class States:
    """Loads states by the loaders of entities; the threads of a relay share it.

    Args:
        queries: of the database.
        entities: by name; they load the states.
        topics: by name; they encode them.
        source: the service's name.
        unversioned: told of tombstones without a version.
    """

    def __init__(
        self,
        queries: Mapping[str, sql.Composed],
        *,
        entities: Mapping[str, Entity],
        topics: Mapping[str, Topic[Any]],
        source: str,
        unversioned: Unversioned,
    ) -> None:
        self._queries = queries
        self._entities = entities
        self._topics = topics
        self._source = source
        self._unversioned = unversioned
        self._losses = Losses()
        self._sizes: dict[str, float] = {}
        """By topic: the expected size of a state, in bytes."""

    def load(
        self,
        connection: psycopg.Connection[Any],
        block: Block,
        records: list[OutboxRecord],
        room: int,
    ) -> bool:
        """Fill in the current states of entities, and those that are staged.

        The records of keys whose state cannot be loaded leave the block as refused.

        Args:
            connection: in the snapshot of the block's rows.
            block: has the records.
            records: those whose states to load, the most urgent ones first.
            room: bytes that the states may have; at least one is loaded.

        Returns:
            Whether there was room for all. The others leave the block, and their rows
            stay in the outbox.
        """
        filling = _Filling(room, time.monotonic() + _SEARCH_SECONDS)
        begin = 0
        while begin < len(records) and filling.room > 0:
            end = self._find_end(records, begin, filling)
            filling.loaded = []
            self._load_piece(connection, block, records[begin:end], filling)
            self._note_sizes(filling.loaded)
            begin = end
        # Only now: each piece but the last may go well where a later one fails.
        for name in filling.called:
            self._losses.clear(block.shard, name)
        if filling.superseded:
            block.drop(filling.superseded)
        filling.left += records[begin:]
        if filling.left:
            block.postpone(filling.left)
        if filling.refusals:
            # A topic that merges nothing may have the same key in several pieces.
            refused: dict[tuple[str, str | None], Refusal] = {}
            for one in filling.refusals:
                refused.setdefault((one.record.topic, one.record.key), one)
            kept = [r for r in block.records if (r.topic, r.key) not in refused]
            block.keep(kept, [*refused.values()])
        return not filling.left

    def _find_end(
        self, records: list[OutboxRecord], begin: int, filling: _Filling
    ) -> int:
        """Find where a piece ends that begins here: at least one record is in it."""
        # A loader that fails may take until its timeout, for each piece.
        if filling.gave_up:
            return len(records)
        room: float = filling.room
        for end in range(begin, len(records)):
            room -= self._sizes.get(records[end].topic, _CAUTIOUS)
            if room <= 0:
                return end + 1
        return len(records)

    def _note_sizes(self, records: list[OutboxRecord]) -> None:
        """Note the size of the states that were loaded.

        It falls by half at most: small states, or none at all, tell little of the next
        ones. The threads of a relay share it, and any of their figures will do.
        """
        for topic in {record.topic for record in records}:
            values = [r.value for r in records if r.topic == topic and r.value]
            mean = sum(map(len, values)) / len(values) if values else 0
            known = self._sizes.get(topic, _CAUTIOUS)
            self._sizes[topic] = max(mean, known / 2)

    def _load_piece(
        self,
        connection: psycopg.Connection[Any],
        block: Block,
        records: list[OutboxRecord],
        filling: _Filling,
    ) -> None:
        by_entity: dict[str, list[OutboxRecord]] = {}
        staged = [record for record in records if record.staged is not None]
        if staged:
            filling.superseded += fill_in_staged(connection, self._queries, staged)
        for record in staged:
            if filling.room <= 0:
                filling.left.append(record)
            else:
                filling.take(record)
                filling.loaded.append(record)
        for record in records:
            if record.staged is not None:
                continue
            by_entity.setdefault(record.entity or "", []).append(record)
        for name, of_entity in by_entity.items():
            entity = self._entities.get(name)
            if entity is None:
                error = (
                    f"the entity {name!r} is not declared by the service "
                    f"{self._source!r}: relay its rows with the one that does"
                )
                filling.refusals += _refuse_keys(of_entity, error)
            elif why_not := self._losses.why_not(name, retried=block.retried):
                filling.refusals += _refuse_keys(of_entity, why_not)
            else:
                # Others of the piece may have been larger than expected. The size of
                # this one's states is known once one of them is loaded.
                filling.room = max(1, filling.room)
                self._load_states(connection, block.shard, entity, of_entity, filling)
                filling.called.add(name)

    def _load_states(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        entity: Entity,
        records: list[OutboxRecord],
        filling: _Filling,
    ) -> None:
        """Fill in the states of one entity; refuse each key that fails.

        Failing keys are found by halving, for a while: each call of the loader may wait
        for the loader's own timeout, and all shards of this thread wait with it.
        """
        if filling.room <= 0:
            filling.left += records
            return
        keys = [*dict.fromkeys(cast("str", record.key) for record in records)]
        room, count = filling.room, 0
        began = time.monotonic()
        try:
            # A savepoint: if a statement of the loader fails, the snapshot stays.
            with connection.transaction(), plain_errors():
                try:
                    states = entity.load_states(connection, keys)
                finally:
                    take_back(connection)
            for record in records:
                if filling.room <= 0:
                    break
                self._fill_in(record, states.get(cast("str", record.key)))
                filling.take(record)
                count += 1
            filling.loaded += records[:count]
            filling.left += records[count:]
            return
        # Application code may raise anything, and perhaps for one key only.
        except BaseException as error:
            if connection.closed:
                self._losses.note(shard, entity.name, error, time.monotonic() - began)
                raise
            # The states are loaded once more.
            filling.room = room
            if len(keys) == 1 or time.monotonic() > filling.until:
                filling.gave_up |= len(keys) > 1
                filling.refusals += _refuse_keys(records, describe(error))
                return
        half = {*keys[: len(keys) // 2]}
        parts = (
            [record for record in records if record.key in half],
            [record for record in records if record.key not in half],
        )
        for part in parts:
            self._load_states(connection, shard, entity, part, filling)

    def _fill_in(self, record: OutboxRecord, state: Any) -> None:
        """Give the record the entity's state, or make it a tombstone if it is gone.

        Raises:
            PayloadError: the state does not fit the topic, or has a version that no
                consumer reads.
        """
        record.value = None
        topic = self._topics[record.topic]
        if state is None or isinstance(state, Gone):
            # The loader's version counts before the row's: it was read later. A row of
            # a re-export has the version that the topic's newest record asks for.
            if state is not None:
                wanted = record.version if record.row_class == BATCH else None
                known = state.version
                check_version(topic, known)
                record.version = known if wanted is None else max(known, wanted)
            elif record.version is None:
                self._unversioned.report(record.topic, record.entity, record.row_id)
            return
        record.value = topic.encode(state)
        if topic.encoder.labels_rows:
            label = {"content-type": topic.encoder.content_type}
            record.more = label | dict(record.more or {})
        # The version in the row is for a tombstone, so the state's own replaces it.
        record.version = read_version(state)
        check_version(topic, record.version)


def _refuse_keys(records: list[OutboxRecord], error: str) -> list[Refusal]:
    """Refuse the first record of each key."""
    first: dict[str | None, OutboxRecord] = {}
    for record in records:
        first.setdefault(record.key, record)
    return [Refusal(record, error) for record in first.values()]
