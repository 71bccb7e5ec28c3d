"""Find NaN and infinity, which JSON cannot express: pydantic writes them as null."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from functools import cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, TypeAdapter
from pydantic_core import CoreConfig, SchemaSerializer, to_json

from jobs_lib.reasons import explain_refusal, show_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pydantic_core import CoreSchema

_BY_NAME = CoreConfig(ser_json_inf_nan="constants")
_CLASSES = {"model", "dataclass"}
"""Kinds that are written by their own configuration, wherever they are."""
# Kinds of core schemas that accept any value.
_OPEN = {"any", "function-plain", "is-instance"}
_WITHOUT_ITEMS = {
    "list": "items_schema",
    "set": "items_schema",
    "frozenset": "items_schema",
    "deque": "items_schema",
    "generator": "items_schema",
    "dict": "values_schema",
}
_ANY = {"type": "any"}
_BY_FUNCTION = {"any", "function-plain", "function-wrap"}
_NO_FORM = "which JSON has no form for: send null or a string"
_PARTS = {
    "choices",
    "computed_fields",
    "definitions",
    "fields",
    "serialization",
    "steps",
}


def make_serializer(
    schema: CoreSchema, config: CoreConfig
) -> tuple[SchemaSerializer, bool]:
    """Make a serializer that writes NaN and infinity by their names where it can.

    Args:
        schema: the core schema of the type.
        config: the configuration for all parts outside classes.

    Returns:
        The serializer, and whether a number may still become null.
    """
    if not may_lose(schema, lossy=False):
        return SchemaSerializer(schema, config), False
    if _can_name():
        schema = _name_constants(schema)
    return _build(schema, config), may_lose(schema, lossy=False)


def may_lose(schema: Any, lossy: bool = True, within: bool = False) -> bool:
    """Whether a number in such a value may become null in JSON.

    Args:
        schema: the core schema of the type, or a part of it.
        lossy: whether its configuration writes NaN as null.
        within: whether it is part of a class, whose objects are taken as they are.
    """
    if isinstance(schema, list | tuple):
        return any(may_lose(one, lossy, within) for one in schema)
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    if not isinstance(kind, str):
        # A mapping by name: fields of a class, or choices of a tagged union.
        return any(may_lose(one, lossy, within) for one in schema.values())
    if kind in _CLASSES:
        lossy, within = _writes_null(schema), True
    if lossy and (kind == "float" or (kind == "enum" and _may_be_lost(schema))):
        return True
    is_open = kind in _OPEN or _WITHOUT_ITEMS.get(kind, "type") not in schema
    if is_open and (lossy or within):
        return True
    by = schema.get("serialization", {})
    # The class of an object that a function returns decides how it is written.
    if by.get("type") in _BY_FUNCTION and may_lose(
        by.get("return_schema", _ANY), lossy, within=True
    ):
        return True
    return any(
        # It is not visible here what a definition is part of.
        may_lose(part, lossy or key == "definitions", within or key == "definitions")
        for key, part in schema.items()
        if _is_part(key) and key != "serialization"
    )


def check_finite(
    dump: Callable[..., Any], value: Any, encoded: bytes, schema: CoreSchema
) -> None:
    """Refuse a value if a number in it has become null, or is no JSON.

    Args:
        dump: makes plain Python values from one, as pydantic's ``to_python`` does.
        value: the validated value.
        encoded: its JSON, which contains a null or the name of such a number.
        schema: the core schema of its type.

    Raises:
        ValueError: it holds NaN or infinity, and the message names the place; or it
            holds an iterator, whose items can no longer be known.
    """
    numbers: list[str] = []

    def note(name: str) -> float:
        numbers.append(name)
        return float(name)

    try:
        plain = dump(value, by_alias=True, warnings=False)
        # Most nulls are the value's own: this finds that out at the speed of Rust.
        shown = _to_json(plain)
        both = encoded + shown
        if b"NaN" in both or b"Infinity" in both:
            # In JSON everything with items is a list or an object, of any class.
            meant = json.loads(shown, parse_constant=note)
            written = json.loads(encoded)
        else:
            meant = written = None
    except Exception as error:
        # A serializer of the application may write JSON only.
        raise ValueError(explain_refusal(error, schema)) from None
    for path, number in _find_lost(meant, written):
        place = show_place(path, schema) or "it"
        raise ValueError(f"{place} is {json.dumps(number)}, {_NO_FORM}")
    # A serializer may write JSON of another shape.
    if numbers and _count_nulls(written) > _count_nulls(meant):
        raise ValueError(f"it holds NaN or infinity, {_NO_FORM}")
    # An iterator has been used up for the JSON, and now seems empty.
    if b"null" in encoded and encoded != shown and _holds_iterator(plain):
        raise ValueError(
            "it holds an iterator, which can be read once only, and a null, which may "
            "be NaN or infinity: send a list"
        )


def reads_once(schema: Any) -> bool:
    """Whether such a value, or a part of it, can be read only once.

    Args:
        schema: the core schema of the type, or a part of it.
    """
    if isinstance(schema, list | tuple):
        return any(map(reads_once, schema))
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    if kind == "generator":
        return True
    return any(
        reads_once(part)
        for key, part in schema.items()
        if _is_part(key) or not isinstance(kind, str)
    )


def _to_json(plain: Any) -> bytes:
    """Write plain Python values as JSON that names NaN and infinity."""
    return to_json(
        plain, inf_nan_mode="constants", bytes_mode="base64", fallback=_show_unknown
    )


def _show_unknown(value: Any) -> Any:
    """Show values that pydantic-core has no rule for: in older releases a deque."""
    return list(value) if isinstance(value, deque) else ""


def _may_be_lost(schema: Mapping[str, Any]) -> bool:
    """Whether a member of an enum holds NaN or infinity."""
    shown = _to_json([member.value for member in schema["members"]])
    return b"NaN" in shown or b"Infinity" in shown


def _find_lost(meant: Any, written: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Find the numbers that JSON cannot express, with their places in the JSON.

    Args:
        meant: parsed JSON of the value, with the names of such numbers.
        written: parsed JSON of the value as it was written.
    """
    if written is None or isinstance(written, float):
        for number in (written, meant):
            if isinstance(number, float) and not math.isfinite(number):
                yield (), number
                return
    pairs: Iterable[tuple[str | int, Any, Any]] = ()
    if isinstance(written, dict):
        others = meant if isinstance(meant, dict) else {}
        pairs = ((name, others.get(name), one) for name, one in written.items())
    elif isinstance(written, list):
        items = meant if isinstance(meant, list) else ()
        zipped = zip(written, chain(items, repeat(None)), strict=False)
        pairs = ((place, other, one) for place, (one, other) in enumerate(zipped))
    for name, other, one in pairs:
        for path, number in _find_lost(other, one):
            yield (name, *path), number


