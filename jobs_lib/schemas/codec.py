"""Encoders and decoders of values. Avro is imported where a schema is declared only."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from pydantic import PydanticUserError, TypeAdapter

from jobs_lib.errors import ConfigurationError
from jobs_lib.reasons import explain_refusal
from jobs_lib.schemas.finite import check_finite, may_lose, reads_once
from jobs_lib.schemas.json_limits import check_limits

if TYPE_CHECKING:
    from jobs_lib.schemas.registry import Registry

SchemaSource: TypeAlias = Path | Mapping[str, Any]
"""An Avro schema: the path of its .avsc file, or what such a file holds."""
REGISTERED: Literal["registered"] = "registered"
"""Of a consumer: values are read as the schema says that they were written with."""
_TAKE_BYTES = {"any", "bytes", "nullable", "union"}
"""Kinds of core schemas by which a value may be bytes of any form."""


class Encoder(Protocol):
    """Makes the bytes of a topic's values."""

    content_type: str
    """The media type of the bytes; empty where nobody knows it."""
    labels_rows: bool
    """Whether each row holds its content type: it is right whatever is declared when
    the row leaves."""

    def encode(self, value: Any) -> bytes:
        """The value as the record holds it.

        Raises:
            ValueError: it does not fit; the message says why.
        """

    def check(self, data: bytes) -> None:
        """Tell whether bytes are of its form, as far as that can be seen at once.

        Raises:
            ValueError: they are not; nobody could read them.
        """

    def show(self, data: bytes) -> Any:
        """What bytes of its own hold, in plain types, for people and tests."""

    def load(self) -> None:
        """Look up now what would be asked for at the first value."""


class Decoder(Protocol):
    """Makes values of a record's bytes."""

    asks: bool
    """Whether there is something to :meth:`prepare`."""

    def decode(self, data: bytes) -> Any:
        """The value that the bytes hold.

        Raises:
            ValueError: they cannot be read, and never will be by this code.
        """

    def prepare(self, data: bytes) -> None:
        """Fetch what is needed to decode, so that :meth:`decode` asks nobody.

        Raises:
            ValueError: they cannot be read.
            UnavailableError: whoever has to be asked does not answer now.
        """

    def load(self) -> None:
        """Find out now whether all that has to be set is set."""


class JsonCodec:
    """Values as JSON; those that are ``bytes`` already are taken as they are."""

    content_type = "application/json"
    labels_rows = False
    asks = False

    def __init__(self, adapter: TypeAdapter[Any]) -> None:
        self._adapter = adapter
        self._lossy = may_lose(adapter.core_schema)
        # Of such a type, bytes may be no JSON.
        self._open = adapter.core_schema["type"] in _TAKE_BYTES

    def encode(self, value: Any) -> bytes:
        """See :class:`Encoder`."""
        if isinstance(value, bytes):
            if not self._open:
                check_limits(value)
            return value
        try:
            checked = self._adapter.validate_python(value)
            # A dataclass made without checks is found out only here.
            encoded = self._adapter.dump_json(checked, by_alias=True, warnings="error")
        # The checks of a type are the application's, and raise what they like.
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
        """See :class:`Encoder`: a service may have its own idea of JSON."""

    def show(self, data: bytes) -> Any:
        """See :class:`Encoder`."""
        return show_json(data)

    def decode(self, data: bytes) -> Any:
        """See :class:`Decoder`."""
        try:
            return self._adapter.validate_json(data)
        except Exception as error:
            raise refuse(error, self._adapter) from None

    def prepare(self, data: bytes) -> None:
        """See :class:`Decoder`: nothing is needed."""

    def load(self) -> None:
        """Nothing is looked up."""


class BytesCodec(JsonCodec):
    """Values that are bytes, whatever they hold."""

    # To name one that says nothing is not asked for (RFC 9110, 8.3), and costs each
    # record a header.
    content_type = ""

    def decode(self, data: bytes) -> bytes:
        """The bytes as they are."""
        return data


def make_encoder(
    topic: str,
    value: Any,
    schema: SchemaSource | None,
    registry: Callable[[], Registry],
    in_kafka: Callable[[str], str],
) -> Encoder:
    """The encoder of a topic's values.

    Args:
        topic: its name, as it is declared.
        value: their type.
        schema: of Avro; None for JSON or bytes.
        registry: finds the schema registry, at the first use.
        in_kafka: gives the topic's name in Kafka, at the first use.

    Raises:
        ConfigurationError: the type has no such form, or the schema cannot be used.
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(value)
    except PydanticUserError as error:
        raise ConfigurationError(
            f"the values of the topic {topic!r} have no JSON form: "
            f"{error.message.splitlines()[0]}"
        ) from None
    if schema is None:
        # Its JSON would have read it, and what became null of it could not be told.
        if reads_once(adapter.core_schema):
            raise ConfigurationError(
                f"the values of the topic {topic!r} hold an iterable or a generator, "
                "which can be read once only: declare a list or a Sequence"
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
    """The decoder of the values that a consumer reads.

    Raises:
        ConfigurationError: the schema cannot be used.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(value)
    if schema is None:
        return (BytesCodec if value is bytes else JsonCodec)(adapter)
    _require_avro(topic)
    from jobs_lib.schemas.avro import AvroDecoder, load_schema

    reader = None if schema == REGISTERED else load_schema(schema, topic)
    return AvroDecoder(adapter, reader, registry)


def show_json(data: bytes) -> Any:
    """What bytes hold as JSON; those that are none stay as they are."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data


def refuse(error: Exception, adapter: TypeAdapter[Any]) -> ValueError:
    """What pydantic says of a value, without the value."""
    return ValueError(explain_refusal(error, adapter.core_schema))


def _require_avro(topic: str) -> None:
    try:
        importlib.import_module("jobs_lib.schemas.registry")
    except ImportError as error:
        raise ConfigurationError(
            f"the topic {topic!r} has an Avro schema, and {error.name or error} is not "
            "installed: pip install 'jobs-lib[avro]'"
        ) from None
