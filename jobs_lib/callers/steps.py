"""The steps of an operation on a caller's connection."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from psycopg import sql
    from sqlalchemy import TextClause

    from jobs_lib.postgres.queries import Queries

R = TypeVar("R")
Rows = list[tuple[Any, ...]]
Parameters: TypeAlias = "Mapping[str, str | bytes | None]"
_PARAMETER = re.compile(r"%\((\w+)\)s")


class Statement:
    """A named query, in the form that each driver needs."""

    def __init__(self, query: sql.Composed) -> None:
        self.named = query.as_string()
        self.names = list(dict.fromkeys(_PARAMETER.findall(self.named)))
        places = {name: f"${n}" for n, name in enumerate(self.names, 1)}
        numbered = _PARAMETER.sub(lambda found: places[found[1]], self.named)
        self.numbered = numbered.replace("%%", "%").encode()
        digest = hashlib.blake2b(self.numbered, digest_size=8).hexdigest()
        self.name = f"jobs_lib_{digest}".encode()
        """The name under which it is prepared."""
        self._bound: TextClause | None = None

    def bound(self, parameters: Parameters) -> TextClause:
        """Return the form of SQLAlchemy, for any driver.

        The parameters' types are given, because asyncpg would take the type of each
        from the cast around it, and then refuse text for it.
        """
        from sqlalchemy import LargeBinary, String, bindparam, text

        if self._bound is None:
            escaped = self.named.replace(":", "\\:")
            bound = text(_PARAMETER.sub(r":\1", escaped).replace("%%", "%"))
            self._bound = bound.bindparams(
                *(bindparam(name, type_=String()) for name in self.names)
            )
        binary = [
            bindparam(name, type_=LargeBinary())
            for name, value in parameters.items()
            if isinstance(value, bytes)
        ]
        return self._bound.bindparams(*binary) if binary else self._bound


class Statements:
    """The statements of one schema by name, each compiled at its first use."""

    def __init__(self, queries: Callable[[], Queries]) -> None:
        self.load_queries = queries
        self._compiled: dict[str, Statement] = {}

    def __getitem__(self, name: str) -> Statement:
        found = self._compiled.get(name)
        if found is None:
            found = self._compiled[name] = Statement(self.load_queries()[name])
        return found


@dataclass(slots=True)
class Fetch:
    """Run a statement, and send its rows back to the generator."""

    statement: Statement
    parameters: Parameters


@dataclass(slots=True)
class CopyIn:
    """Send blocks of rows by COPY; without COPY, run these statements instead."""

    query: sql.Composed
    blocks: Iterable[bytes]
    instead: Callable[[], Iterable[Fetch]]


@dataclass(slots=True)
class Pause:
    """Wait for some seconds, while no statement runs."""

    seconds: float


Steps: TypeAlias = "Generator[Fetch | CopyIn | Pause, Rows, R]"
