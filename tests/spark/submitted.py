"""A script for spark-submit: it re-exports `aircraft` of the database in argv[1]."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from jobs_lib.postgres.database import Database
from spark_bridge import start
from tests.reexport.helpers import make_entity

if __name__ == "__main__":
    session = SparkSession.builder.appName("submitted").getOrCreate()
    progress = start(Database(sys.argv[1]), make_entity(), rate=6_000, ranges=20)
    # The session is the script's own: it is still there.
    print(f"{progress.state} {progress.loaded}, and {session.range(3).count()}")
