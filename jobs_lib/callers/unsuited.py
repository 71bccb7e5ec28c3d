"""Refuse objects given by mistake instead of a connection; say what to give instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.errors import NoTransactionError

if TYPE_CHECKING:
    from typing import Never

_GIVE = (
    "give a psycopg Connection or AsyncConnection, an SQLAlchemy Connection or "
    "Session, sync or async, or Django's connection, on PostgreSQL"
)
_OPENS = "it opens connections and has no transaction of its own: write "
_INSTEAD = {
    "sqlalchemy.engine.base.Engine": _OPENS + "`with engine.begin() as connection:`",
    "sqlalchemy.ext.asyncio.engine.AsyncEngine": _OPENS
    + "`async with engine.begin() as connection:`",
    "sqlalchemy.orm.session.sessionmaker": _OPENS + "`with maker.begin() as session:`",
    "sqlalchemy.ext.asyncio.session.async_sessionmaker": _OPENS
    + "`async with maker.begin() as session:`",
    "psycopg_pool.pool.ConnectionPool": _OPENS
    + "`with pool.connection() as connection:`",
    "psycopg_pool.pool_async.AsyncConnectionPool": _OPENS
    + "`async with pool.connection() as connection:`",
    "psycopg.Cursor": "give its connection, `cursor.connection`",
    "psycopg.AsyncCursor": "give its connection, `cursor.connection`",
    "django.db.utils.ConnectionHandler": 'give one of them: `connections["default"]`',
}
"""By the class's name, so that none of them is imported only for a message."""


def refuse(caller: object) -> Never:
    """Refuse an object that cannot run statements; the text says what to give instead.

    Raises:
        NoTransactionError: always.
    """
    kinds = [f"{k.__module__}.{k.__qualname__}" for k in type(caller).__mro__]
    instead = next((_INSTEAD[kind] for kind in kinds if kind in _INSTEAD), _GIVE)
    raise NoTransactionError(f"cannot write on a {kinds[0]}: {instead}")


def refuse_server(name: str) -> Never:
    """Refuse a connection to another database system.

    Raises:
        NoTransactionError: always.
    """
    raise NoTransactionError(f"cannot write on {name}: {_GIVE}")
