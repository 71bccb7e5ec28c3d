"""Merge the rows of a search with entities that the read model does not have yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import AnswerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EntityState:
    """The state of an entity that an update has returned.

    Attributes:
        key: of its record, of the type that the read model declares.
        version: of its record.
        entity: the columns that a row of the read model has, by their names. None: the
            update has removed the entity.
    """

    key: Any
    version: int
    entity: Mapping[str, Any] | None


def choose_newest(states: Iterable[EntityState]) -> list[EntityState]:
    """Choose the newest state of each key."""
    newest: dict[Any, EntityState] = {}
    for state in states:
        known = newest.get(state.key)
        if known is None or known.version < state.version:
            newest[state.key] = state
    return [*newest.values()]


def merge(
    rows: Iterable[Row],
    newer: Iterable[EntityState],
    *,
    key: str,
    version: str,
    belongs: Callable[[dict[str, Any]], object] | None,
    sort: Callable[[dict[str, Any]], Any] | None,
) -> list[dict[str, Any]]:
    """Merge rows with newer states of their keys; see ``Answers.merge``.

    Raises:
        AnswerError: a row is no mapping, or has no key.
    """
    states = {_write(state.key): state for state in choose_newest(newer)}
    found = [dict(_check(row, key)) for row in rows]
    shown = {_write(row[key]) for row in found}
    merged = [
        made
        for row in found
        if (made := _renew(row, states.get(_write(row[key])), key, version, belongs))
        is not None
    ]
    if belongs is not None:
        others = [state for text, state in states.items() if text not in shown]
        merged += _add(others, key, version, belongs)
    return merged if sort is None else sorted(merged, key=sort)


def _renew(
    row: dict[str, Any],
    state: EntityState | None,
    key: str,
    version: str,
    belongs: Callable[[dict[str, Any]], object] | None,
) -> dict[str, Any] | None:
    """Return the row with a newer state; None if it is no part of the result then."""
    if state is None:
        return row
    known = row.get(version)
    if known is not None and known >= state.version:
        return row
    if state.entity is None:
        return None
    row |= {**state.entity, key: row[key], version: state.version}
    return row if belongs is None or belongs(row) else None


def _add(
    states: Iterable[EntityState],
    key: str,
    version: str,
    belongs: Callable[[dict[str, Any]], object],
) -> Iterator[dict[str, Any]]:
    for state in states:
        if state.entity is not None:
            row = {**state.entity, key: state.key, version: state.version}
            if belongs(row):
                yield row


def _check(row: object, key: str) -> Row:
    if not isinstance(row, Mapping):
        raise AnswerError(
            f"a row is of the type {type(row).__name__}: give mappings, as from a "
            "cursor with psycopg's dict_row, or from SQLAlchemy's result.mappings()"
        )
    if key not in row:
        raise AnswerError(
            f"a row has no {key!r}: select the read model's key, and name it by `key` "
            "if the query calls it otherwise"
        )
    return row


def _write(key: object) -> str:
    """Write a key as text: a column may be an integer where the records' keys are str.

    Drivers return ``bytea`` as one of several types.
    """
    if isinstance(key, bytes | bytearray | memoryview):
        return bytes(key).hex()
    return str(key)
