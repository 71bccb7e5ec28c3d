"""Encoders and decoders of values. Avro is imported only if a schema is declared."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from pydantic import PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter
from pydantic_core import from_json

from jobs_lib.errors import ConfigurationError
from jobs_lib.reasons import explain_refusal
from jobs_lib.schemas.finite import check_finite, may_lose, reads_once
from jobs_lib.schemas.flat import make_chooser
from jobs_lib.schemas.json_limits import check_limits
from jobs_lib.schemas.secrets import WAY_OUT, find_secret

if TYPE_CHECKING:
    from jobs_lib.schemas.registry import Registry

SchemaSource: TypeAlias = Path | Mapping[str, Any]
"""An Avro schema: the path of its .avsc file, or the contents of such a file."""
REGISTERED: Literal["registered"] = "registered"
"""For consumers: values are read with the schema that they were written with."""
_TAKE_BYTES = {"any", "bytes", "nullable", "union"}
"""Kinds of core schemas that accept bytes of any form."""


class Encoder(Protocol):
    """Makes the bytes of a topic's values."""

    content_type: str
    """The media type of the bytes; empty if it is not known."""
    labels_rows: bool
    """Whether each row stores its content type, so that it stays right even if the
    declaration changes before the row leaves."""

    def encode(self, value: Any) -> bytes:
        """Encode a value for its record.

        Raises:
            ValueError: it does not fit; the message says why.
        """

    def check(self, data: bytes) -> None:
        """Check that bytes have this encoder's format, as far as can be seen at once.

        Raises:
            ValueError: they do not; no consumer could read them.
        """

    def show(self, data: bytes) -> Any:
        """Decode bytes of this encoder into plain types, for people and tests."""

    def load(self) -> None:
        """Look up now what encoding the first value would ask for."""

    def forget(self) -> None:
        """Forget what was looked up: another registry is used."""


class Decoder(Protocol):
    """Makes values of a record's bytes."""

    asks: bool
    """Whether :meth:`prepare` is needed."""

    def decode(self, data: bytes) -> Any:
        """Decode the value in the bytes.

        Raises:
            ValueError: this code can never read the bytes.
        """

    def read_field(self, data: bytes, name: str) -> Any:
        """Read one field of the value, whatever its type is; None if it has none.

        Raises:
            ValueError: this code can never read the bytes.
        """

    def prepare(self, data: bytes) -> None:
        """Fetch what :meth:`decode` needs, so that it asks no server.

        Raises:
            ValueError: the bytes cannot be read.
            UnavailableError: a server that must be asked does not answer now.
        """

    def load(self) -> None:
        """Check now that all needed settings are set."""


class JsonCodec:
    """Values as JSON; ``bytes`` are taken as they are."""

    content_type = "application/json"
    labels_rows = False
    asks = False

    def __init__(self, adapter: TypeAdapter[Any]) -> None:
        self._adapter = adapter
        self._choose_warnings = make_chooser(adapter.core_schema)
        self._lossy = may_lose(adapter.core_schema)
        self._takes_any = adapter.core_schema["type"] == "any"
        # Bytes of such a type need not be JSON.
        self._open = adapter.core_schema["type"] in _TAKE_BYTES

    def encode(self, value: Any) -> bytes:
        """See :class:`Encoder`."""
        if isinstance(value, bytes):
            if not self._open:
                check_limits(value)
            return value
        try:
            checked = self._adapter.validate_python(value)
            # Only this finds a dataclass that was made without checks.
            strict = self._choose_warnings(checked)
            encoded = self._adapter.dump_json(checked, by_alias=True, warnings=strict)
        # The application's own validators may raise anything.
        except Exception as error:
            raise refuse(error, self._adapter) from None
        check_limits(encoded)
        if (
            b"NaN" in encoded
            or b"Infinity" in encoded
            or (self._lossy and b"null" in encoded)
        ):
            check_finite(
                self._adapter.dump_python, checked, encoded, self._adapter.core_schema
            )
        return encoded

    def check(self, data: bytes) -> None:
        """Check nothing, see :class:`Encoder`: a service may write its own JSON."""

    def show(self, data: bytes) -> Any:
        """See :class:`Encoder`."""
        return show_json(data)

    def decode(self, data: bytes) -> Any:
        """See :class:`Decoder`."""
        if self._takes_any:
            # The same parser in half of the time. The adapter explains what is wrong.
            try:
                return from_json(data)
            except ValueError:
                pass
        try:
            return self._adapter.validate_json(data)
        except Exception as error:
            raise refuse(error, self._adapter) from None

    def read_field(self, data: bytes, name: str) -> Any:
        """See :class:`Decoder`."""
        value = from_json(data)
        return value.get(name) if isinstance(value, dict) else None

    def prepare(self, data: bytes) -> None:
        """Do nothing, see :class:`Decoder`."""

    def load(self) -> None:
        """Do nothing, see :class:`Encoder`."""

    def forget(self) -> None:
        """Do nothing, see :class:`Encoder`."""


