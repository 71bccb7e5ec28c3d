"""The schema registry, by Confluent's HTTP API. Every call has a time limit."""

from __future__ import annotations

import contextlib
import threading
from functools import cache
from typing import TYPE_CHECKING

from confluent_kafka.schema_registry import (
    Schema,
    SchemaRegistryClient,
    SchemaRegistryError,
)

from jobs_lib.errors import ConfigurationError, UnavailableError
from jobs_lib.masking import masked_url
from jobs_lib.schemas.avro import AvroSchema, parse_schema
from jobs_lib.settings import require_schema_registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.settings import Settings

_MOCK = "mock://"
_MISSING = 404
_NOT_FOUND = {0, *range(40400, 40500)}
"""The codes of a registry that does not have what is asked for; Apicurio's is 0 where
Confluent has none. Any other 404 is that of a proxy while the registry is away, or of a
wrong URL."""
_DENIED = {401, 403}
_ANSWERS_LATER = {_MISSING, 408, 429}
_DEFAULTS: dict[str, str | float | bool] = {
    # Seconds for a request; without it the client waits for ever.
    "timeout": 5.0,
    # Callers that can wait ask again themselves.
    "max.retries": 0,
}


class Registry:
    """Asks the registry that the settings name; for any thread.

    If the URL starts with ``mock://`` there is no server: the schemas are kept in this
    process, and each declared schema counts as registered.

    Raises:
        ConfigurationError: no registry is set, or its client does not know a setting.
    """

    def __init__(self, settings: Settings) -> None:
        url = require_schema_registry(settings)
        self._address = ", ".join(masked_url(one.strip()) for one in url.split(","))
        self._is_mock = url.startswith(_MOCK)
        self._schemas: dict[int, AvroSchema] = {}
        self._settings = {**_DEFAULTS, **settings.schema_registry, "url": url}
        self._making = threading.Lock()
        self._client: SchemaRegistryClient | None = None
        try:
            self._open()
        except (ValueError, TypeError, OSError):
            # The client's text may repeat a value, so name only the keys.
            given = ", ".join(sorted(settings.schema_registry)) or "none"
            raise ConfigurationError(
                f"the client of the schema registry at {self._address} refuses its "
                "settings; those given in JOBS_LIB_SCHEMA_REGISTRY are: "
                f"{given}. Is one of them misspelt, or a file missing?"
            ) from None

    def close(self) -> None:
        """Close the connection; the next request opens one."""
        with self._making:
            client, self._client = self._client, None
        if client is not None and not self._is_mock:
            with client:
                pass  # leaving the block closes it

    def find_id(self, subject: str, schema: AvroSchema) -> int:
        """Find the id of a registered schema.

        Raises:
            ConfigurationError: it is not registered.
            UnavailableError: the registry does not answer.
        """
        if self._is_mock:
            return self.register(subject, schema)
        try:
            with self._asking() as client:
                found = client.lookup_schema(
                    subject, _as_registered(schema), normalize_schemas=True
                )
        except LookupError:
            raise ConfigurationError(
                f"the registry at {self._address} has no such schema of the subject "
                f"{subject!r}: register it when you deploy, by "
                "`jobs-lib schemas register`"
            ) from None
        return int(found.schema_id or 0)

    def read_schema(self, schema_id: int) -> AvroSchema:
        """Read the schema of an id, and keep it: ids never change.

        Raises:
            ValueError: there is none, or it is no Avro.
            UnavailableError: the registry does not answer.
            ConfigurationError: the registry refuses.
        """
        known = self._schemas.get(schema_id)
        if known is None:
            try:
                with self._asking() as client:
                    found = client.get_schema(schema_id)
            except LookupError:
                raise ValueError(
                    f"the registry at {self._address} knows no schema {schema_id}"
                ) from None
            known = self._schemas[schema_id] = self._parse(found)
        return known

    def read_versions(self, subject: str) -> dict[int, AvroSchema]:
        """Read all versions of a subject, by number; empty if there is none.

        Raises:
            ValueError: a version is no Avro.
            UnavailableError: the registry does not answer.
            ConfigurationError: the registry refuses.
        """
        try:
            with self._asking() as client:
                numbers = sorted(client.get_versions(subject))
        except LookupError:
            return {}
        return {n: self._read_version(subject, n) for n in numbers}

    def read_level(self, subject: str | None) -> str | None:
        """Read the compatibility level of a subject; None if none is set.

        Args:
            subject: None for the default of all subjects.
        """
        if self._is_mock:  # it keeps no levels
            return None
        try:
            with self._asking() as client:
                return client.get_compatibility(subject)
        except LookupError:
            return None

    def set_level(self, subject: str, level: str) -> None:
        """Set the compatibility level of a subject."""
        if not self._is_mock:
            with self._asking() as client:
                client.set_compatibility(subject, level)

    def register(self, subject: str, schema: AvroSchema) -> int:
        """Register a schema, unless it is registered already; returns its id.

        Raises:
            ConfigurationError: the registry refuses it.
            UnavailableError: the registry does not answer.
        """
        with self._asking() as client:
            return client.register_schema(
                subject, _as_registered(schema), normalize_schemas=True
            )

    def _parse(self, schema: Schema | None) -> AvroSchema:
        if schema is None or schema.schema_type not in (None, "AVRO"):
            kind = "nothing" if schema is None else schema.schema_type
            raise ValueError(f"the registry holds {kind} there, not an Avro schema")
        named: dict[str, object] = {}
        for reference in schema.references or ():
            subject, version = str(reference.subject), int(reference.version or 0)
            named |= self._read_version(subject, version).named
        return parse_schema(schema.schema_str or "", named)

    def _read_version(self, subject: str, version: int) -> AvroSchema:
        try:
            with self._asking() as client:
                found = client.get_version(subject, version)
        except LookupError:
            raise ValueError(f"{subject!r} has no version {version} any more") from None
        return self._parse(found.schema)

    def _open(self) -> SchemaRegistryClient:
        with self._making:
            if self._client is None:
                if self._is_mock:
                    self._client = _make_mock(str(self._settings["url"]))
                else:
                    self._client = SchemaRegistryClient(self._settings)
            return self._client

    @contextlib.contextmanager
    def _asking(self) -> Iterator[SchemaRegistryClient]:
        """Yield the client, and turn its errors into ours; LookupError if not found."""
        try:
            yield self._open()
        except SchemaRegistryError as error:
            status = error.http_status_code
            if status == _MISSING and error.error_code in _NOT_FOUND:
                raise LookupError(str(error)) from None
            if status in _DENIED:
                raise ConfigurationError(
                    f"the schema registry at {self._address} does not let us in (HTTP "
                    f"{status}): is `basic.auth.user.info` in JOBS_LIB_SCHEMA_REGISTRY "
                    "right?"
                ) from None
            if status in _ANSWERS_LATER or status >= 500:
                raise self._unavailable(f"HTTP {status}") from None
            raise ConfigurationError(
                f"the schema registry at {self._address} refuses that: "
                f"{error.error_message} (HTTP {status})"
            ) from None
        # Errors of its HTTP client, whichever that is: none of them is an answer.
        except Exception as error:
            raise self._unavailable(type(error).__name__) from error

    def _unavailable(self, reason: str) -> UnavailableError:
        away = UnavailableError(
            f"the schema registry at {self._address} does not answer ({reason}): is it "
            "running, and is JOBS_LIB_SCHEMA_REGISTRY_URL right?"
        )
        away.is_passing = True
        return away


def _as_registered(schema: AvroSchema) -> Schema:
    return Schema(schema.text, "AVRO")


@cache
def _make_mock(url: str) -> SchemaRegistryClient:
    """Make one for each URL, so that readers find what was written."""
    return SchemaRegistryClient.new_client({"url": url})
