"""The group of a job: one of its parameters, or the result of a function of them."""

from __future__ import annotations

import inspect
import typing
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from jobs_lib.errors import ConfigurationError, PayloadError
from jobs_lib.jobs.options import check_key
from jobs_lib.reasons import spell_class

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jobs_lib.jobs.payload import Payload

_TEXTS = (str, int, UUID)
"""The types of groups: a str is used as it is, the others by their text."""
_FORMS = "str, int, UUID or None"


class Grouping:
    """Chooses the groups of one type's jobs.

    Args:
        given: the name of a parameter, or a function of all parameters.
        payload: the type's payload.

    Raises:
        ConfigurationError: there is no such parameter, or it cannot be a group, or the
            function does not take the payload's fields.
    """

    def __init__(
        self, given: str | Callable[..., str | int | UUID | None], payload: Payload
    ) -> None:
        self._type = payload.type_name
        self._payload = payload
        self._function = None if isinstance(given, str) else given
        self._parameter = given if isinstance(given, str) else ""
        if isinstance(given, str):
            check_parameter(given, payload, "group")
        else:
            self._check_function(given)

    def choose(self, values: Mapping[str, Any]) -> str | None:
        """Choose the group of a job with these arguments.

        Raises:
            PayloadError: the value cannot be a group.
        """
        return check_key(self._type, "group", _as_text(self._find(values)))

    def choose_many(self, payloads: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Choose the groups of many jobs; each different group is checked once.

        Raises:
            PayloadError: a value cannot be a group.
        """
        groups = [self._find(values) for values in payloads]
        if not {type(group) for group in groups} <= {str, NoneType}:
            # Some of these values may not be hashable.
            return [check_key(self._type, "group", _as_text(group)) for group in groups]
        for group in set(groups):
            check_key(self._type, "group", group)
        return groups

    def _find(self, values: Mapping[str, Any]) -> Any:
        if self._function is None:
            if self._parameter in values:
                return values[self._parameter]
            return self._payload.defaults[self._parameter]
        filled = self._payload.fill(dict(values))
        try:
            return self._function(**filled)
        except TypeError as error:
            raise PayloadError(
                f"the group function of {self._type!r} cannot take the payload's "
                f"fields {', '.join(filled)}: {error}"
            ) from None

    def _check_function(self, function: object) -> None:
        if not callable(function):
            raise ConfigurationError(
                f"the group of {self._type!r} is {function!r}: give the name of a "
                "parameter, or a function of all parameters"
            )
        if inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                f"the group function of {self._type!r} is async, and is never awaited: "
                "make it a plain function"
            )
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return  # a function in C without a signature
        fields = self._payload.signature.parameters
        try:
            signature.bind(**dict.fromkeys(fields))
        except TypeError as error:
            raise ConfigurationError(
                f"the group function of {self._type!r} takes {signature}, and is "
                f"called with all of the payload's fields by name "
                f"({', '.join(fields)}): {error}"
            ) from None
        returned = signature.return_annotation
        if returned is not signature.empty and not _can_be_group(returned):
            raise ConfigurationError(
                f"the group function of {self._type!r} returns {_show(returned)}: "
                f"return {_FORMS}"
            )


def check_parameter(name: str, payload: Payload, what: str) -> None:
    """Refuse a name that is no parameter, or a parameter whose values have no text.

    Args:
        name: the parameter's name.
        payload: the type's payload.
        what: the parameter's use: ``group`` or ``limit``.

    Raises:
        ConfigurationError: the parameter cannot be used.
    """
    type_name = payload.type_name
    if name not in payload.signature.parameters:
        raise ConfigurationError(
            f"the {what} of {type_name!r} should be its parameter {name!r}, "
            f"but the handler takes {payload.signature}"
        )
    hint = payload.hints.get(name, Any)
    if not _can_be_group(hint):
        way_out = f", or give a function, as in group=lambda {name}: …"
        raise ConfigurationError(
            f"the {what} of {type_name!r} should be its parameter {name!r}, which "
            f"is {_show(hint)} and cannot be a {what}: annotate it as {_FORMS}"
            f"{way_out if what == 'group' else ''}"
        )


def _as_text(group: Any) -> Any:
    """Turn a group into text; other values stay as they are, to be refused later."""
    if type(group) is str or group is None:
        return group
    if isinstance(group, str):
        return str.__str__(group)
    if isinstance(group, int) and not isinstance(group, bool):
        return int.__repr__(group)
    return str(group) if isinstance(group, UUID) else group


def _can_be_group(hint: Any) -> bool:
    """Whether values of an annotation can be groups, as far as it shows."""
    hint = getattr(hint, "__supertype__", hint)
    hint = getattr(hint, "__value__", hint)
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _can_be_group(typing.get_args(hint)[0])
    if origin in (typing.Union, UnionType):
        return all(map(_can_be_group, typing.get_args(hint)))
    if origin is typing.Literal:
        return all(_can_be_group(type(one)) for one in typing.get_args(hint))
    if inspect.isclass(origin):
        return False
    if not inspect.isclass(hint) or hint in (Any, object, NoneType):
        return True
    if issubclass(hint, Enum) and not issubclass(hint, str | int):
        return False
    return issubclass(hint, _TEXTS) and not issubclass(hint, bool)


def _show(hint: Any) -> str:
    return spell_class(hint) if inspect.isclass(hint) else str(hint)
