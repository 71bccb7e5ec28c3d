"""The one text that stands for a key of one or several columns.

The key of one column is its text. The key of several columns is the JSON array of their
texts, such as ``["UA", "1545"]``, exactly as PostgreSQL's ``json_build_array`` writes
it: two keys never have one text, whatever commas and quotes their columns hold.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from uuid import UUID

from jobs_lib.errors import ConfigurationError, PayloadError


def check_columns(key: object, what: str) -> str | tuple[str, ...]:
    """Check the columns of a key; one of them stands alone.

    Raises:
        ConfigurationError: they are no names of different columns.
    """
    columns = (key,) if isinstance(key, str) else key
    if (
        not isinstance(columns, Sequence)
        or not columns
        or not all(isinstance(one, str) and one for one in columns)
        or len({*columns}) < len(columns)
    ):
        raise ConfigurationError(
            f"the key of {what} is {key!r}: give the name of its column, or those of "
            'several columns, such as ("carrier", "number")'
        )
    return str(columns[0]) if len(columns) == 1 else tuple(columns)


def join_key(*parts: str | int | UUID) -> str:
    """Make the key of a record from the key's columns, in their order.

    Args:
        parts: the columns' texts as PostgreSQL shows them; of an integer and a UUID
            the value will do.

    Raises:
        PayloadError: there is no part, or a part is of another type.
    """
    texts = [_write_part(part) for part in parts]
    if not texts:
        raise PayloadError("a key has at least one column, and none was given")
    return texts[0] if len(texts) == 1 else json.dumps(texts, ensure_ascii=False)


def split_key(key: str, columns: int) -> tuple[str, ...]:
    """Read the texts of so many columns from a record's key.

    Raises:
        PayloadError: it is no key of that many columns.
    """
    if columns == 1:
        return (key,)
    try:
        parts = json.loads(key)
    except (ValueError, RecursionError):
        parts = None
    if (
        not isinstance(parts, list)
        or len(parts) != columns
        or not all(isinstance(part, str) for part in parts)
    ):
        raise PayloadError(
            f"a key of {len(key)} characters is not the JSON array of the texts of "
            f'{columns} columns, such as ["UA", "1545"]: join_key makes one'
        )
    return tuple(parts)


def _write_part(part: object) -> str:
    # A boolean is an integer to Python, and 'True' is not PostgreSQL's text of it.
    if isinstance(part, str | int | UUID) and not isinstance(part, bool):
        return str(part)
    raise PayloadError(
        f"a part of a key is of the type {type(part).__name__}: give its text as "
        "PostgreSQL shows it"
    )
