"""Why a value is refused: the place in it and the reason, never the value itself.

What stands in records and payloads belongs to their owners. The texts of pydantic and
fastavro repeat it, so none of them is passed on as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError
from pydantic_core.core_schema import ErrorType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pydantic_core import ErrorDetails

NO_JSON = "no_json"
"""The type of errors of our own: their texts hold no value."""
_MOST = 5
_KNOWN = frozenset(get_args(ErrorType))
_BY_A_CHECK = "a check of its type refuses it"
# The texts of these repeat a piece of the value, or what the application has raised.
_REASONS = {
    "value_error": _BY_A_CHECK,
    "assertion_error": _BY_A_CHECK,
    "get_attribute_error": "an attribute of it cannot be read",
    "iteration_error": "input cannot be iterated",
    "mapping_type": "input should be a valid mapping",
    "union_tag_invalid": "its tag is none of those that are expected",
    "uuid_parsing": "input should be a valid UUID",
    "url_parsing": "input should be a valid URL",
    "url_syntax_violation": "input should be a valid URL",
    "bytes_invalid_encoding": "input should be bytes in the expected encoding",
    "timezone_offset": "input has another time zone than expected",
}
_NAMING = ("name", "property_name", "alias", "validation_alias", "serialization_alias")
_UNNAMED = "*"
"""In a path: a key of the data, which is a value as well."""
_FIELD = re.compile(r"\[field_name='(\w+)', input_value=")
_RAISED = re.compile(r"Error calling function `\w+`: \w+")
_NO_FORM = re.compile(r"Unable to serialize unknown type: <?[\w.' ]+>?")
_CIRCLE = "Circular reference"


def explain_refusal(error: Exception, schema: Any) -> str:
    """Why pydantic has refused a value, or could not write it as JSON.

    Args:
        error: what pydantic has raised.
        schema: the core schema of the type: the names of its fields are no values.
    """
    names = frozenset(_find_names(schema))
    if not isinstance(error, ValidationError):
        return _explain_form(error, names)
    found = error.errors(include_url=False, include_input=False)
    problems = [f"{_place(one, names)}{_reason(one)}" for one in found[:_MOST]]
    if len(found) > _MOST:
        problems.append(f"and {len(found) - _MOST} more")
    return "; ".join(problems)


def show_place(path: Iterable[str | int], schema: Any) -> str:
    """A place in a value of that core schema; keys of the data are not shown."""
    return ".".join(_show_parts(path, frozenset(_find_names(schema))))


def _show_parts(path: Iterable[str | int], names: frozenset[str]) -> list[str]:
    return [
        str(part) if isinstance(part, int) or part in names else _UNNAMED
        for part in path
    ]


def _place(error: ErrorDetails, names: frozenset[str]) -> str:
    parts = _show_parts(error["loc"], names)
    if parts and error["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
        # Nobody could correct a name that is not told.
        parts[-1] = str(error["loc"][-1])
    return f"{'.'.join(parts)}: " if parts else ""


def _reason(error: ErrorDetails) -> str:
    kind = error["type"]
    if kind not in _KNOWN and kind != NO_JSON:
        return f"{_BY_A_CHECK} ({kind})"
    text = error["msg"]
    return _REASONS.get(kind) or f"{text[:1].lower()}{text[1:]}"


def _explain_form(error: Exception, names: frozenset[str]) -> str:
    text = str(error)
    if isinstance(error, RecursionError) or text.startswith(_CIRCLE):
        return "it is nested too deeply, or holds itself"
    for known in (_RAISED, _NO_FORM):
        if found := known.match(text):
            return found[0]
    if "surrogates not allowed" in text or "Unicode" in text or "utf-8" in text:
        return "a text in it has no form in UTF-8"
    fields = [name for name in _FIELD.findall(text) if name in names]
    if fields:
        return f"{fields[0]}: it is not of the type that is declared"
    if isinstance(error, PydanticSerializationError):
        return "a value in it is not of the type that is declared"
    return type(error).__name__


def _find_names(schema: Any) -> Iterator[str]:
    """The names that a core schema gives to fields, in Python and in JSON."""
    waiting, seen = [schema], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            if isinstance(fields := one.get("fields"), Mapping):
                yield from fields
            for key in _NAMING:
                yield from _find_texts(one.get(key))
            waiting += [
                inner
                for key, inner in one.items()
                if key not in {"default", "expected", "metadata"}
            ]
        elif isinstance(one, list | tuple):
            waiting += one


def _find_texts(alias: Any) -> Iterator[str]:
    if isinstance(alias, str):
        yield alias
    elif isinstance(alias, list | tuple):
        for one in alias:
            yield from _find_texts(one)
