"""Find pydantic's secrets, which it writes as asterisks: their values would be lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic_core import CoreSchema

WAY_OUT = (
    "is a secret of pydantic, which is written as asterisks, so its value would be "
    "lost: send a reference to where it is kept, or give the field a serializer"
)
"""What is wrong with the field, and what to do about it."""
_BY_NAME = {"fields", "choices"}


def find_secret(schema: CoreSchema) -> str | None:
    """Find a secret in a type; returns the names that lead there, or None."""
    return next(_walk(schema, ()), None)


def _walk(schema: Any, place: tuple[str, ...]) -> Iterator[str]:
    if isinstance(schema, list | tuple):
        for one in schema:
            yield from _walk(one, place)
    if not isinstance(schema, dict):
        return
    # Whoever gives a serializer says how the values below it are written.
    if function := schema.get("serialization", {}).get("function"):
        if _hides(function):
            yield ".".join(place) or "the value"
        return
    for key, part in schema.items():
        if key in _BY_NAME and isinstance(part, dict):
            for name, field in part.items():
                yield from _walk(field, (*place, str(name)))
        elif key not in {"metadata", "serialization"}:
            yield from _walk(part, place)


def _hides(function: Any) -> bool:
    """Whether it is pydantic's own serializer of secrets."""
    name, module = (getattr(function, one, "") for one in ("__name__", "__module__"))
    return module == "pydantic.types" and name.startswith("_serialize_secret")
