"""Load ranges in Spark tasks: a task takes whole ranges, a range is one transaction.

This uses only features that Spark Connect has, too: no RDD, and nothing of the JVM.
Spark runs a task at least once. The database makes sure that a range is loaded exactly
once, see :func:`jobs_lib.reexport.load_range`.

**Where the password is.** Tasks need the database's URL. It travels inside the pickled
function that Spark sends to its Python workers. It is not in the session's settings
(which the event log, the UI and the JVM's command line show), not in a column (which
plans may show), and not in the environment of executors (which on a cluster is a
setting). On a cluster the pickled function crosses the network, so
:mod:`spark_bridge.master` refuses a password there unless Spark encrypts its traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from jobs_lib.errors import ReexportError
from jobs_lib.version import __version__
from spark_bridge.master import count_tasks
from spark_bridge.workers import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from jobs_lib.postgres.database import Database
    from jobs_lib.reexport import Loading

RESULT = "range int, keys bigint"
"""A task's result: the ranges that it has loaded, and the keys of each."""


@dataclass(frozen=True, slots=True)
class Target:
    """The database that a task loads into."""

    url: str = field(repr=False)
    """Not shown: it may hold a password."""
    schema: str
    pgbouncer: bool = False
    timeout: float = 30.0
    release: str = __version__
    """The library's release in the process that has made this."""

    @classmethod
    def of(cls, database: Database) -> Self:
        """Take what tasks need to reach this database as this process does."""
        return cls(
            database.url,
            database.schema,
            pgbouncer=not database.prepares,
            timeout=database.timeout,
        )

    def database(self) -> Database:
        """Make the database object on the worker.

        Raises:
            ReexportError: the worker has another release of the library.
        """
        if self.release != __version__:
            # The workers were asked before, but one may have come later.
            raise ReexportError(
                f"the worker has jobs_lib {__version__}, and the process that has "
                f"started it {self.release}: give both the same release"
            )
        from jobs_lib.postgres.database import Database

        return Database(
            self.url, self.schema, pgbouncer=self.pgbouncer, timeout=self.timeout
        )


def load_with_spark(
    spark: Any, target: Target, loading: Loading, ranges: Sequence[int]
) -> int:
    """Load the ranges in parallel; returns how many keys were loaded by this call."""
    if not ranges:
        return 0
    # The numbers of the ranges travel with the function. A frame of them would have to
    # be made, and then to be shuffled.
    tasks = count_tasks(read_settings(spark).get("spark.master", ""), len(ranges))
    places = spark.range(0, len(ranges), 1, tasks)
    task = make_task(target, loading, ranges)
    loaded = places.mapInArrow(task, RESULT)
    return sum(row["keys"] for row in loaded.collect())


def make_task(
    target: Target, loading: Loading, ranges: Sequence[int]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function of one task: places of ranges in, loaded ranges out."""
    numbers = list(ranges)

    def load_ranges(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Imported here because this runs on the worker.
        import pyarrow as pa

        from jobs_lib.reexport import load_range
        from spark_bridge.columns import KeyColumn

        schema = pa.schema([("range", pa.int32()), ("keys", pa.int64())])
        database = target.database()
        # Connect late: an empty task needs no connection.
        connection = None
        try:
            for batch in batches:
                for place in batch.column(0).to_pylist():
                    number = numbers[place]
                    connection = connection or database.connect("re-export task")
                    queries = database.queries
                    keys = load_range(
                        connection, queries, loading, number, KeyColumn.read
                    )
                    if keys is not None:
                        yield pa.record_batch([[number], [keys]], schema=schema)
        finally:
            if connection is not None:
                connection.close()

    return load_ranges
