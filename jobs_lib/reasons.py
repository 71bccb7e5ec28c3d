"""Why a value is refused: the place in it and the reason, never the value itself.

The values in records and payloads belong to their owners. The texts of pydantic,
fastavro and the server repeat values, so none of these texts is passed on unchanged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pydantic_core import ErrorDetails

POOLER = (
    "A pooler in transaction mode, such as PgBouncer, seems to lie between this "
    "process and PostgreSQL: set JOBS_LIB_PGBOUNCER=true"
)
_LOST_STATEMENT = {"26000", "42P05"}
"""A prepared statement is not there, or is there already: behind a pooler others have
prepared theirs in the same session."""
_PREPARED = ('"_pg3_', '"jobs_lib_')
"""How the driver's and this library's names of prepared statements begin."""
NO_JSON = "no_json"
"""The type of errors of our own: their texts hold no value."""
_MOST = 5
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
_DRIVERS = {"psycopg", "psycopg2", "asyncpg", "sqlalchemy"}
_KAFKA = {"cimpl", "confluent_kafka"}
_OF_DATA = "22"
"""The class of those states whose every text repeats a value."""
_PLACES = ("schema_name", "table_name", "column_name", "constraint_name")
_NAMING = ("name", "property_name", "alias", "validation_alias", "serialization_alias")
_UNNAMED = "*"
"""In a path: a key of the data, which is a value as well."""
_FIELD = re.compile(r"\[field_name='(\w+)', input_value=")
_RAISED = re.compile(r"Error calling function `\w+`: \w+")
_NO_FORM = re.compile(r"Unable to serialize unknown type: <?[\w.' ]+>?")
_CIRCLE = "Circular reference"
_ADDRESS = re.compile(
    r'connection to server (?:at "([^"]*)"(?: \([^)]*\))?, (port \d+)'
    r'|on (socket "[^"]*")) failed: '
)
_OUTER = re.compile(r"^(?:[\w ]+ failed: )+(?=.)")
"""What psycopg was doing when it got the reason."""
_HINTS = (
    "Is the server running",
    "This probably means the server",
    "before or while processing",
)
_LOCAL = "<locals>."


def explain(error: Exception) -> str:
    """An error that holds no value, in a line."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(lines[:3]) or type(error).__name__


def explain_refusal(error: Exception, schema: Any) -> str:
    """Why pydantic has refused a value, or could not write it as JSON.

    Args:
        error: what pydantic has raised.
        schema: the core schema of the type: the names of its fields are no values.
    """
    names = frozenset(_find_names(schema))
    # Not by isinstance, which asks the error, and that is the application's code.
    if _is_of_pydantic(error, "ValidationError"):
        return _explain_problems(error, names)
    if issubclass(type(error), ValueError | RecursionError):
        return _explain_form(error, names)
    # Of a check or a serializer that fails itself: its text may be the value.
    return f"a check of its type fails with {name_class(error)}"


def explain_foreign(error: BaseException) -> str | None:
    """What an error of pydantic or of a database's driver says, without values.

    Handlers and loaders raise them, too; of Kafka's client it is the text of its error.
    None for all other errors, and for those of a driver that come neither from the
    server nor from the connection.
    """
    if _is_of_pydantic(error, "ValidationError"):
        title = getattr(error, "title", "")
        fields = frozenset(
            name for one in _find_models(title) for name in _find_names(one)
        )
        return f"{title}: {_explain_problems(error, fields)}"
    modules = {str(one.__module__).split(".")[0] for one in type(error).__mro__}
    if not _KAFKA.isdisjoint(modules):
        return _explain_kafka(error)
    if _DRIVERS.isdisjoint(modules):
        return None
    # SQLAlchemy's: its own text holds the parameters.
    cause = getattr(error, "orig", None)
    if isinstance(cause, BaseException):
        return explain_foreign(cause) or str(cause)
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if state is None:
        # This is an error of the connection, which libpq writes in lines.
        names = {one.__name__ for one in type(error).__mro__}
        return find_reason(error) if "OperationalError" in names else None
    # Of psycopg, or as attributes of the error itself.
    diagnosis = getattr(error, "diag", error)
    # What a function raises is its author's text, such as of our own ones.
    raised = "exec_stmt_raise" in (
        getattr(diagnosis, "source_function", None),
        getattr(diagnosis, "server_source_function", None),
    )
    if not raised and state.startswith(_OF_DATA):
        places = [getattr(diagnosis, name, None) for name in _PLACES]
        named = ", ".join(str(place) for place in places if place)
        return f"the server refuses a value ({named or state})"
    # Behind it come a detail with the row, and the statement with its literals.
    primary = getattr(diagnosis, "message_primary", None)
    text = str(primary or str(error).split("\n")[0])
    return f"{text}. {POOLER}" if hints_at_pooler(state, text) else text


