"""A topic that a service publishes to, and an entity whose states it holds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, overload

from typing_extensions import TypeVar

from jobs_lib.callers import Fetch, Statements, is_autocommit, perform
from jobs_lib.errors import ConfigurationError, PayloadError
from jobs_lib.kafka.checks import (
    check_headers,
    check_key,
    check_size,
    check_version,
    find_largest,
    make_config,
)
from jobs_lib.naming import check_environment, name_in_kafka
from jobs_lib.outbox.bulk import Row, write_many
from jobs_lib.partitioner import choose_shard
from jobs_lib.reasons import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    import psycopg

    from jobs_lib.callers import Steps
    from jobs_lib.callers.caller import AsyncCaller, Caller
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.schemas.codec import Encoder
    from jobs_lib.settings import Settings

    Loader = Callable[[psycopg.Connection[Any], list[str]], Mapping[str, "V | Gone"]]

V = TypeVar("V", default=Any)
_CONTENT_TYPE = "content-type"


class Topic(Generic[V]):
    """A declared topic; made by ``app.topic``."""

    def __init__(
        self,
        name: str,
        *,
        encoder: Encoder,
        versioned: bool,
        compacted: bool,
        partitions: int,
        config: Mapping[str, str],
        merge: bool,
        settle: float,
        entities: Mapping[str, Entity],
        queries: Callable[[], Queries],
        settings: Callable[[], Settings],
        hint: Callable[[str], str | None],
    ) -> None:
        self.declared = name
        """The name without the environment's template."""
        self.compacted = compacted
        self.partitions = partitions
        self.given = config
        """The settings in Kafka that the app has declared."""
        self.config = make_config(name, config, compacted=compacted)
        """How the topic is set in Kafka."""
        self.merge = merge
        """Whether only the last of a key's rows is sent when several leave together."""
        self.settle = settle
        """Seconds for which a key's changes are collected before they leave."""
        self.encoder = encoder
        """Makes the bytes of the values."""
        self.versioned = versioned
        """Whether the declared type of the values has a ``version``."""
        self._entities = entities
        self._settings = settings
        self._hint = hint
        self._statements = Statements(queries)
        self._shards: int | None = None

    @cached_property
    def name(self) -> str:
        """Its name in Kafka: the declared name, put into the environment's template."""
        return name_in_kafka(self._settings(), self.declared)

    @cached_property
    def largest(self) -> int:
        """Bytes that a record's key and value may have, as far as is known here."""
        return find_largest(self.config, self._settings())

    @property
    def settings(self) -> Settings:
        """The settings of the app, for what reads the topic."""
        return self._settings()

    @property
    def sources(self) -> list[str]:
        """The tables of the entities whose states the topic holds."""
        return [one.source for one in self._entities.values() if one.topic is self]

    @overload
    def send(
        self,
        conn: Caller,
        *,
        key: str | None,
        value: V,
        version: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int: ...

    @overload
    def send(
        self,
        conn: AsyncCaller,
        *,
        key: str | None,
        value: V,
        version: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Coroutine[Any, Any, int]: ...

    def send(
        self,
        conn: Caller | AsyncCaller,
        *,
        key: str | None,
        value: V,
        version: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int | Coroutine[Any, Any, int]:
        """Write a record to the outbox in the transaction of ``conn``; returns its id.

        Records of one key reach the topic in the order in which their transactions
        commit: the key is locked until the transaction ends.

        Args:
            conn: psycopg's, SQLAlchemy's or Django's connection, as for ``enqueue``;
                with an asynchronous one, await the id.
            key: the entity's stable key; None only if the topic is not compacted.
            value: the whole current state, of the type that the topic declares.
            version: grows with every change of the key's state. Defaults to the
                ``version`` of the value, if the topic is compacted and its declared
                type has one.
            headers: more headers for the record.

        Raises:
            NoTransactionError: the caller's change would not commit with it.
            PayloadError: key, value, version or headers cannot be stored, or are larger
                than the topic's messages may be.
            UnavailableError: the id of the topic's schema is not known yet, and the
                registry does not answer; ``app.load_schemas()`` asks in advance.
        """
        check_key(self, key)
        check_headers(self, headers)
        encoded = self.encode(value)
        check_size(self, key, encoded)
        if version is None and self.versioned and self.compacted:
            version = read_version(value)
        check_version(self, version)
        if self.encoder.labels_rows:
            headers = {_CONTENT_TYPE: self.encoder.content_type, **(headers or {})}
        return perform(conn, self._write(key, encoded, version, headers))

    @overload
    def send_many(
        self,
        conn: Caller,
        records: Iterable[tuple[str | None, V, int | None]],
        *,
        headers: Mapping[str, str] | None = None,
    ) -> int: ...

    @overload
    def send_many(
        self,
        conn: AsyncCaller,
        records: Iterable[tuple[str | None, V, int | None]],
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Coroutine[Any, Any, int]: ...

    def send_many(
        self,
        conn: Caller | AsyncCaller,
        records: Iterable[tuple[str | None, V, int | None]],
        *,
        headers: Mapping[str, str] | None = None,
    ) -> int | Coroutine[Any, Any, int]:
        """Write many records at once in the order given; returns how many.

        They are written by COPY if psycopg is the driver, else by inserts of many rows.
        All are checked first, so either all are written or none. Up to 64 keys are
        locked one by one. For more keys their whole shards are locked, and every key of
        those shards waits for this transaction.

        Args:
            conn: as for :meth:`send`.
            records: key, value and version of each, as for :meth:`send`.
            headers: more headers for every record.

        Raises:
            NoTransactionError: the caller's change would not commit with them.
            PayloadError: a key or value cannot be stored.
            UnavailableError: as for :meth:`send`.
        """
        if is_autocommit(conn):
            with conn.transaction() as connection:
                return self.send_many(connection, records, headers=headers)
        check_headers(self, headers)
        rows = []
        for key, value, version in records:
            check_key(self, key)
            encoded = self.encode(value)
            check_size(self, key, encoded)
            if version is None and self.versioned and self.compacted:
                version = read_version(value)
            check_version(self, version)
            rows.append(Row(key, encoded, version))
        if self.encoder.labels_rows:
            headers = {_CONTENT_TYPE: self.encoder.content_type, **(headers or {})}
        return perform(conn, self._write_many(rows, headers))

    @overload
    def tombstone(
        self, conn: Caller, *, key: str, version: int | None = None
    ) -> int: ...

    @overload
    def tombstone(
        self, conn: AsyncCaller, *, key: str, version: int | None = None
    ) -> Coroutine[Any, Any, int]: ...

    def tombstone(
        self, conn: Caller | AsyncCaller, *, key: str, version: int | None = None
    ) -> int | Coroutine[Any, Any, int]:
        """Write that the entity is gone: its key with a null value.

        Args:
            conn: as for :meth:`send`.
            key: the entity's stable key.
            version: greater than that of the last state. An entity that comes back
                needs a greater one still.

        Raises:
            NoTransactionError: the caller's change would not commit with it.
            PayloadError: the key cannot be stored, or the values have a version and
                the tombstone has none, so consumers could not tell which is newer.
        """
        check_key(self, key)
        if version is None and self.versioned:
            raise PayloadError(
                f"the values of the topic {self.name!r} have a version and the "
                "tombstone has none, so consumers could not tell which is newer: give "
                "version=, one more than the last state's"
            )
        check_version(self, version)
        return perform(conn, self._write(key, None, version, None))

    @overload
    def send_current(
        self, conn: Caller, *, key: str, version: int | None = None
    ) -> int: ...

    @overload
    def send_current(
        self, conn: AsyncCaller, *, key: str, version: int | None = None
    ) -> Coroutine[Any, Any, int]: ...

    def send_current(
        self, conn: Caller | AsyncCaller, *, key: str, version: int | None = None
    ) -> int | Coroutine[Any, Any, int]:
        """Write that an entity has changed; returns the row's id.

        The function that ``app.entity`` declares for this topic reads the state when
        the record leaves. If the entity is gone by then, a tombstone is sent.

        Args:
            conn: as for :meth:`send`.
            key: the entity's stable key.
            version: of the tombstone, if the entity is gone by then: give it when you
                delete the entity. A state has its own version.

        Raises:
            ConfigurationError: no entity of this topic is declared.
            NoTransactionError: the caller's change would not commit with it.
            PayloadError: the key or the version cannot be stored.
        """
        check_key(self, key)
        check_version(self, version)
        for entity in self._entities.values():
            if entity.topic is self:
                return perform(conn, self._write_current(key, version, entity.name))
        raise ConfigurationError(
            f"no entity of the topic {self.name!r} is declared, so its state could "
            "not be read: declare it with @app.entity, or send the value itself"
        )

    def encode(self, value: V) -> bytes:
        """Encode the value: ``bytes`` stay as they are, others become JSON, or Avro if
        the topic has a schema.

        Raises:
            PayloadError: the value is not of the type that the topic declares, or does
                not fit the schema.
        """
        try:
            return self.encoder.encode(value)
        except ValueError as error:
            raise PayloadError(
                f"a value does not fit the topic {self.name!r}: {explain(error)}"
            ) from None

    def _write_many(
        self, rows: list[Row], headers: Mapping[str, str] | None
    ) -> Steps[int]:
        shards = self._shards or (yield from self._read_shards())
        return (
            yield from write_many(
                self._statements,
                self.name,
                shards,
                rows,
                json.dumps(dict(headers)) if headers else None,
                notify=self._settings().notify,
            )
        )

    def _read_shards(self) -> Steps[int]:
        rows = yield Fetch(self._statements["known_shards"], {})
        shards, environment = rows[0]
        check_environment(self._settings(), environment)
        self._shards = int(shards)
        return self._shards

    def _write(
        self,
        key: str | None,
        value: bytes | None,
        version: int | None,
        headers: Mapping[str, str] | None,
    ) -> Steps[int]:
        shards = self._shards or (yield from self._read_shards())
        query = "write_outbox" if key is not None else "write_outbox_keyless"
        shard = str(choose_shard(self.name, key, shards))
        parameters = {
            "shard": shard,
            "topic": self.name,
            "value": value,
            "version": None if version is None else str(version),
            "headers": json.dumps(dict(headers)) if headers else None,
            "hint": self._hint(shard),
        }
        if key is not None:
            parameters["key"] = key
        rows = yield Fetch(self._statements[query], parameters)
        return int(rows[0][0])

    def _write_current(self, key: str, version: int | None, entity: str) -> Steps[int]:
        shards = self._shards or (yield from self._read_shards())
        shard = str(choose_shard(self.name, key, shards))
        rows = yield Fetch(
            self._statements["write_current"],
            {
                "shard": shard,
                "topic": self.name,
                "key": key,
                "version": None if version is None else str(version),
                "entity": entity,
                "hint": self._hint(shard),
            },
        )
        return int(rows[0][0])


@dataclass(frozen=True, slots=True)
class Gone:
    """Returned instead of a state: the entity is gone; its tombstone has this version.

    For loaders that still know the version, as from a row that is marked as deleted.
    """

    version: int
    """Greater than that of the last state."""


@dataclass(frozen=True, slots=True)
class Entity:
    """A declaration by ``@app.entity``."""

    name: str
    """Its name in commands and tables."""
    topic: Topic[Any]
    """The compacted topic that holds its states."""
    source: str
    """The service's own table, ``table`` or ``schema.table``."""
    key: str | tuple[str, ...]
    """The column of ``source`` whose text is the record's key, or several: see
    :mod:`jobs_lib.outbox.keys`."""
    load: Loader
    """Current states by key, one query for a list; a key without an entry is gone."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the key."""
        return (self.key,) if isinstance(self.key, str) else self.key

    def load_states(
        self, connection: psycopg.Connection[Any], keys: Sequence[str]
    ) -> Mapping[str, Any]:
        """The state of each key that exists; :class:`Gone` or no entry for others."""
        return self.load(connection, list(keys))


def read_version(state: Any) -> int | None:
    """The version that a state holds, if it holds one."""
    found = (
        state.get("version")
        if isinstance(state, dict)
        else getattr(state, "version", None)
    )
    return found if type(found) is int else None


def has_version(type_: object) -> bool:
    """Whether a declared type has a field ``version``."""
    fields = getattr(type_, "model_fields", None)
    if fields is None:
        classes = getattr(type_, "__mro__", (type_,))
        fields = {
            name for one in classes for name in getattr(one, "__annotations__", ())
        }
    return "version" in fields
