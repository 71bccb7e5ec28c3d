"""The kinds of connections that callers may give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import psycopg
    from sqlalchemy import Connection as SQLAlchemyConnection
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncSession,
        async_scoped_session,
    )
    from sqlalchemy.orm import Session, scoped_session

    Caller: TypeAlias = (
        psycopg.Connection[Any]
        | SQLAlchemyConnection
        | Session
        | scoped_session[Any]
        | "DjangoConnection"
        | "Autocommit"
    )
    AsyncCaller: TypeAlias = (
        psycopg.AsyncConnection[Any]
        | AsyncConnection
        | AsyncSession
        | async_scoped_session[Any]
    )


class Autocommit(Protocol):
    """A caller with nothing else to commit: each statement is its own transaction."""

    def alone(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """Give a connection in autocommit mode."""

    def transaction(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """Give a connection in a transaction that commits at the end."""


class DjangoConnection(Protocol):
    """``django.db.connection``, or one of ``django.db.connections``."""

    in_atomic_block: bool
    vendor: str

    def ensure_connection(self) -> None:
        """Connect, if it is not connected yet."""


def is_autocommit(caller: object) -> TypeGuard[Autocommit]:
    """Whether the caller has nothing else to commit."""
    # Not a `runtime_checkable` protocol: asking that costs 10 µs.
    return hasattr(type(caller), "alone")
