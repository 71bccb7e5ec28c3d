"""An entity that is shared as full state: where it lies, and how its state is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from typing_extensions import TypeVar

if TYPE_CHECKING:
    from jobs_lib.outbox.topic import Topic

V = TypeVar("V", default=Any)

Loader = Callable[[psycopg.Connection[Any], list[str]], Mapping[str, V]]


@dataclass(frozen=True, slots=True)
class Entity:
    """What ``@app.entity`` declares."""

    name: str
    """What commands and tables call it."""
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
        """The current state of each key that exists."""
        return self.load(connection, list(keys))
