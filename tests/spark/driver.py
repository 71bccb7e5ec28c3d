"""A driver to be killed: it re-exports the table `aircraft` of the database argv[1]."""

from __future__ import annotations

import sys

from jobs_lib.postgres.database import Database
from spark_bridge import start
from tests.reexport.helpers import make_entity

if __name__ == "__main__":
    progress = start(
        Database(sys.argv[1]),
        make_entity(),
        rate=6_000,
        ranges=40,
        master="local[2,4]",
        engine="sql" if sys.argv[2:] == ["sql"] else "spark",
    )
    print(f"{progress.state} {progress.loaded}")