class BytesCodec(JsonCodec):
    """Values that are bytes of any form."""

    # A type that says nothing may be left out (RFC 9110, 8.3), which saves each record
    # a header.
    content_type = ""

    def decode(self, data: bytes) -> bytes:
        """Return the bytes as they are."""
        return data


def make_encoder(
    topic: str,
    value: Any,
    schema: SchemaSource | None,
    registry: Callable[[], Registry],
    in_kafka: Callable[[str], str],
) -> Encoder:
    """Make the encoder of a topic's values.

    Args:
        topic: the declared name.
        value: the values' type.
        schema: an Avro schema; None for JSON or bytes.
        registry: finds the schema registry, at the first use.
        in_kafka: gives the topic's name in Kafka, at the first use.

    Raises:
        ConfigurationError: the type has no JSON form, or the schema cannot be used.
    """
    adapter = _make_adapter(topic, value, whole=schema is None)
    if schema is None:
        # Making the JSON would use the iterable up, so a null could not be explained.
        if reads_once(adapter.core_schema):
            raise ConfigurationError(
                f"the values of the topic {topic!r} hold an iterable or a generator, "
                "which can be read once only: declare a list or a Sequence"
            )
        if secret := find_secret(adapter.core_schema):
            raise ConfigurationError(
                f"{secret} in the values of the topic {topic!r} {WAY_OUT}"
            )
        return (BytesCodec if value is bytes else JsonCodec)(adapter)
    _require_avro(topic)
    from jobs_lib.schemas.avro import AvroEncoder, check_fields, load_schema

    avro = load_schema(schema, topic)
    check_fields(adapter, avro, topic)
    return AvroEncoder(adapter, lambda: in_kafka(topic), avro, registry)


def make_decoder(
    topic: str,
    value: Any,
    schema: SchemaSource | Literal["registered"] | None,
    registry: Callable[[], Registry],
) -> Decoder:
    """Make the decoder of the values that a consumer reads.

    Raises:
        ConfigurationError: the type has no JSON form, or the schema cannot be used.
    """
    adapter = _make_adapter(topic, value, whole=schema is None)
    if schema is None:
        return (BytesCodec if value is bytes else JsonCodec)(adapter)
    _require_avro(topic)
    from jobs_lib.schemas.avro import AvroDecoder, load_schema

    reader = None if schema == REGISTERED else load_schema(schema, topic)
    return AvroDecoder(adapter, reader, registry)


def _make_adapter(topic: str, value: Any, *, whole: bool) -> TypeAdapter[Any]:
    """Make a type's adapter, which has the whole schema if that is needed now."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(value)
        if whole:
            # Until it is asked for, nobody sees a name that is not defined.
            adapter.core_schema.get("type")
    # pydantic 2.9 raises the former for a name that is not defined.
    except (PydanticUndefinedAnnotation, PydanticUserError) as error:
        raise ConfigurationError(
            f"the values of the topic {topic!r} have no JSON form: "
            f"{error.message.splitlines()[0]}"
        ) from None
    return adapter


def list_fields(value: Any) -> set[str] | None:
    """List the fields of a type's values, as JSON names them; None if it has none."""
    try:
        schema = TypeAdapter(value).json_schema(mode="serialization")
    # A type that JSON schema cannot describe, such as a Callable.
    except PydanticUserError:
        return None
    if "$ref" in schema:
        schema = schema["$defs"][schema["$ref"].rpartition("/")[2]]
    fields = schema.get("properties")
    return None if fields is None else {*fields}


def show_json(data: bytes) -> Any:
    """Read bytes as JSON; other bytes are returned as they are."""
    try:
        return from_json(data)
    except ValueError:
        return data


def refuse(error: Exception, adapter: TypeAdapter[Any]) -> ValueError:
    """Make an error of pydantic's reason, without the value."""
    return ValueError(explain_refusal(error, adapter.core_schema))


def _require_avro(topic: str) -> None:
    try:
        importlib.import_module("jobs_lib.schemas.registry")
    except ImportError as error:
        raise ConfigurationError(
            f"the topic {topic!r} has an Avro schema, and {error.name or error} is not "
            "installed: pip install 'jobs-lib[avro]'"
        ) from None
