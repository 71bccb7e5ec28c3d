"""A topic that a service publishes to, through the outbox."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Generic, overload

from typing_extensions import TypeVar

from jobs_lib.callers import Fetch, Statements, perform
from jobs_lib.errors import ConfigurationError, PayloadError
from jobs_lib.naming import check_environment, name_in_kafka
from jobs_lib.partitioner import choose_shard
from jobs_lib.schemas.codec import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from jobs_lib.callers import AsyncCaller, Caller, Steps
    from jobs_lib.db import Queries
    from jobs_lib.outbox.entity import Entity
    from jobs_lib.schemas.codec import Encoder
    from jobs_lib.settings import Settings

V = TypeVar("V", default=Any)
_CONTENT_TYPE = "content-type"
_TOMBSTONES = "delete.retention.ms"
_TWO_DAYS_MS = 172_800_000


class Topic(Generic[V]):
    """A declared topic; made by ``app.topic``."""

    def __init__(
        self,
        name: str,
        *,
        encoder: Encoder,
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
        self._declared = name
        self._name: str | None = None
        self.compacted = compacted
        self.partitions = partitions
        self.config = _make_config(name, config, compacted=compacted)
        """How the topic is set in Kafka."""
        self.merge = merge
        """Whether of several rows of a key that leave together the last one will do."""
        self.settle = settle
        """Seconds that a key's changes are collected before they leave."""
        self.encoder = encoder
        """Makes the bytes of the values."""
        self._entities = entities
        self._settings = settings
        self._hint = hint
        self._statements = Statements(queries)
        self._shards: int | None = None

    @property
    def name(self) -> str:
        """Its name in Kafka: what was declared, as the environment has it."""
        if self._name is None:
            self._name = name_in_kafka(self._settings(), self._declared)
        return self._name

    @property
    def sources(self) -> list[str]:
        """The tables of the entities whose states it holds."""
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
            conn: a psycopg or SQLAlchemy connection or session, as for ``enqueue``;
                with an asynchronous one the id is what ``await`` gives.
            key: the entity's stable key; None only where the topic is not compacted.
            value: the whole current state, of the type that the topic declares.
            version: grows with every change of the key's state.
            headers: more headers for the record.

        Raises:
            NoTransactionError: the caller's change would not commit with it.
            PayloadError: key or value cannot be stored.
            UnavailableError: the id of the topic's schema is not known yet, and the
                registry does not answer; ``app.load_schemas()`` asks in advance.
        """
        self._check_key(key)
        encoded = self.encode(value)
        if self.encoder.labels_rows:
            headers = {_CONTENT_TYPE: self.encoder.content_type, **(headers or {})}
        return perform(conn, self._write(key, encoded, version, headers))

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
        """Write that the entity is gone: its key with a null value."""
        self._check_key(key)
        return perform(conn, self._write(key, None, version, None))

    @overload
    def send_current(self, conn: Caller, *, key: str) -> int: ...

    @overload
    def send_current(
        self, conn: AsyncCaller, *, key: str
    ) -> Coroutine[Any, Any, int]: ...

    def send_current(
        self, conn: Caller | AsyncCaller, *, key: str
    ) -> int | Coroutine[Any, Any, int]:
        """Write that an entity has changed; returns the row's id.

        Its state is read when the record leaves, by the function that ``app.entity``
        declares for this topic; an entity that is gone by then becomes a tombstone.

        Raises:
            ConfigurationError: no entity of this topic is declared.
            NoTransactionError: the caller's change would not commit with it.
            PayloadError: the key cannot be stored.
        """
        self._check_key(key)
        for entity in self._entities.values():
            if entity.topic is self:
                return perform(conn, self._write(key, None, None, None, entity.name))
        raise ConfigurationError(
            f"no entity of the topic {self.name!r} is declared, so nobody could read "
            "its state: declare it with @app.entity, or send the value itself"
        )

    def encode(self, value: V) -> bytes:
        """The value as the record holds it: ``bytes`` as they are, else JSON, or Avro
        where the topic has a schema.

        Raises:
            PayloadError: it is not of the type that the topic declares, or does not fit
                the schema.
        """
        try:
            return self.encoder.encode(value)
        except ValueError as error:
            raise PayloadError(
                f"a value does not fit the topic {self.name!r}: {explain(error)}"
            ) from None

    def _write(
        self,
        key: str | None,
        value: bytes | None,
        version: int | None,
        headers: Mapping[str, str] | None,
        entity: str | None = None,
    ) -> Steps[int]:
        if self._shards is None:
            rows = yield Fetch(self._statements["known_shards"], {})
            shards, environment = rows[0]
            check_environment(self._settings(), environment)
            self._shards = int(shards)
        query = "write_outbox" if key is not None else "write_outbox_keyless"
        shard = str(choose_shard(self.name, key, self._shards))
        parameters = {
            "shard": shard,
            "topic": self.name,
            "value": value,
            "version": None if version is None else str(version),
            "headers": json.dumps(dict(headers)) if headers else None,
            "hint": self._hint(shard),
        }
        if key is not None:
            parameters |= {"key": key, "entity": entity}
        rows = yield Fetch(self._statements[query], parameters)
        return int(rows[0][0])

    def _check_key(self, key: str | None) -> None:
        if key is None:
            if self.compacted:
                raise PayloadError(
                    f"the topic {self.name!r} is compacted, so every record needs a key"
                )
            return
        if not isinstance(key, str) or not key or "\0" in key or not _encodes(key):
            raise PayloadError(
                f"a key of the topic {self.name!r} must be a string of UTF-8 without "
                f"NUL and not empty, not {key!r}"
            )


def _make_config(
    name: str, given: Mapping[str, str], *, compacted: bool
) -> dict[str, str]:
    config = {"compression.type": "lz4", "cleanup.policy": "delete"}
    if compacted:
        config |= {"cleanup.policy": "compact", _TOMBSTONES: str(_TWO_DAYS_MS)}
    config |= {key: str(value) for key, value in given.items()}
    kept = config.get(_TOMBSTONES)
    if kept is not None and not (kept.isdecimal() and int(kept) >= _TWO_DAYS_MS):
        raise ConfigurationError(
            f"the topic {name!r} would keep tombstones for {_TOMBSTONES}={kept}: a "
            "consumer that is down for longer never hears what was deleted. Give "
            f"{_TWO_DAYS_MS} (two days) or more"
        )
    return config


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
