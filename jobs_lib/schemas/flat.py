"""Tell objects that are written as they are declared, without asking pydantic.

pydantic takes an object of a declared class as it is. Only while it writes it can it
say that a field holds something else, if it is asked to raise for that. Asking so lets
go of Python's lock each time, for which all threads of a busy service then queue.
"""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from operator import contains
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TYPES: dict[str, type] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "none": NoneType,
    "uuid": UUID,
    "decimal": Decimal,
    "datetime": datetime,
    "date": date,
    "time": time,
    "timedelta": timedelta,
}
_PLAIN = frozenset(_TYPES.values())
_ANY = {"type": "any"}
_LISTS = {"model-fields", "dataclass-args"}


def make_chooser(
    schema: Mapping[str, Any],
) -> Callable[[Any], Literal["error", False]]:
    """Make a function that chooses pydantic's ``warnings`` to write a value with.

    It chooses False for an object whose fields hold one plain value each, of the very
    types that its class declares, and for a dict of plain values where any are allowed:
    pydantic has nothing to say then. For all others, and for classes with serializers
    of their own, it chooses an error.

    Args:
        schema: the core schema of the value's type.
    """
    if _takes_dicts(schema):
        return _choose_for_dict
    fields = _find_fields(schema)
    if fields is None:
        return _ask
    cls, names, types = schema["cls"], [*fields], [*fields.values()]

    def choose(value: Any) -> Literal["error", False]:
        if type(value) is not cls:
            return "error"
        held = value.__dict__
        is_flat = [*held] == names and all(
            map(contains, types, map(type, held.values()))
        )
        return False if is_flat else "error"

    return choose


def _ask(value: Any) -> Literal["error", False]:
    return "error"


def _choose_for_dict(value: Any) -> Literal["error", False]:
    is_flat = type(value) is dict and _PLAIN.issuperset(map(type, value.values()))
    return False if is_flat else "error"


def _takes_dicts(schema: Mapping[str, Any]) -> bool:
    """Whether a dict may have any values, and is written by what these are."""
    return schema == _ANY or (
        schema["type"] == "dict"
        and schema.get("keys_schema") == {"type": "str"}
        and schema.get("values_schema", _ANY) == _ANY
        and "serialization" not in schema
    )


def _find_fields(schema: Mapping[str, Any]) -> dict[str, frozenset[type]] | None:
    """Find the types of a class's fields; None if types alone do not tell enough."""
    within = schema.get("schema", {})
    if (
        schema.get("root_model")
        or schema.get("slots")
        or within.get("type") not in _LISTS
        or within.get("computed_fields")
        or within.get("extras_schema")
        or (schema.get("config") or {}).get("extra_fields_behavior") == "allow"
        or any("serialization" in one for one in (schema, within))
    ):
        return None
    listed = within["fields"]
    if isinstance(listed, list):
        listed = {one["name"]: one for one in listed}
    found = {name: _find_types(one["schema"]) for name, one in listed.items()}
    return found if all(found.values()) else None


def _find_types(schema: Mapping[str, Any]) -> frozenset[type]:
    """Find the types that a field's values may have; none if these do not tell."""
    kind = schema["type"]
    if "serialization" in schema:
        return frozenset()
    if kind in _TYPES:
        return frozenset([_TYPES[kind]])
    if kind == "enum":
        return frozenset([schema["cls"]])
    if kind == "default":
        return _find_types(schema["schema"])
    if kind == "nullable":
        inner = _find_types(schema["schema"])
        return inner | {NoneType} if inner else inner
    return frozenset()
