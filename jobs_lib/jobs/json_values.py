"""Check values of open types: only values that JSON gives back unchanged are allowed.

Where a type accepts anything, pydantic also writes a datetime or a set, which would
come back as a string or a list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from pydantic_core import PydanticCustomError, core_schema

from jobs_lib.reasons import NO_JSON

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

# Kinds of pydantic's schemas that accept any items if no schema for them is given.
_OPEN = {
    "list": "items_schema",
    "set": "items_schema",
    "frozenset": "items_schema",
    "dict": "values_schema",
}
_ANY = core_schema.any_schema()
_PARTS = {"fields", "choices", "definitions"}


def only_plain(schema: CoreSchema) -> CoreSchema:
    """Add a check to the schema wherever it accepts anything."""
    return cast("CoreSchema", _walk(schema))


def list_of(schema: CoreSchema) -> CoreSchema:
    """Make the schema of a list of such values."""
    if schema["type"] == "definitions":
        inner = core_schema.list_schema(schema["schema"])
        return core_schema.definitions_schema(inner, schema["definitions"])
    return core_schema.list_schema(schema)


def check_plain(value: Any) -> Any:
    """Return the value if JSON can give it back unchanged.

    Raises:
        PydanticCustomError: it contains something else.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        for one in value:
            check_plain(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            if not isinstance(key, str):
                name = type(key).__name__
                raise _refuse(f"a key of it is of the type {name}, and JSON's are str")
            check_plain(one)
    else:
        name = type(value).__name__
        raise _refuse(
            f"a {name} has no JSON form that gives it back: annotate the parameter "
            f"with the type, or send a str, number, list or dict"
        )
    return value


def _refuse(reason: str) -> PydanticCustomError:
    """Make an error whose text contains no value, and so is passed on as it is."""
    return PydanticCustomError(NO_JSON, "{reason}", {"reason": reason})


def _walk(schema: Any) -> Any:
    """Walk over a schema, or over a list or mapping of schemas."""
    if isinstance(schema, list | tuple):
        return type(schema)(_walk(one) for one in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if not isinstance(kind, str):
        # A mapping by name: fields of a class, or choices of a tagged union.
        return {name: _walk(one) for name, one in schema.items()}
    if kind == "any":
        return core_schema.no_info_after_validator_function(
            check_plain, cast("CoreSchema", schema)
        )
    # Skip the user's own values in the schema, such as defaults.
    walked = {
        key: _walk(part) if key.endswith("schema") or key in _PARTS else part
        for key, part in schema.items()
    }
    if kind == "dict" and schema.get("keys_schema", _ANY)["type"] == "any":
        walked["keys_schema"] = core_schema.str_schema()
    values = _OPEN.get(kind)
    if values is not None and values not in walked:
        walked[values] = _walk(_ANY)
    return walked
