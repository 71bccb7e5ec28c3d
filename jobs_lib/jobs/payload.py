"""A handler's signature is its payload's schema: check, encode and decode."""

from __future__ import annotations

import inspect
import re
import typing
from typing import TYPE_CHECKING, Any, NotRequired, cast, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import CoreConfig, SchemaValidator
from typing_extensions import TypedDict

from jobs_lib import telemetry
from jobs_lib.errors import ConfigurationError, PayloadError, StoredPayloadError
from jobs_lib.jobs.json_values import list_of, only_plain
from jobs_lib.reasons import explain_refusal, spell_class
from jobs_lib.schemas.finite import check_finite, make_serializer
from jobs_lib.schemas.json_limits import MOST_LEVELS, check_limits
from jobs_lib.schemas.secrets import WAY_OUT, find_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LARGE = 65_536
"""A payload of this many bytes causes a warning, once for each type."""

_AT_ONCE = 1_000
_PREFIX = re.compile(r"(?:[\w.]+\.<locals>|typing|__main__)\.")
"""Prefixes of names in an annotation's text that are not in the code."""
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_CONFIG = ConfigDict(
    extra="forbid",
    strict=True,
    arbitrary_types_allowed=False,
    ser_json_bytes="base64",
    val_json_bytes="base64",
    ser_json_inf_nan="constants",
    allow_inf_nan=False,
    # Check even dataclasses that were made without checks.
    revalidate_instances="always",
)
# A TypedDict's own configuration does not reach the values inside it when they are
# written: bytes would be taken for UTF-8, and NaN silently become null.
_WRITING = CoreConfig(ser_json_bytes="base64", ser_json_inf_nan="constants")


