"""An entity shared as full state: its table, its topic, and how its state is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import psycopg

    from jobs_lib.outbox.topic import Topic

    Loader = Callable[[psycopg.Connection[Any], list[str]], Mapping[str, "V | Gone"]]

V = TypeVar("V", default=Any)


@dataclass(frozen=True, slots=True)
class Gone:
    """Returned instead of a state: the entity is gone; its tombstone has this version.

    For loaders that still know the version, as from a row that is marked as deleted.
    """

    version: int
    """Greater than that of the last state."""


@dataclass(frozen=True, slots=True)
class Entity:
    """A declaration by ``@app.entity``."""

    name: str
    """Its name in commands and tables."""
    topic: Topic[Any]
    """The compacted topic that holds its states."""
    source: str
    """The service's own table, ``table`` or ``schema.table``."""
    key: str
    """The column of ``source`` whose text form is the record's key."""
    load: Loader
    """Current states by key, one query for a list; a key without an entry is gone."""

    def load_states(
        self, connection: psycopg.Connection[Any], keys: Sequence[str]
    ) -> Mapping[str, Any]:
        """The state of each key that exists; :class:`Gone` or no entry for others."""
        return self.load(connection, list(keys))


def read_version(state: Any) -> int | None:
    """The version that a state holds, if it holds one."""
    found = (
        state.get("version")
        if isinstance(state, dict)
        else getattr(state, "version", None)
    )
    return found if type(found) is int else None


def has_version(type_: object) -> bool:
    """Whether a declared type has a field ``version``."""
    fields = getattr(type_, "model_fields", None)
    if fields is None:
        classes = getattr(type_, "__mro__", (type_,))
        fields = {
            name for one in classes for name in getattr(one, "__annotations__", ())
        }
    return "version" in fields
