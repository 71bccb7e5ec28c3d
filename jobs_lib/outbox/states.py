"""Load the states that id-only rows stand for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from jobs_lib.kafka.checks import check_version
from jobs_lib.masking import describe
from jobs_lib.outbox.block import BATCH, Refusal
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

    def load(
        self,
        connection: psycopg.Connection[Any],
        block: Block,
        records: list[OutboxRecord],
    ) -> None:
        """Fill in the current states of entities, and those that are staged.

        The records of keys whose state cannot be loaded leave the block as refused.
        """
        refusals: list[Refusal] = []
        until = time.monotonic() + _SEARCH_SECONDS
        by_entity: dict[str, list[OutboxRecord]] = {}
        staged = [record for record in records if record.staged is not None]
        if staged:
            block.drop(fill_in_staged(connection, self._queries, staged))
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
                refusals += _refuse_keys(of_entity, error)
            elif why_not := self._losses.why_not(name, retried=block.retried):
                refusals += _refuse_keys(of_entity, why_not)
            else:
                refusals += self._load_states(
                    connection, block.shard, entity, of_entity, until
                )
                self._losses.clear(block.shard, name)
        if refusals:
            refused = {(one.record.topic, one.record.key) for one in refusals}
            kept = [r for r in block.records if (r.topic, r.key) not in refused]
            block.keep(kept, refusals)

    def _load_states(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        entity: Entity,
        records: list[OutboxRecord],
        until: float,
    ) -> list[Refusal]:
        """Fill in the states of one entity; return a refusal for each key that fails.

        Failing keys are found by halving, until ``until``: each call of the loader may
        wait for the loader's own timeout, and all shards of this thread wait with it.
        """
        keys = [*dict.fromkeys(cast("str", record.key) for record in records)]
        began = time.monotonic()
        try:
            # A savepoint: if a statement of the loader fails, the snapshot stays.
            with connection.transaction(), plain_errors():
                try:
                    states = entity.load_states(connection, keys)
                finally:
                    take_back(connection)
            for record in records:
                self._fill_in(record, states.get(cast("str", record.key)))
            return []
        # Application code may raise anything, and perhaps for one key only.
        except BaseException as error:
            if connection.closed:
                self._losses.note(shard, entity.name, error, time.monotonic() - began)
                raise
            if len(keys) == 1 or time.monotonic() > until:
                return _refuse_keys(records, describe(error))
        half = {*keys[: len(keys) // 2]}
        parts = (
            [record for record in records if record.key in half],
            [record for record in records if record.key not in half],
        )
        return [
            refusal
            for part in parts
            for refusal in self._load_states(connection, shard, entity, part, until)
        ]

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