class Payload:
    """The payload of one job type."""

    def __init__(
        self,
        type_name: str,
        function: Callable[..., Any],
        names: Mapping[str, object],
    ) -> None:
        """Read the signature; its first parameter is the job itself.

        Args:
            type_name: for messages.
            function: the handler.
            names: names for annotations, besides those of the function's module.

        Raises:
            ConfigurationError: the signature cannot be a schema.
        """
        self.type_name = type_name
        parameters = list(inspect.signature(function).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind not in (
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                inspect.Parameter.KEYWORD_ONLY,
            ):
                raise ConfigurationError(
                    f"the handler of {type_name!r} takes {parameter}: a payload has "
                    "named fields only, so every parameter needs a name of its own"
                )
        self.signature = inspect.Signature(list(map(_as_written, parameters)))
        """The parameters of a call; its annotations are only for messages."""
        try:
            hints = _resolve(function, names)
        except NameError as error:
            raise ConfigurationError(
                f"the handler of {type_name!r} has an annotation that cannot be "
                f"resolved: {error}. Define or import it above the handler"
            ) from None
        self.hints = hints
        """The fields' annotations, by name."""
        fields: dict[str, Any] = {}
        for parameter in parameters:
            if parameter.name not in hints:
                raise ConfigurationError(
                    f"the handler of {type_name!r} takes {parameter.name!r} without an "
                    "annotation, so values cannot be checked: annotate it, with Any "
                    "for whatever has a JSON form"
                )
            hint = hints[parameter.name]
            required = parameter.default is inspect.Parameter.empty
            fields[parameter.name] = hint if required else NotRequired[hint]
        # The fields come from the signature at run time: type checkers cannot follow.
        schema = cast("Any", TypedDict)("Payload", fields)
        schema.__pydantic_config__ = _CONFIG
        try:
            self._adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(schema)
        except PydanticUserError as error:
            raise ConfigurationError(
                f"the handler of {type_name!r} has a parameter that has no JSON form: "
                f"{error.message.splitlines()[0]}"
            ) from None
        if secret := find_secret(self._adapter.core_schema):
            raise ConfigurationError(
                f"the parameter {secret} of the handler of {type_name!r} {WAY_OUT}"
            )
        self.defaults = {
            parameter.name: parameter.default
            for parameter in parameters
            if parameter.default is not inspect.Parameter.empty
        }
        checked = only_plain(self._adapter.core_schema)
        self._validator = SchemaValidator(checked)
        self._many = SchemaValidator(list_of(checked))
        self._serializer, self._lossy = make_serializer(
            self._adapter.core_schema, _WRITING
        )
        self._warned = False

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the call's arguments by name.

        Raises:
            PayloadError: they do not fit the signature.
        """
        if not args:
            return kwargs
        try:
            return self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise PayloadError(
                f"{self.type_name!r} takes {self.signature}: {error}"
            ) from None

    def encode(self, values: dict[str, Any], limit: int) -> bytes:
        """Check the values and return them as JSON in UTF-8.

        Raises:
            PayloadError: a field is missing, unknown or of a wrong type, or the server
                would refuse the text, or it has more than ``limit`` bytes.
        """
        try:
            checked = self._validator.validate_python(values)
            encoded = self._serializer.to_json(checked, by_alias=True)
        except ValidationError as error:
            raise PayloadError(self._explain("enqueued", error)) from None
        # The application's own validators may raise anything.
        except Exception as error:
            raise self._refuse_form(error) from None
        size = len(encoded)
        if size > limit:
            raise self._refuse_size(size, limit)
        if size >= LARGE:
            self._warn(size)
        self._check_limits(encoded)
        if b"\\u0000" in encoded:
            self._refuse_nul(encoded)
        if self._may_hide_numbers(encoded):
            self._check_finite(checked, encoded)
        return encoded

    def encode_many(self, many: Sequence[Mapping[str, Any]], limit: int) -> list[bytes]:
        """Encode many payloads as :meth:`encode` does, with most work done together.

        Raises:
            PayloadError: one of them is refused.
        """
        to_json = self._serializer.to_json
        try:
            checked = self._many.validate_python(many)
            encoded = [to_json(values, by_alias=True) for values in checked]
        except ValidationError as error:
            raise PayloadError(self._explain("enqueued", error)) from None
        # The application's own validators may raise anything.
        except Exception as error:
            raise self._refuse_form(error) from None
        largest = max(map(len, encoded), default=0)
        if largest > limit:
            raise self._refuse_size(largest, limit)
        if largest >= LARGE:
            self._warn(largest)
        if largest > 2 * MOST_LEVELS:
            for one in encoded:
                self._check_limits(one)
        for start in range(0, len(encoded), _AT_ONCE):
            some = encoded[start : start + _AT_ONCE]
            joined = b"".join(some)
            if b"\\u0000" in joined:
                for one in some:
                    self._refuse_nul(one)
            if self._may_hide_numbers(joined):
                for place, one in enumerate(some, start):
                    if self._may_hide_numbers(one):
                        self._check_finite(checked[place], one)
        return encoded

    def decode(self, text: str) -> dict[str, Any]:
        """Decode the handler's keyword arguments.

        Raises:
            StoredPayloadError: the payload does not fit the signature any more.
        """
        try:
            return self._adapter.validate_json(text)
        except Exception as error:
            raise StoredPayloadError(self._explain("stored", error)) from None

    def read(self, text: str) -> dict[str, Any]:
        """Read a call's arguments from JSON, such as that of a command line.

        Raises:
            PayloadError: they do not fit the signature.
        """
        try:
            return self._adapter.validate_json(text)
        except Exception as error:
            raise PayloadError(self._explain("enqueued", error)) from None

    def fill(self, values: dict[str, Any]) -> dict[str, Any]:
        """Add the signature's defaults to the values."""
        return {**self.defaults, **values}

    def _explain(self, what: str, error: Exception) -> str:
        problems = explain_refusal(error, self._adapter.core_schema)
        return (
            f"the {what} payload does not fit the handler "
            f"{self.type_name}{self.signature}: {problems}"
        )

    def _refuse_form(self, error: Exception) -> PayloadError:
        reason = explain_refusal(error, self._adapter.core_schema)
        return PayloadError(
            f"the payload of {self.type_name!r} has no JSON form: {reason}"
        )

    def _refuse_size(self, size: int, limit: int) -> PayloadError:
        return PayloadError(
            f"the payload of {self.type_name!r} has {size} bytes, the limit is {limit} "
            "(JOBS_LIB_PAYLOAD_LIMIT): store it elsewhere and enqueue a reference"
        )

    def _refuse(self, error: ValueError) -> PayloadError:
        return PayloadError(
            f"the payload of {self.type_name!r} cannot be enqueued: {error}"
        )

    def _refuse_nul(self, encoded: bytes) -> None:
        if _NUL.search(encoded):
            raise PayloadError(
                f"the payload of {self.type_name!r} holds a NUL character, which "
                "PostgreSQL cannot store in JSON: remove it or encode it"
            )

    def _check_limits(self, encoded: bytes) -> None:
        try:
            check_limits(encoded)
        except ValueError as error:
            raise self._refuse(error) from None

    def _may_hide_numbers(self, encoded: bytes) -> bool:
        """Whether NaN or infinity may have been written, by name or as null."""
        return (
            b"NaN" in encoded
            or b"Infinity" in encoded
            or (self._lossy and b"null" in encoded)
        )

    def _check_finite(self, values: dict[str, Any], encoded: bytes) -> None:
        try:
            check_finite(
                self._serializer.to_python, values, encoded, self._adapter.core_schema
            )
        except ValueError as error:
            raise self._refuse(error) from None

    def _warn(self, size: int) -> None:
        if not self._warned:
            self._warned = True
            telemetry.emit("payload.large", type=self.type_name, bytes=size)


class _Written(str):
    """An annotation as in the code: shown without quotes in a signature."""

    __repr__ = str.__str__


def _as_written(parameter: inspect.Parameter) -> inspect.Parameter:
    hint = parameter.annotation
    if hint is inspect.Parameter.empty:
        return parameter
    if isinstance(hint, str):
        text = hint
    elif isinstance(hint, type) and not typing.get_args(hint):
        text = spell_class(hint)
    else:
        text = _PREFIX.sub("", str(hint))
    return parameter.replace(annotation=_Written(text))


def _resolve(
    function: Callable[..., Any], names: Mapping[str, object]
) -> dict[str, Any]:
    """Resolve the parameters' annotations, without that of the job: it is no field."""
    annotated = dict(getattr(function, "__annotations__", {}))
    annotated.pop(next(iter(inspect.signature(function).parameters), ""), None)
    annotated.pop("return", None)
    bare = type("Fields", (), {"__annotations__": annotated})
    module = getattr(function, "__globals__", {})
    return get_type_hints(bare, {**module, **names}, include_extras=True)
