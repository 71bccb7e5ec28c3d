"""Write columns of Python values as arrays of texts, for one statement over many rows.

PostgreSQL reads each text as the column's type, as COPY does. The arrays are made here
and not by psycopg, because its lists cost Python more than everything else together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

from psycopg.adapt import PyFormat, Transformer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import psycopg

Write: TypeAlias = "Callable[[Any], str | None]"
"""Writes a value as PostgreSQL reads it; None for null."""


def make_writer(connection: psycopg.Connection[Any]) -> Write:
    """Make a function that writes a value as the connection's adapters do.

    It raises ``psycopg.ProgrammingError`` for a value of a type that has no adapter.
    """
    transformer = Transformer(connection)
    encoding = connection.info.encoding

    def write(value: Any) -> str | None:
        if value is None:
            return None
        dumped = transformer.get_dumper(value, PyFormat.TEXT).dump(value)
        return None if dumped is None else bytes(dumped).decode(encoding)

    return write


def write_array(values: Sequence[Any], write: Write) -> str:
    """Write values as an array of texts.

    Args:
        values: the values of a column.
        write: writes one value; those of some simple types do not need it.
    """
    kinds = set(map(type, values))
    if kinds == {int}:
        return f"{{{','.join(map(str, values))}}}"
    texts = values if kinds == {str} else [*map(_choose(kinds, write), values)]
    return _join(cast("Sequence[str | None]", texts))


def _choose(kinds: set[type], write: Write) -> Write:
    """Choose the quickest way to write values of these types."""
    if kinds <= {str, type(None)}:
        return lambda value: cast("str | None", value)
    if kinds <= {int, type(None)}:
        return lambda value: None if value is None else str(value)
    return write


def _join(texts: Sequence[str | None]) -> str:
    try:
        joined = '","'.join(cast("Iterable[str]", texts))
    except TypeError:  # there is a null
        return f"{{{','.join(map(_quote, texts))}}}"
    # Two quotation marks stand between two texts. All others are part of a text.
    if "\\" in joined or joined.count('"') != 2 * (len(texts) - 1):
        return f"{{{','.join(map(_quote, texts))}}}"
    return f'{{"{joined}"}}' if texts else "{}"


def _quote(text: str | None) -> str:
    if text is None:
        return "NULL"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
