"""Avro values in the wire format of Confluent: 0, the schema's id, the value.

fastavro writes and reads the values. Python types without an Avro form are first
brought into their JSON form, so that one declared type serves both.
"""

from __future__ import annotations

import json
import re
import struct
import warnings
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import fastavro
from fastavro.read import SchemaResolutionError
from fastavro.validation import ValidationError, ValidationErrorData, validate
from pydantic import PydanticUserError
from pydantic_core import to_jsonable_python

from jobs_lib.errors import ConfigurationError
from jobs_lib.reasons import explain
from jobs_lib.schemas.avro_limits import LimitError, check_limits, find_threshold
from jobs_lib.schemas.codec import refuse
from jobs_lib.schemas.flat import make_chooser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pydantic import TypeAdapter

    from jobs_lib.schemas.codec import SchemaSource
    from jobs_lib.schemas.registry import Registry

_PREFIX = struct.Struct(">bI")
_MAGIC = 0
# The beginnings of fastavro's texts that contain only names from the schema.
_OF_SCHEMA = (
    "record contains more fields than the schema specifies",
    "no value and no default for",
    "No default value for field",
    "Schema mismatch",
    "schema mismatch",
    "Scale provided in schema",
    "The decimal precision is bigger",
    "data of length",
)
_LONGEST = 300
_ON_FIELD = re.compile(r" on field (\w+)$")
_TELLING: Mapping[type[Exception], str] = {
    SchemaResolutionError: "the declared schema has no symbol or type for it",
    EOFError: "it ends too early",
    UnicodeDecodeError: "a text in it is not UTF-8",
    ValueError: "a value in it does not have the form that its field needs",
    OverflowError: "a number in it is too large for its field",
}
_AS_THEY_ARE = (str, int, float, bytes, Decimal, date, time, type(None))


@dataclass(frozen=True, slots=True)
class AvroSchema:
    """A schema: as text for the registry, and in parsed form."""

    text: str
    parsed: Any
    named: Mapping[str, Any]
    """Its records, enums and fixed types, by full name."""
    threshold: int | None
    """See :func:`jobs_lib.schemas.avro_limits.find_threshold`."""


def parse_schema(text: str, named: Mapping[str, Any] | None = None) -> AvroSchema:
    """Parse a schema given as JSON.

    Args:
        text: the contents of an .avsc file.
        named: schemas that it refers to by full name.

    Raises:
        ValueError: it is no schema; the message says why.
    """
    found = dict(named or {})
    try:
        parsed = fastavro.parse_schema(json.loads(text), named_schemas=found)
        threshold = find_threshold(parsed, found)
    # fastavro may raise any error of Python.
    except Exception as error:
        raise ValueError(explain(error)) from None
    return AvroSchema(text, parsed, found, threshold)


def load_schema(source: SchemaSource, topic: str) -> AvroSchema:
    """Load the schema of a declaration.

    Raises:
        ConfigurationError: the file is missing, or holds no Avro schema.
    """
    if isinstance(source, str):
        raise ConfigurationError(
            f"the schema of the topic {topic!r} is the text {source[:40]!r}: give the "
            "path of its .avsc file as a pathlib.Path, or the schema as a dict"
        )
    try:
        if isinstance(source, Path):
            return parse_schema(source.read_text(encoding="utf-8"))
        return parse_schema(json.dumps(source))
    except OSError as error:
        raise ConfigurationError(
            f"the schema of the topic {topic!r} cannot be read: {error}. A relative "
            "path depends on the working folder: Path(__file__).with_name(…) does not"
        ) from None
    except (TypeError, ValueError) as error:
        place = f" ({source})" if isinstance(source, Path) else ""
        raise ConfigurationError(
            f"the schema of the topic {topic!r}{place} is no Avro schema: {error}"
        ) from None


