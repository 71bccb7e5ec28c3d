"""Limit how much a few bytes of Avro may ask for: fastavro itself has no limits.

With most schemas every item takes a byte of the value, so the bytes are the limit.
Three kinds of schema need a limit of ours:

- Items that take no byte: a number of five bytes makes a list of a hundred million.
- A type that contains itself: fastavro reads it by recursion in C, and some thousand
  levels end the process.
- Decimals: converting a megabyte of digits to base ten blocks the interpreter for
  minutes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jobs_lib.schemas.json_limits import MOST_DIGITS, MOST_LEVELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MOST_EMPTY = 10_000
"""Items without a byte of their own, such as nulls, in all lists of a value."""
MOST_DECIMAL = int(MOST_DIGITS * math.log2(10) / 8)
"""Bytes of a decimal: as many as its largest number of digits takes."""
_SIZES = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_RECORDS = ("record", "error")
_INNER = {"array": "items", "map": "values"}
_AGAIN = "again"
"""Stands for the kind of a record inside itself."""
_ENDS_EARLY = "it ends too early"


class LimitError(ValueError):
    """The bytes ask for too much; the text contains no value."""


def find_threshold(schema: Any, named: Mapping[str, Any]) -> int | None:
    """Find the size from which a value may ask for too much; None if none can.

    Args:
        schema: the parsed schema.
        named: the schemas that it refers to by full name.
    """
    threshold = None
    for one, kind in _walk(schema, named):
        if kind == _AGAIN or (kind == "array" and _is_empty(one["items"], named)):
            return 0
        if _is_decimal(one, kind):
            threshold = MOST_DECIMAL
    return threshold


def check_limits(
    data: bytes, start: int, schema: Any, named: Mapping[str, Any]
) -> None:
    """Walk over a value without building it, and refuse it if it asks for too much.

    Args:
        data: contains the value.
        start: where the value begins.
        schema: the schema that it was written with, parsed.
        named: the schemas that it refers to by full name.

    Raises:
        LimitError: too many levels, empty items or digits, or no such value at all.
    """
    _Walk(data, start, named).skip(schema, "", 0)


class _Walk:
    """Walks over a value without building it."""

    def __init__(self, data: bytes, start: int, named: Mapping[str, Any]) -> None:
        self.at = start
        self._data = data
        self._named = named
        self._empty = 0

    def skip(self, schema: Any, field: str, level: int) -> None:
        schema, kind = _resolve(schema, self._named)
        if kind == "union":
            # No union lies in a union.
            schema, kind = _resolve(self._choose(schema, field), self._named)
        if kind in _RECORDS or kind in _INNER:
            if level == MOST_LEVELS:
                raise LimitError(
                    f"it has more than the {MOST_LEVELS} levels that are read"
                )
            if kind in _RECORDS:
                for one in schema["fields"]:
                    self.skip(one["type"], one["name"], level + 1)
            else:
                self._skip_items(schema, kind, field, level + 1)
        elif kind in ("bytes", "string"):
            size = self._read_number()
            if size > MOST_DECIMAL and _is_decimal(schema, kind):
                raise LimitError(
                    f"{_place(field)}it is a decimal of {size} bytes, and at most "
                    f"{MOST_DECIMAL} are read"
                )
            self._move(size)
        elif kind == "fixed":
            self._move(schema["size"])
        elif kind in _SIZES:
            self._move(_SIZES[kind])
        else:  # int, long and enum
            self._read_number()

    def _skip_items(self, schema: Any, kind: str, field: str, level: int) -> None:
        items = schema[_INNER[kind]]
        empty = kind == "array" and _is_empty(items, self._named)
        while count := self._read_number():
            if count < 0:  # then the size of the block follows
                count = -count
                self._read_number()
            if empty:
                self._count_empty(count, field)
                continue
            for _ in range(count):
                if kind == "map":
                    self._move(self._read_number())
                self.skip(items, field, level)

    def _count_empty(self, count: int, field: str) -> None:
        self._empty += count
        if self._empty > MOST_EMPTY:
            raise LimitError(
                f"{_place(field)}it has more than the {MOST_EMPTY} items without a "
                "byte of their own that are read"
            )

    def _choose(self, branches: Any, field: str) -> Any:
        number = self._read_number()
        if not 0 <= number < len(branches):
            raise LimitError(f"{_place(field)}its union has no such branch")
        return branches[number]

    def _move(self, size: int) -> None:
        if not 0 <= size <= len(self._data) - self.at:
            raise LimitError(_ENDS_EARLY)
        self.at += size

    def _read_number(self) -> int:
        shift = number = 0
        while True:
            if self.at == len(self._data) or shift > 63:
                raise LimitError(_ENDS_EARLY if shift <= 63 else "a number is too long")
            byte = self._data[self.at]
            self.at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (number >> 1) ^ -(number & 1)
            shift += 7


def _place(field: str) -> str:
    return f"{field}: " if field else ""


def _resolve(schema: Any, named: Mapping[str, Any]) -> tuple[Any, str]:
    """Follow names and annotations to a schema; returns it and its kind."""
    while True:
        if isinstance(schema, list):
            return schema, "union"
        kind = schema["type"] if isinstance(schema, dict) else schema
        if not isinstance(kind, str):
            schema = kind
        elif kind in named:
            schema = named[kind]
        else:
            return schema, kind


def _is_decimal(schema: Any, kind: str) -> bool:
    return (
        kind == "bytes"
        and isinstance(schema, dict)
        and schema.get("logicalType") == "decimal"
    )


def _is_empty(schema: Any, named: Mapping[str, Any]) -> bool:
    """Whether values of the schema take no byte."""
    return all(
        kind in _RECORDS or kind == "null" or (kind == "fixed" and not one["size"])
        for one, kind in _walk(schema, named)
    )


def _walk(
    schema: Any,
    named: Mapping[str, Any],
    around: tuple[str, ...] = (),
    seen: set[str] | None = None,
) -> Iterator[tuple[Any, str]]:
    """Yield all schemas in a schema with their kinds, each record once."""
    seen = set() if seen is None else seen
    schema, kind = _resolve(schema, named)
    if kind in _RECORDS:
        name = schema["name"]
        if name in around:
            yield schema, _AGAIN
        if name in seen:
            return
        seen.add(name)
        around = (*around, name)
    yield schema, kind
    if kind == "union":
        inner = schema
    elif kind in _RECORDS:
        inner = [one["type"] for one in schema["fields"]]
    else:
        inner = [schema[_INNER[kind]]] if kind in _INNER else []
    for one in inner:
        yield from _walk(one, named, around, seen)
