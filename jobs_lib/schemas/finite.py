"""Numbers that JSON has no form for: pydantic writes NaN and infinity as null."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_NAMES = (b"NaN", b"Infinity")
NOT_FINITE = (b"null", *_NAMES)
"""Of these one stands in the JSON of each value with such a number."""


def check_finite(adapter: TypeAdapter[Any], value: Any, encoded: bytes) -> None:
    """Refuse a value if a number in it was lost on the way to JSON.

    Args:
        adapter: of the value's type.
        value: the value, validated.
        encoded: its JSON, with a trace of such a number.

    Raises:
        ValueError: NaN or infinity has become null, or what is no JSON.
    """
    plain = adapter.dump_python(value, by_alias=True, warnings=False)
    # Most values hold a null of their own: this tells it at the speed of Rust.
    shown = to_json(
        plain, inf_nan_mode="constants", bytes_mode="base64", serialize_unknown=True
    )
    if any(name in shown for name in _NAMES) and _has_lost(plain, json.loads(encoded)):
        raise ValueError(
            "a number in it is NaN or infinite, which JSON has no form for: send null "
            "or a string"
        )


def _has_lost(value: Any, parsed: Any) -> bool:
    """Whether such a number is anything but a string in the parsed JSON."""
    if isinstance(value, float):
        return not math.isfinite(value) and not isinstance(parsed, str)
    if isinstance(value, dict) and isinstance(parsed, dict):
        return any(map(_has_lost, value.values(), parsed.values()))
    if isinstance(value, list | tuple | set | frozenset) and isinstance(parsed, list):
        return any(map(_has_lost, value, parsed))
    return False
