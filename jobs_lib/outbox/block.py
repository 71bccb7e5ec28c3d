"""A block: rows of one shard, ready to be sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import psycopg

    from jobs_lib.outbox.entity import Entity
    from jobs_lib.outbox.topic import Topic

LIVE, BATCH = 0, 1


@dataclass(frozen=True, slots=True)
class Sendable:
    """One record as the producer takes it."""

    topic: str
    key: str | None
    value: bytes | None
    headers: list[tuple[str, str | bytes | None]]


@dataclass(slots=True)
class Block:
    """What goes out in one Kafka transaction, and the rows that it empties."""

    records: list[Sendable] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    """(class, id) of every row that is done once the records are in Kafka."""
    dropped: list[int] = field(default_factory=list)
    """Ids of rows that are done without a record."""
    reexports: set[int] = field(default_factory=set)
    """The re-exports that rows of the block belong to: these may be their last ones."""

    @property
    def ids(self) -> list[int]:
        """The ids of the rows."""
        return [row_id for _, row_id in self.rows]

    def __bool__(self) -> bool:
        return bool(self.rows)


def add_live(block: Block, rows: Sequence[tuple[Any, ...]], source: str) -> None:
    """Add rows that carry their value."""
    for row_id, topic, key, value, headers, version, cause, _, created_at in rows:
        named = dict(headers or {})
        named |= {"id": str(row_id), "source": source, "cause": cause}
        named["time"] = created_at.isoformat()
        if version is not None:
            named["version"] = str(version)
        block.records.append(Sendable(topic, key, value, list(named.items())))
        block.rows.append((LIVE, row_id))


class StateReader:
    """Reads the current states of id-only rows, a whole block with one call each."""

    def __init__(
        self,
        entities: Mapping[str, Entity],
        topics: Mapping[str, Topic[Any]],
        source: str,
    ) -> None:
        self._entities = entities
        self._topics = topics
        self._source = source

    def add_batch(
        self,
        connection: psycopg.Connection[Any],
        block: Block,
        rows: Sequence[tuple[Any, ...]],
    ) -> None:
        """Add id-only rows of re-exports with the state that their entities have now.

        Raises:
            ConfigurationError: a row names an entity that is not declared here.
        """
        keys: dict[str, list[str]] = {}
        for _, _, key, entity, _, _, _ in rows:
            keys.setdefault(entity, []).append(key)
        states = {
            entity: self._find(entity).load_states(connection, wanted)
            for entity, wanted in keys.items()
        }
        for row_id, topic, key, entity, reexport_id, _, _ in rows:
            state = states[entity].get(key)
            headers: list[tuple[str, str | bytes | None]] = [
                ("id", str(row_id)),
                ("source", self._source),
                ("cause", "reexport"),
                ("reexport", str(reexport_id)),
            ]
            version = _read_version(state)
            if version is not None:
                headers.append(("version", str(version)))
            value = None if state is None else self._topics[topic].encode(state)
            block.records.append(Sendable(topic, key, value, headers))
            block.rows.append((BATCH, row_id))

    def _find(self, name: str) -> Entity:
        entity = self._entities.get(name)
        if entity is None:
            raise ConfigurationError(
                f"the outbox holds rows of the entity {name!r}, which this service "
                "does not declare: relay them with the service that does"
            )
        return entity


def _read_version(state: Any) -> int | None:
    found = (
        state.get("version")
        if isinstance(state, dict)
        else getattr(state, "version", None)
    )
    return found if isinstance(found, int) else None
