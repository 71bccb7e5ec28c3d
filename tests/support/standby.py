"""A primary, its standby, and an address that leads to the one in use."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib.devstack import PostgresServer
from jobs_lib.devstack.process import as_account
from jobs_lib.postgres.migrate import migrate
from jobs_lib.settings import load_settings
from jobs_lib.testing.databases import embedded_server
from tests.support.proxy import Proxy
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self


class Standby(PostgresServer):
    """A streaming copy of another server, in a folder of that server."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__(primary.folder / "standby", durable=False)
        self._primary = primary

    def _prepare(self, port: int) -> None:
        subprocess.run(
            [
                *(self._binary("pg_basebackup"), "-D", str(self.data), "--no-sync"),
                *("-d", self._primary.url_of("postgres"), "--checkpoint=fast"),
                # The standby then knows which server to follow.
                "--write-recovery-conf",
            ],
            check=True,
            cwd="/",
            env=self._environment(),
            **as_account(self._account()),
        )

    @property
    def _password_file(self) -> Path:
        return self._primary._password_file

    def _reports_ready(self) -> bool:
        return "".join(self._lock_file()[7:8]).strip() in ("standby", "ready")

    def _settle(self) -> None:
        """The standby has the primary's databases."""


class Pair:
    """A primary and an asynchronous standby; `url` leads to the one in use.

    Call `cut_replication()` and then `fail_over()`. All that was committed between the
    two is lost, and all connections are cut.
    """

    def __init__(self) -> None:
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        with self._opened:
            self.primary = self._opened.enter_context(embedded_server())
            migrate(self.primary.url, "jobs_lib", load_settings())
            self.standby = self._opened.enter_context(Standby(self.primary))
            self.proxy = self._opened.enter_context(Proxy.before(self.primary.url))
            self._opened = self._opened.pop_all()
        self.url = self.proxy.url(self.primary.url)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.close()

    def ask(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a query on the server in use, in a session of its own."""
        return _ask(self.url, query, *values)

    def cut_replication(self) -> None:
        """Replicate nothing more; the standby has all that was written before."""
        ((end,),) = _ask(self.primary.url, "select pg_current_wal_lsn()::text")
        caught_up = "select pg_last_wal_replay_lsn() >= %s::pg_lsn"
        wait_for(
            lambda: _ask(self.standby.url, caught_up, end) == [(True,)],
            timeout=60,
            what="the standby has all",
        )
        _ask(self.standby.url, "alter system set primary_conninfo = ''")
        _ask(self.standby.url, "select pg_reload_conf()")
        wait_for(
            lambda: not _ask(self.primary.url, "select from pg_stat_replication"),
            timeout=60,
            what="the standby is cut off",
        )

    def fail_over(self, query: str = "select") -> list[tuple[Any, ...]]:
        """Kill the primary, and lead the address to the standby.

        Returns the rows of a query that the standby gets before all others.
        """
        self.primary.process.kill()
        return self.promote(query)

    def promote(self, query: str = "select") -> list[tuple[Any, ...]]:
        """Lead the address to the standby, in any state of the primary.

        Returns the rows of a query that the standby gets before all others.
        """
        assert _ask(self.standby.url, "select pg_promote(true, 60)") == [(True,)]
        found = _ask(self.standby.url, query)
        self.proxy.turn(self.standby.url)
        return found


def _ask(url: str, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(query, values)
        return cursor.fetchall() if cursor.description else []
