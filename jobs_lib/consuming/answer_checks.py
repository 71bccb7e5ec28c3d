"""Refuse what a read model cannot be asked or given, before any SQL runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jobs_lib.consuming.merging import EntityState
from jobs_lib.errors import AnswerError
from jobs_lib.jobs.json_values import check_plain
from jobs_lib.kafka.checks import VERSIONS, explain_version
from jobs_lib.reasons import explain

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_BYTES = 65_536
"""Of one entity, as JSON."""
_MOST_GIVEN = 1_000
_BITS = {"smallint": 16, "integer": 32, "bigint": 64}
"""The types of columns that hold integers."""
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}")


def check_version(version: object) -> None:
    """Refuse a version that no record has.

    Raises:
        AnswerError: it is none.
    """
    if type(version) is int and version in VERSIONS:
        return
    raise AnswerError(
        "a version must be 0 or more in an int of 64 bits, and this one is "
        f"{explain_version(version)}: give that of the record, which the update has "
        "returned"
    )


def check_timeout(timeout: object) -> None:
    """Refuse a value that is no number of seconds.

    Raises:
        AnswerError: it is none.
    """
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not (is_number and 0 <= timeout < math.inf):  # type: ignore[operator]
        raise AnswerError(
            f"the timeout is {timeout!r}: give seconds, 0 or more, as in timeout=2"
        )


def check_given(given: Iterable[object]) -> list[EntityState]:
    """Refuse states that are none, and too many of them.

    Raises:
        AnswerError: one is none, or they are too many.
    """
    states: list[EntityState] = []
    for state in given:
        if not isinstance(state, EntityState):
            raise AnswerError(
                f"a given state is of the type {type(state).__name__}: give "
                "EntityState(key, version, entity)"
            )
        check_version(state.version)
        _check_entity(state.entity)
        states.append(state)
    if len(states) > _MOST_GIVEN:
        raise AnswerError(
            f"{len(states):,} states are given, and {_MOST_GIVEN:,} may be: give those "
            "alone that the client has changed just now"
        )
    return states


def write_entity(entity: object) -> str | None:
    """Write an entity as JSON; None if it is gone.

    Raises:
        AnswerError: it has no such form, or is too large.
    """
    _check_entity(entity)
    if entity is None:
        return None
    try:
        # In ASCII: PostgreSQL's text has neither NUL nor lone surrogates.
        text = json.dumps(check_plain(dict(entity)), allow_nan=False)  # type: ignore[call-overload]
    except (ValueError, RecursionError) as error:
        raise AnswerError(
            f"the entity cannot be kept as JSON: {explain(error)}"
        ) from None
    if len(text) > MOST_BYTES:
        raise AnswerError(
            f"the entity has {len(text):,} bytes as JSON, and may have {MOST_BYTES:,}: "
            "give those columns alone that answers show"
        )
    return text


def check_fits(key: str, sql_type: str, model: str) -> None:
    """Refuse a key that PostgreSQL would not read as the type of its column.

    Only the types are known here that keys mostly have.

    Raises:
        AnswerError: it would not.
    """
    if _fits(key, sql_type):
        return
    raise AnswerError(
        f"the key of {model} is a column of the type {sql_type}, and this key cannot "
        "be one: give the key of a record of the read model"
    )


def _fits(key: str, sql_type: str) -> bool:
    if sql_type in _BITS:
        if not _INTEGER.fullmatch(key):
            return False
        half: int = 1 << (_BITS[sql_type] - 1)
        return -half <= int(key) < half
    return sql_type != "uuid" or _UUID.fullmatch(key) is not None


def _check_entity(entity: object) -> None:
    if entity is not None and not isinstance(entity, Mapping):
        raise AnswerError(
            f"an entity is of the type {type(entity).__name__}: give the columns of "
            "its row by their names, or None if it is gone"
        )