def hints_at_pooler(state: str | None, text: str) -> bool:
    """Whether a pooler that no setting names causes the server's error.

    Args:
        state: the error's SQLSTATE.
        text: its message, in any language.
    """
    return state in _LOST_STATEMENT and any(name in text for name in _PREPARED)


def find_reason(error: BaseException | None) -> str:
    """Why there is no connection, in one line; of each address that was tried."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    tried = [line for line in lines if line.startswith("- ")]
    # libpq's hints ask what our own text asks.
    said = tried or [line for line in lines if line and not line.startswith(_HINTS)]
    return "; ".join(dict.fromkeys(map(_put_first, said))) or name_class(error)


def _put_first(line: str) -> str:
    """A line of libpq with the reason first, and the address behind it."""
    if place := _ADDRESS.search(line):
        address = ", ".join(part for part in place.groups() if part)
        return f"{line[place.end() :]} ({address})"
    return _OUTER.sub("", line)


def name_class(value: object) -> str:
    """The name of a value's class as code writes it, such as ``Partner.Busy``."""
    return spell_class(type(value))


def spell_class(kind: type) -> str:
    """The name of a class as code writes it, without the function that it stands in.

    Past a metaclass that has a property so named.
    """
    name: str = type.__dict__["__qualname__"].__get__(kind)
    return name.rpartition(_LOCAL)[2]


def _explain_kafka(error: BaseException) -> str | None:
    """The text of librdkafka's error and its name, instead of the object's form."""
    inner: Any = error.args[0] if error.args else None
    if name_class(inner) != "KafkaError":
        return None
    return f"{inner.str()} ({inner.name()})"


def _is_of_pydantic(error: BaseException, name: str) -> bool:
    """Whether it is the error of that name; a process without pydantic has none."""
    core = sys.modules.get("pydantic_core")
    return core is not None and type(error) is getattr(core, name)


@cache
def _known_kinds() -> frozenset[str]:
    """The kinds of errors whose texts are pydantic's own."""
    from pydantic_core.core_schema import ErrorType

    return frozenset(get_args(ErrorType))


def _explain_problems(error: Any, names: frozenset[str]) -> str:
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
        # Nobody could correct a name that is not shown.
        parts[-1] = str(error["loc"][-1])
    return f"{'.'.join(parts)}: " if parts else ""


def _reason(error: ErrorDetails) -> str:
    kind = error["type"]
    if kind not in _known_kinds() and kind != NO_JSON:
        return f"{_BY_A_CHECK} ({kind})"
    text = error["msg"]
    return _REASONS.get(kind) or f"{text[:1].lower()}{text[1:]}"


def _explain_form(error: Exception, names: frozenset[str]) -> str:
    try:
        text = str(error)
    except Exception:  # of an error of the application's
        return _BY_A_CHECK
    if issubclass(type(error), RecursionError) or text.startswith(_CIRCLE):
        return "it is nested too deeply, or holds itself"
    for known in (_RAISED, _NO_FORM):
        if found := known.match(text):
            return found[0]
    if "surrogates not allowed" in text or "Unicode" in text or "utf-8" in text:
        return "a text in it has no form in UTF-8"
    fields = [name for name in _FIELD.findall(text) if name in names]
    if fields:
        return f"{fields[0]}: it is not of the type that is declared"
    if _is_of_pydantic(error, "PydanticSerializationError"):
        return "a value in it is not of the type that is declared"
    return name_class(error)


def _find_models(title: str) -> Iterator[Any]:
    """The core schemas of the models with that title."""
    from pydantic import BaseModel

    waiting: list[type[BaseModel]] = [BaseModel]
    seen = set()
    while waiting:
        model = waiting.pop()
        if model in seen:
            continue
        seen.add(model)
        waiting += model.__subclasses__()
        if title in (model.__name__, model.model_config.get("title")):
            yield getattr(model, "__pydantic_core_schema__", None)


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


def find_header_fault(headers: object) -> str | None:
    """Why headers cannot be stored as texts; their values are not shown."""
    if not isinstance(headers, Mapping):
        return f"they are of type {type(headers).__name__}"
    for name, value in headers.items():
        if not isinstance(name, str):
            return f"the name of one is of type {type(name).__name__}: make it a str"
        if not isinstance(value, str):
            kind = type(value).__name__
            return f"the value of {name[:60]!r} is of type {kind}: make it a str"
        if any(count_bytes(one) < 0 or "\0" in one for one in (name, value)):
            return f"{name[:60]!r} or its value is other text: encode it"
    return None


def count_bytes(text: str) -> int:
    """Bytes of UTF-8; -1 if there is a lone surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return -1