class AvroEncoder:
    """Writes a topic's values with the schema that it declares."""

    content_type = "application/avro"
    labels_rows = True

    def __init__(
        self,
        adapter: TypeAdapter[Any],
        topic: Callable[[], str],
        schema: AvroSchema,
        registry: Callable[[], Registry],
    ) -> None:
        self._topic = topic
        self.schema = schema
        self._adapter = adapter
        self._registry = registry
        self._prefix: bytes | None = None

    @cached_property
    def _choose_warnings(self) -> Callable[[Any], Literal["error", False]]:
        # Not at the declaration: the type may name one that is defined later.
        return make_chooser(self._adapter.core_schema)

    @property
    def subject(self) -> str:
        """The subject under which the registry keeps the topic's schemas."""
        return f"{self._topic()}-value"

    def load(self) -> None:
        """Look up the schema's id, once.

        Raises:
            ConfigurationError: it is not registered, or no registry is set.
            UnavailableError: the registry does not answer.
        """
        if self._prefix is None:
            found = self._registry().find_id(self.subject, self.schema)
            self._prefix = _PREFIX.pack(_MAGIC, found)

    def forget(self) -> None:
        """See :class:`jobs_lib.schemas.codec.Encoder`."""
        self._prefix = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy for another process; it asks no registry."""
        self.load()
        parts = self._adapter, self._topic(), self.schema, self._prefix
        return _copy_encoder, parts

    def encode(self, value: Any) -> bytes:
        """Encode a value in the wire format."""
        self.load()
        try:
            checked = self._adapter.validate_python(value)
            strict = self._choose_warnings(checked)
            datum = to_datum(
                self._adapter.dump_python(checked, by_alias=True, warnings=strict)
            )
        # The application's own validators may raise anything.
        except Exception as error:
            raise refuse(error, self._adapter) from None
        output = BytesIO(self._prefix or b"")
        output.seek(_PREFIX.size)
        try:
            # The writer alone would accept numbers that are too large, and true for 1.
            validate(datum, self.schema.parsed)
            # Strict: fields that the schema lacks would be left out silently.
            fastavro.schemaless_writer(
                output, self.schema.parsed, datum, strict_allow_default=True
            )
            # Refuse here what no consumer could read.
            _check(output.getvalue(), self.schema)
        except Exception as error:
            raise ValueError(_explain_datum(error)) from None
        return output.getvalue()

    def check(self, data: bytes) -> None:
        """See :class:`jobs_lib.schemas.codec.Encoder`."""
        read_id(data)

    def show(self, data: bytes) -> Any:
        """Decode the bytes with the topic's own schema."""
        return _read(data, self.schema, None)[0]


def _copy_encoder(
    adapter: TypeAdapter[Any], topic: str, schema: AvroSchema, prefix: bytes
) -> AvroEncoder:
    def find_registry() -> Registry:
        raise ConfigurationError(
            f"the encoder of the topic {topic!r} is a copy and knows no registry: "
            "load the schemas where it was made"
        )

    copy = AvroEncoder(adapter, lambda: topic, schema, find_registry)
    copy._prefix = prefix
    return copy


class AvroDecoder:
    """Reads values with the schema that they were written with.

    Args:
        adapter: the adapter of the type that the consumer declares.
        schema: the schema to convert them to; None to leave them as they were written.
        registry: knows the schemas that records name by id.
    """

    asks = True

    def __init__(
        self,
        adapter: TypeAdapter[Any],
        schema: AvroSchema | None,
        registry: Callable[[], Registry],
    ) -> None:
        self._adapter = adapter
        self._reader = schema
        self._registry = registry

    def load(self) -> None:
        """See :class:`~jobs_lib.schemas.codec.Decoder`."""
        self._registry()

    def prepare(self, data: bytes) -> None:
        """Fetch the schema that the bytes name."""
        self._registry().read_schema(read_id(data))

    def decode(self, data: bytes) -> Any:
        """See :class:`~jobs_lib.schemas.codec.Decoder`."""
        datum = self._read_datum(data, self._reader)
        try:
            return self._adapter.validate_python(datum)
        except Exception as error:
            raise refuse(error, self._adapter) from None

    def read_field(self, data: bytes, name: str) -> Any:
        """See :class:`~jobs_lib.schemas.codec.Decoder`."""
        datum = self._read_datum(data, None)
        return datum.get(name) if isinstance(datum, dict) else None

    def _read_datum(self, data: bytes, reader: AvroSchema | None) -> Any:
        schema_id = read_id(data)
        writer = self._registry().read_schema(schema_id)
        try:
            datum, rest = _read(data, writer, reader)
        # Other bytes may make fastavro raise any error.
        except Exception as error:
            raise ValueError(
                f"it does not hold the Avro schema {schema_id}: {_explain_datum(error)}"
            ) from None
        if rest:
            raise ValueError(
                f"{rest} bytes follow the value of the Avro schema {schema_id}"
            )
        return datum


