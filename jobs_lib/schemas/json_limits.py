"""Limits of JSON that this library and Python can read again."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any, Self

MOST_LEVELS = 200
"""The depth of nested objects and lists that pydantic can read."""
MOST_DIGITS = 4_300
"""The digits of an integer that Python reads by default."""

# Match only at the start of a run of digits: else each digit would begin a new search.
_MANY_DIGITS = re.compile(rb"(?<![0-9])[0-9]{%d}" % (MOST_DIGITS + 1))
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class Unreadable(str):
    """Stands for JSON that Python cannot read, but that SQL can write.

    It is a text that is not empty: code that needs an object refuses it as any text.
    """

    __slots__ = ()

    def __new__(cls) -> Self:
        return super().__new__(cls, "unreadable")


def read_json(encoded: bytes | str) -> Any:
    """Read JSON from the database; :class:`Unreadable` if it is too deep or long.

    One such value must not keep other rows from being read.
    """
    try:
        return json.loads(encoded)
    except (RecursionError, ValueError):
        return Unreadable()


def check_limits(encoded: bytes) -> None:
    """Refuse JSON that could be written but not read again.

    Raises:
        ValueError: it has too many levels, or an integer too many digits.
    """
    if (
        len(encoded) > 2 * MOST_LEVELS
        and encoded.count(b"[") + encoded.count(b"{") > MOST_LEVELS
        and (levels := _count_levels(encoded)) > MOST_LEVELS
    ):
        raise ValueError(
            f"it has {levels} levels, and at most {MOST_LEVELS} can be read again: "
            "send the deep parts as a string of JSON, or as a flat list"
        )
    if len(encoded) > MOST_DIGITS and _MANY_DIGITS.search(encoded):
        # The digits may be in a string: only the parser knows.
        json.loads(encoded, parse_int=_refuse_digits)


def _count_levels(encoded: bytes) -> int:
    brackets = _STRING.sub(b"", encoded).translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _refuse_digits(digits: str) -> None:
    count = len(digits.lstrip("-"))
    if count > MOST_DIGITS:
        raise ValueError(
            f"it holds a number of {count} digits, and at most {MOST_DIGITS} can be "
            "read again: send a string"
        )
