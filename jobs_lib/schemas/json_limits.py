"""What JSON may hold so that it can be read again, in Python and in this library."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any, Self

MOST_LEVELS = 200
"""Objects and lists inside one another. Pydantic reads no more of them."""
MOST_DIGITS = 4_300
"""Of an integer. Python reads no more of them, unless it is told otherwise."""

# Digits count from the start of their run: or each digit would begin a new search.
_MANY_DIGITS = re.compile(rb"(?<![0-9])[0-9]{%d}" % (MOST_DIGITS + 1))
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class Unreadable(str):
    """In place of JSON that Python cannot read; SQL may write it all the same.

    It is a text that is not empty: what needs an object refuses it as any other text.
    """

    __slots__ = ()

    def __new__(cls) -> Self:
        return super().__new__(cls, "unreadable")


def read_json(encoded: bytes | str) -> Any:
    """JSON from the database; :class:`Unreadable` if it has too many levels or digits.

    One such value must not keep the rows beside it from being read.
    """
    try:
        return json.loads(encoded)
    except (RecursionError, ValueError):
        return Unreadable()


def check_limits(encoded: bytes) -> None:
    """Refuse JSON that was written and could not be read again.

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
            "send what lies deep as a string of JSON, or as a flat list"
        )
    if len(encoded) > MOST_DIGITS and _MANY_DIGITS.search(encoded):
        # Not in a string: only the parser tells.
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