def check_fields(adapter: TypeAdapter[Any], schema: AvroSchema, topic: str) -> None:
    """Refuse a type if the schema would refuse its every value, as far as is known."""
    try:
        with warnings.catch_warnings():
            # They are about defaults without a JSON form, which do not matter here.
            warnings.simplefilter("ignore")
            described = adapter.json_schema(mode="serialization")
    except PydanticUserError:  # its fields are known only with the first value
        return
    if reference := described.get("$ref"):
        described = described["$defs"][reference.rpartition("/")[2]]
    names = described.get("properties")
    if names is None or not isinstance(schema.parsed, dict):
        return
    fields = {field["name"]: field for field in schema.parsed.get("fields", ())}
    lacking = [f"the schema has no field {name}" for name in names.keys() - fields]
    lacking += [
        f"the type has no field {name}"
        for name, field in fields.items()
        if name not in names and "default" not in field
    ]
    if lacking:
        raise ConfigurationError(
            f"no value of the topic {topic!r} would fit its schema: "
            f"{'; '.join(sorted(lacking))}"
        )


def _read(
    data: bytes, writer: AvroSchema, reader: AvroSchema | None
) -> tuple[Any, int]:
    """Read the value behind the prefix; returns it, and how many bytes are left."""
    _check(data, writer)
    stream = BytesIO(data)
    stream.seek(_PREFIX.size)
    datum = fastavro.schemaless_reader(
        stream, writer.parsed, None if reader is None else reader.parsed
    )
    return datum, len(data) - stream.tell()


def _check(data: bytes, schema: AvroSchema) -> None:
    if schema.threshold is not None and len(data) > schema.threshold:
        check_limits(data, _PREFIX.size, schema.parsed, schema.named)


def _explain_datum(error: Exception) -> str:
    """Give fastavro's reason without the value."""
    if isinstance(error, LimitError):
        return str(error)
    if isinstance(error, ValidationError):
        return _explain_fields(error.errors)
    text = explain(error)
    if text.startswith(_OF_SCHEMA):
        return text[:_LONGEST]
    field = _ON_FIELD.search(text)
    place = f"{field[1]}: " if field else ""
    return f"{place}{_TELLING.get(type(error), type(error).__name__)}"


def _explain_fields(errors: Iterable[ValidationErrorData]) -> str:
    expected: dict[tuple[str, str], list[str]] = {}
    for one in errors:
        given = "null" if one.datum is None else type(one.datum).__name__
        place = (one.field or "the value", given)
        expected.setdefault(place, []).append(_name(one.schema))
    return "; ".join(
        f"{field}, of the type {given}, does not fit {' or '.join(names)}"
        for (field, given), names in expected.items()
    )


def _name(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = schema.get("logicalType") or schema.get("name") or schema.get("type")
    return str(schema)


def read_id(data: bytes) -> int:
    """Read the id of the schema that a value was written with.

    Raises:
        ValueError: the bytes are not in the wire format.
    """
    if len(data) < _PREFIX.size or data[0] != _MAGIC:
        raise ValueError("it does not start with 0 and the id of an Avro schema")
    return int(_PREFIX.unpack_from(data)[1])


def to_datum(value: Any) -> Any:
    """Convert a value to types that Avro's writer knows.

    A datetime without a time zone counts as UTC, wherever the code runs.
    """
    if isinstance(value, Enum):
        return to_datum(value.value)
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    if isinstance(value, _AS_THEY_ARE):
        return value
    if isinstance(value, dict):
        return {to_datum(key): to_datum(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_datum(one) for one in value]
    # Such as a UUID or an address: as in JSON.
    return to_jsonable_python(value)
