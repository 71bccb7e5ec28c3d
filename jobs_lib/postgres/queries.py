"""The named queries of ``jobs_lib/sql``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from itertools import combinations
from typing import Any, cast

from psycopg import sql

from jobs_lib.errors import JobsError
from jobs_lib.settings import check_schema

_HEAD = re.compile(r"^-- (name|part|template): (\w+)$", re.MULTILINE)
_KINDS = ("limited", "gated")
"""The kinds of sections whose claims read more than others."""


class Queries(Mapping[str, sql.Composed]):
    """The named queries of ``jobs_lib/sql``, with the schema's name filled in.

    A template is a query with more to fill in, such as the table of an application.
    """

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self._queries = {
            name: sql.SQL(cast("Any", text)).format(schema=sql.Identifier(schema))
            for name, text in _read_queries()["name"].items()
        }

    def fill(self, template: str, **parts: sql.Composable) -> sql.Composed:
        """Make a query of a template, with these parts for its names in braces."""
        text = _read_queries()["template"][template]
        return sql.SQL(cast("Any", text)).format(
            schema=sql.Identifier(self.schema), **parts
        )

    def __getitem__(self, name: str) -> sql.Composed:
        return self._queries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries)

    def __len__(self) -> int:
        return len(self._queries)


@cache
def _read_queries() -> dict[str, dict[str, str]]:
    """The queries and templates, by kind and name.

    Each ``{part}`` in one is replaced by the part of that name.

    If there is also a part ``x_limited``, each query ``q`` with the part ``x`` exists
    twice: as ``q``, and as ``q_limited`` with that other part. So it is for the kind
    ``gated``, and for both together. A part may contain parts that are defined after
    it.
    """
    found: dict[str, dict[str, str]] = {"name": {}, "part": {}, "template": {}}
    for file in sorted(
        resources.files("jobs_lib.sql").iterdir(), key=lambda file: file.name
    ):
        if not file.name.endswith(".sql"):
            continue
        pieces = _HEAD.split(file.read_text(encoding="utf-8"))[1:]
        for kind, name, text in zip(*(pieces[n::3] for n in range(3)), strict=True):
            if name in found[kind]:
                raise JobsError(f"the {kind} {name!r} stands twice in jobs_lib/sql")
            found[kind][name] = text.strip().rstrip(";")
    parts = found["part"]
    others = {
        kind: {p: parts[f"{p}_{kind}"] for p in parts if f"{p}_{kind}" in parts}
        for kind in _KINDS
    }
    queries: dict[str, str] = {}
    for name, text in found["name"].items():
        kinds = [
            kind
            for kind, other in others.items()
            if any(f"{{{part}}}" in text for part in other)
        ]
        for count in range(len(kinds) + 1):
            for chosen in combinations(kinds, count):
                filled = dict(parts)
                for kind in chosen:
                    filled |= others[kind]
                queries["_".join([name, *chosen])] = _fill(text, filled)
    templates = {name: _fill(text, parts) for name, text in found["template"].items()}
    return {"name": queries, "template": templates}


def _fill(text: str, parts: Mapping[str, str]) -> str:
    for part, inner in parts.items():
        text = text.replace(f"{{{part}}}", f"\n    {inner}\n")
    return text


@cache
def load_queries(schema: str) -> Queries:
    """The named queries for one schema, read once per process.

    Raises:
        ConfigurationError: there can be no such schema.
    """
    check_schema(schema)
    return Queries(schema)
