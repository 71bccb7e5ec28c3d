"""A driver of its own process: it re-exports `aircraft` of the database argv[1].

Before each wave, and while it waits, it says whether a Spark is running.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from jobs_lib.postgres.database import Database
from jobs_lib.reexport.run import AHEAD
from spark_bridge import start
from tests.reexport.helpers import make_entity

if TYPE_CHECKING:
    from jobs_lib.reexport import Progress


def tell(progress: Progress) -> None:
    """Print how many ranges are loaded, and whether there is a Spark."""
    from pyspark import SparkContext

    running = "Spark" if SparkContext._active_spark_context else "no Spark"
    print(f"{progress.loaded_ranges} ranges, {running}", flush=True)


if __name__ == "__main__":
    sql = sys.argv[2:3] == ["sql"]
    ahead, keep = map(int, sys.argv[3:] or (AHEAD, 60))
    progress = start(
        Database(sys.argv[1]),
        make_entity(),
        rate=6_000,
        ranges=40,
        master="local[2,4]",
        engine="sql" if sql else "spark",
        ahead=ahead,
        keep=keep,
        on_progress=None if sql else tell,
    )
    print(f"{progress.state} {progress.loaded}")
