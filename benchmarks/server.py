"""The one PostgreSQL server on which all are measured, with durable commits."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from jobs_lib.devstack import PostgresServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

OPTIONS: Mapping[str, str] = {
    "shared_buffers": "1GB",
    "fsync": "on",
    "synchronous_commit": "on",
    "max_wal_size": "8GB",
    "jit": "off",
    "autovacuum_naptime": "10s",
    "checkpoint_timeout": "15min",
}
DATABASE = "bench"


class Server:
    """A temporary server; its database ``bench`` is made anew for every piece."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._server = PostgresServer.ephemeral(
            durable=True, options={**OPTIONS, **(options or {})}
        )
        self._kept: set[str] = set()

    def __enter__(self) -> Server:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    @property
    def pid(self) -> int:
        """The pid of the first process, the parent of all others."""
        return self._server.pid

    @property
    def url(self) -> str:
        """The URL of the database ``bench``."""
        return self._server.url_of(DATABASE)

    @property
    def version(self) -> str:
        """The version, such as 18.6."""
        return str(self.ask("show server_version", database="postgres")).split()[0]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead a program to the database, without our settings."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PG", "JOBS_LIB_"))
        }
        parts = urlsplit(self.url)
        return {
            **inherited,
            "PGHOST": str(parts.hostname),
            "PGPORT": str(parts.port),
            "PGUSER": str(parts.username),
            "PGPASSWORD": str(parts.password),
            "PGDATABASE": DATABASE,
        }

    @property
    def log(self) -> Path:
        """The server's log, written for people."""
        return self._server.log_file

    @contextlib.contextmanager
    def connect(
        self, database: str = DATABASE
    ) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """A connection in autocommit mode."""
        url = self._server.url_of(database)
        with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
            yield connection

    def ask(self, query: str, *, database: str = DATABASE) -> Any:
        """The first column of the first row."""
        with self.connect(database) as connection:
            row = connection.execute(query.encode()).fetchone()
            return row[0] if row else None

    def renew(self) -> None:
        """Make the database anew and empty."""
        self._create(DATABASE, "template1")

    def add(self, name: str) -> str:
        """Make another empty database; return its URL."""
        self._create(name, "template1")
        return self._server.url_of(name)

    def keep(self, name: str) -> None:
        """Keep a settled copy of the current database, for `restore`."""
        self.settle()
        self._create(name, DATABASE)
        self._kept.add(name)

    def keeps(self, name: str) -> bool:
        """Whether there is a copy of this name."""
        return name in self._kept

    def restore(self, name: str) -> None:
        """Make the database anew from a copy."""
        self._create(DATABASE, name)
        with self.connect() as connection:
            connection.execute("checkpoint")

    def forget(self) -> None:
        """Remove all copies, since they fill the disk."""
        with self.connect("postgres") as connection:
            for name in self._kept:
                _drop(connection, name)
        self._kept.clear()

    def settle(self) -> None:
        """Finish remaining work, so that the next piece does not pay for it."""
        with self.connect() as connection:
            connection.execute("vacuum analyze")
            connection.execute("checkpoint")

    def dead_tuples(self) -> int:
        """Count the row versions that updates and deletes have left behind so far."""
        return int(
            self.ask(
                "select coalesce(sum(n_tup_upd + n_tup_del), 0)::bigint"
                " from pg_stat_user_tables"
            )
        )

    def _create(self, name: str, template: str) -> None:
        with self.connect("postgres") as connection:
            # A copy needs its source alone, and autovacuum may be connected to it.
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = any (%s)",
                [[name, template]],
            )
            _drop(connection, name)
            connection.execute(
                sql.SQL("create database {} template {} strategy {}").format(
                    sql.Identifier(name),
                    sql.Identifier(template),
                    # Through the log, a small database is already cached; a large one
                    # would be written twice.
                    sql.SQL("file_copy" if self._is_large(template) else "wal_log"),
                )
            )

    def _is_large(self, name: str) -> bool:
        with self.connect("postgres") as connection:
            row = connection.execute("select pg_database_size(%s)", [name]).fetchone()
            return row is not None and row[0] > 512 * 2**20


def _drop(connection: psycopg.Connection[Any], name: str) -> None:
    connection.execute(
        sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))
    )