def _count_nulls(parsed: Any) -> int:
    if isinstance(parsed, dict):
        return sum(map(_count_nulls, parsed.values()))
    if isinstance(parsed, list):
        return sum(map(_count_nulls, parsed))
    return parsed is None


def _holds_iterator(plain: Any) -> bool:
    if isinstance(plain, dict):
        return any(map(_holds_iterator, plain.values()))
    if isinstance(plain, list | tuple | set | frozenset | deque):
        return any(map(_holds_iterator, plain))
    return isinstance(plain, Iterator)


def _writes_null(schema: Mapping[str, Any]) -> bool:
    """Whether a class writes NaN as null, on purpose or not."""
    written = (schema.get("config") or {}).get("ser_json_inf_nan")
    return written not in {"constants", "strings"}


def _is_part(key: str) -> bool:
    # Skip the user's own values in a schema, such as defaults.
    return key.endswith("schema") or key in _PARTS


def _name_constants(schema: Any) -> Any:
    """Change a schema so that classes write NaN by its name instead of as null."""
    if isinstance(schema, list | tuple):
        return type(schema)(_name_constants(one) for one in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    named = {
        key: _name_constants(part)
        if _is_part(key) or not isinstance(kind, str)
        else part
        for key, part in schema.items()
    }
    if kind in _CLASSES and _writes_null(schema):
        named["config"] = {**(schema.get("config") or {}), **_BY_NAME}
    return named


def _build(schema: CoreSchema, config: CoreConfig) -> SchemaSerializer:
    """Make a serializer that does not reuse the existing serializers of classes."""
    try:
        return SchemaSerializer(schema, config, **cast("Any", {"_use_prebuilt": False}))
    except TypeError:  # a pydantic-core that always reuses them, or never
        return SchemaSerializer(schema, config)


@cache
def _can_name() -> bool:
    """Whether this pydantic-core can write a class by a schema other than its own."""

    class Inner(BaseModel):
        number: float

    class Outer(BaseModel):
        inner: Inner

    schema = _name_constants(TypeAdapter(Outer).core_schema)
    written = _build(schema, _BY_NAME).to_json(Outer(inner=Inner(number=math.nan)))
    return b"NaN" in written
