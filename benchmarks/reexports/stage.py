"""A durable PostgreSQL with a table of keys, to re-export again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib import App, reexport
from jobs_lib.outbox.topic import Entity
from jobs_lib.postgres.database import Database
from jobs_lib.postgres.migrate import migrate

if TYPE_CHECKING:
    from benchmarks.server import Server
    from jobs_lib.reexport.run import Begun

STATES = App("benchmark").topic("flight-state")
FLIGHTS = Entity("flights", STATES, "flights", "id", lambda _conn, _keys: {})
RATE = 6_000


class Stage:
    """The server, and its table ``flights`` with keys such as ``EV7-8f14e4…``."""

    def __init__(self, server: Server, keys: int) -> None:
        self.keys = keys
        server.renew()
        migrate(server.url)
        self.database = Database(server.url)
        self.fill(keys)

    def fill(self, keys: int, table: str = "flights") -> None:
        """Make a table of so many keys."""
        with self.database.connect("benchmark") as connection:
            connection.execute(f"create table {table} (id text primary key)")
            connection.execute(
                f"insert into {table} select 'EV' || n || '-' || md5(n::text)"
                " from generate_series(1, %s) n",
                [keys],
            )
            connection.execute(f"vacuum analyze {table}")

    def begin(self, chunk: int = 100) -> Begun:
        """Begin a re-export with empty tables of jobs and re-exports."""
        self.clear()
        return reexport.begin(self.database, FLIGHTS, rate=RATE, chunk=chunk)

    def clear(self) -> None:
        """Forget all jobs and re-exports, so that each round has the same tables."""
        with self.database.connect("benchmark") as connection:
            connection.execute(
                "truncate jobs_lib.jobs, jobs_lib.reexports, jobs_lib.reexport_ranges"
                " cascade"
            )
            connection.execute("checkpoint")
