"""Answers from a read model: what they are worth, and how to read one's own writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from jobs_lib.callers import perform
from jobs_lib.consuming.answer_checks import (
    check_given,
    check_timeout,
    check_version,
    write_entity,
)
from jobs_lib.consuming.answer_steps import AnswerSteps
from jobs_lib.consuming.keys import write_key
from jobs_lib.consuming.merging import merge

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from uuid import UUID

    from jobs_lib.callers.caller import AsyncCaller, Caller
    from jobs_lib.consuming.answer_steps import ModelVersion, ValidSince
    from jobs_lib.consuming.merging import EntityState
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.settings import Settings

    Key = str | int | bytes | UUID


class Answers:
    """What a read model answers; made by ``app.answers``.

    Each call takes a connection: of psycopg, SQLAlchemy or Django, plain or async, or
    the app itself. On an async one the result is awaited. No transaction needs to be
    open.
    """

    def __init__(
        self,
        declared: Subscription,
        queries: Callable[[], Queries],
        settings: Callable[[], Settings],
    ) -> None:
        assert declared.model is not None
        self._key_type = declared.model.key_type
        self._key = declared.tables[0].key
        self._steps = AnswerSteps(declared, declared.model, queries, settings)

    @overload
    def valid_since(self, conn: Caller, *, key: Key | None = None) -> ValidSince: ...

    @overload
    def valid_since(
        self, conn: AsyncCaller, *, key: Key | None = None
    ) -> Coroutine[Any, Any, ValidSince]: ...

    def valid_since(
        self, conn: Caller | AsyncCaller, *, key: Key | None = None
    ) -> ValidSince | Coroutine[Any, Any, ValidSince]:
        """Read how far the read model is. Ask before the query whose rows it is for.

        Args:
            conn: the caller's connection, or the app.
            key: asks for the partition of this key alone, as Java's client and this
                library choose it. Defaults to all partitions, of which the one that is
                furthest behind counts.

        Raises:
            AnswerError: the read model has no such key.
        """
        if key is not None:
            write_key(key, self._key_type)
        return perform(conn, self._steps.read_valid_since(key), alone=True)

    @overload
    def wait_for(
        self, conn: Caller, *, key: Key, version: int, timeout: float = 2.0
    ) -> ModelVersion | None: ...

    @overload
    def wait_for(
        self, conn: AsyncCaller, *, key: Key, version: int, timeout: float = 2.0
    ) -> Coroutine[Any, Any, ModelVersion | None]: ...

    def wait_for(
        self,
        conn: Caller | AsyncCaller,
        *,
        key: Key,
        version: int,
        timeout: float = 2.0,
    ) -> ModelVersion | Coroutine[Any, Any, ModelVersion | None] | None:
        """Wait until the read model has a version of a key, or a newer one.

        Give the app in the place of a connection, and none is held while it waits.

        Args:
            conn: the caller's connection, or the app.
            key: of the record.
            version: of the record.
            timeout: seconds; 0 looks once.

        Returns the version that it has, or None if it has none in time.

        Raises:
            AnswerError: an argument cannot be; or the caller's transaction sees no
                change of others, because it is REPEATABLE READ or SERIALIZABLE.
        """
        text = write_key(key, self._key_type)
        check_version(version)
        check_timeout(timeout)
        return perform(conn, self._steps.wait_for(text, version, timeout), alone=True)

    @overload
    def put(
        self,
        conn: Caller,
        *,
        key: Key,
        version: int,
        entity: Mapping[str, Any] | None,
    ) -> bool: ...

    @overload
    def put(
        self,
        conn: AsyncCaller,
        *,
        key: Key,
        version: int,
        entity: Mapping[str, Any] | None,
    ) -> Coroutine[Any, Any, bool]: ...

    def put(
        self,
        conn: Caller | AsyncCaller,
        *,
        key: Key,
        version: int,
        entity: Mapping[str, Any] | None,
    ) -> bool | Coroutine[Any, Any, bool]:
        """Keep an entity that an update has returned, for the answers of all pods.

        It is kept until the read model has its version. An older version never
        replaces a newer one.

        Args:
            conn: the caller's connection, or the app. A transaction lets other calls
                of this key wait for its end.
            key: of the record.
            version: of the record.
            entity: the columns that a row of the read model has, of JSON's types, at
                most 64 KiB as JSON. None: the update has removed the entity.

        Returns whether it is kept: False if an equal or newer version is kept already.

        Raises:
            AnswerError: an argument cannot be stored; nothing was.
        """
        text = write_key(key, self._key_type)
        check_version(version)
        steps = self._steps.put(text, version, write_entity(entity))
        return perform(conn, steps, alone=True)

    @overload
    def newer(
        self, conn: Caller, *, given: Iterable[EntityState] = ()
    ) -> list[EntityState]: ...

    @overload
    def newer(
        self, conn: AsyncCaller, *, given: Iterable[EntityState] = ()
    ) -> Coroutine[Any, Any, list[EntityState]]: ...

    def newer(
        self, conn: Caller | AsyncCaller, *, given: Iterable[EntityState] = ()
    ) -> list[EntityState] | Coroutine[Any, Any, list[EntityState]]:
        """Read the states that the read model does not have yet, one for each key.

        Ask before the query whose rows they are merged with: what the read model
        receives in between is then in both, and never in neither.

        Args:
            conn: the caller's connection, or the app.
            given: more states beside those that were kept, such as one that the client
                has sent along.

        Raises:
            AnswerError: a given state cannot be one of the read model.
        """
        states = check_given(given)
        keys = [write_key(state.key, self._key_type) for state in states]
        return perform(conn, self._steps.read_newer(states, keys), alone=True)

    def merge(
        self,
        rows: Iterable[Mapping[str, Any]],
        newer: Iterable[EntityState],
        *,
        key: str | None = None,
        version: str = "version",
        belongs: Callable[[dict[str, Any]], object] | None = None,
        sort: Callable[[dict[str, Any]], Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Merge the rows of a search with newer states of their keys.

        A state replaces the columns of its row unless the row has an equal or newer
        version. The row of an entity that is gone goes. It asks nobody.

        Args:
            rows: mappings with the key, each key once; with the version as well, or
                every state counts as newer.
            newer: what :meth:`newer` has returned before the rows were read.
            key: the name of the key in the rows. Defaults to the column of the read
                model.
            version: the name of the version in the rows.
            belongs: tells whether a row is part of the result. It is asked for rows
                that a state has changed, and for states that have no row, which come
                at the end. Without it no row is added.
            sort: makes the key by which the result is sorted.

        Returns the rows as new dictionaries.

        Raises:
            AnswerError: a row is no mapping, or has no key.
        """
        return merge(
            rows,
            newer,
            key=key or self._key,
            version=version,
            belongs=belongs,
            sort=sort,
        )
