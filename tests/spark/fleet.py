"""A service whose table is re-exported by the command, on a cluster or without one."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.reexport.helpers import make_table, query
from tests.support.spark_cluster import SETTINGS
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib.postgres.database import Database
    from tests.support import Worker

KEYS = [f"N{n:05}" for n in range(4_000)]
RANGES = 40
ROOT = Path(__file__).parents[2]
_MODULE = """
from jobs_lib import App
from tests.reexport.helpers import make_entity

app = App("fleet")
app.entities["aircraft"] = make_entity()
"""
_IMPATIENT = """
from jobs_lib.cli.main import main
from spark_bridge import engine, workers

check = engine.check_session

def check_then_hurry(*args):
    check(*args)  # the executors take their time to come
    workers.PATIENCE = 5.0

engine.check_session = check_then_hurry
main()
"""
SLOW = """
create function slow() returns trigger language plpgsql as $$ begin
    perform pg_sleep(0.25);
    if new.range = 39 then perform pg_advisory_xact_lock_shared(1); end if;
    return new;
end $$;
create trigger slow before update on jobs_lib.reexport_ranges
for each row execute function slow();
"""
"""Makes a range take a quarter of a second, and the 39th wait for a lock, too."""


def spark_options(master: str, packages: str = str(ROOT)) -> list[str]:
    """The options of `reexport start` for a cluster that tries tasks twice at once."""
    settings = {**SETTINGS, "spark.speculation": "true"}
    if packages:
        settings["spark.executorEnv.PYTHONPATH"] = packages
    conf = [f"--conf={name}={value}" for name, value in settings.items()]
    return ["--master", master, *conf]


class Fleet:
    """A table of aircraft, and the command that re-exports it."""

    def __init__(
        self, database: Database, run: Callable[..., Worker], folder: Path
    ) -> None:
        make_table(database, KEYS)
        self.database = database
        self._run = run
        self._folder = folder
        (folder / "fleet.py").write_text(_MODULE)

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """Let each range take a while, and the last one all of the block.

        So there is a middle to fail in, on a machine of any speed.
        """
        with self.database.connect("test") as connection:
            connection.execute(SLOW)
            connection.execute("select pg_advisory_lock(1)")
            yield
            connection.execute("select pg_advisory_unlock(1)")

    def command(
        self,
        *args: str,
        url: str = "",
        program: tuple[str, ...] = ("-m", "jobs_lib.cli"),
        **env: str,
    ) -> Worker:
        """Begin `jobs-lib reexport` with these arguments."""
        given = {
            "JOBS_LIB_APP": "fleet:app",
            "JOBS_LIB_DATABASE_URL": url or self.database.url,
            "PYTHONPATH": f"{self._folder}{os.pathsep}{ROOT}",
            **env,
        }
        return self._run(*program, "reexport", *args, env=given)

    def start(
        self, master: str, *args: str, packages: str = str(ROOT), **options: Any
    ) -> Worker:
        """Begin `jobs-lib reexport start` on a cluster.

        Its workers find the library where ``packages`` says.
        """
        fixed = ("start", "aircraft", "--rate", "6000", "--ranges", str(RANGES))
        return self.command(*fixed, *spark_options(master, packages), *args, **options)

    def impatient(self, master: str) -> Worker:
        """Begin the same in a process that waits five seconds for lost executors."""
        return self.start(master, program=("-c", _IMPATIENT))

    def read_loaded(self) -> dict[int, object]:
        """Read when each loaded range was loaded."""
        rows = query(
            self.database,
            "select range, loaded_at from jobs_lib.reexport_ranges"
            " where loaded_at is not null",
        )
        return dict(rows)

    def await_loaded(self, number: int, worker: Worker) -> None:
        """Wait until so many ranges are loaded, and not yet all."""
        wait_for(
            lambda: len(self.read_loaded()) >= number or not worker.running,
            timeout=600,
            what=lambda: f"{number} ranges are loaded\n{worker.output}",
            every=0.1,
        )
        assert number <= len(self.read_loaded()) < RANGES, worker.output
