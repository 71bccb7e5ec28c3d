"""Spark as the engine of a re-export."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, Self

from jobs_lib import reexport
from jobs_lib.reexport.run import AHEAD, CHUNK
from spark_bridge.loader import Target, load_with_spark
from spark_bridge.session import open_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jobs_lib.outbox.topic import Entity
    from jobs_lib.postgres.database import Database
    from jobs_lib.reexport import LagLimit, Loading, Progress, Window


class SparkEngine:
    """Loads ranges in Spark tasks; starts Spark for the first range.

    Use it as a context manager: leaving it stops the Spark that it started.

    Args:
        master: ``local[2]``, ``spark://host:7077``, …. Defaults to this machine.
        settings: settings of Spark, in addition to ours.
    """

    def __init__(
        self, master: str | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        self._master = master
        self._settings = settings
        self._stack = ExitStack()
        self._session: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        self._stack.close()

    def load(self, database: Database, loading: Loading, ranges: Sequence[int]) -> None:
        """Load those of the ranges that are not loaded yet.

        Raises:
            ReexportError: Spark does not start.
        """
        if self._session is None:
            opened = open_session(self._master, self._settings)
            self._session = self._stack.enter_context(opened)
        target = Target.of(database)
        load_with_spark(self._session, target, loading, ranges)


def start(
    database: Database,
    entity: Entity,
    *,
    rate: int | Window,
    engine: Literal["spark", "sql"] = "spark",
    master: str | None = None,
    ranges: int | None = None,
    chunk: int = CHUNK,
    ahead: int = AHEAD,
    watch_lag: LagLimit | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Begin or resume a re-export, as ``jobs-lib reexport start`` does.

    Args:
        database: holds the entity's table and the library's schema.
        entity: what ``@app.entity`` declared.
        rate: records a minute at the topic; or the hours of the day in which all keys
            are to be sent.
        engine: ``spark``, or ``sql`` for this process alone.
        master: Spark's master. Defaults to this machine.
        ranges: the number of ranges. Defaults to ranges of 10,000 keys.
        chunk: keys in one job.
        ahead: keys that may be loaded and not yet sent; with more, the call waits.
        watch_lag: a group, and the lag above which it pauses the re-export.
        on_progress: called before each wave of ranges and at the end.

    Raises:
        ReexportError: it cannot be planned, begun or loaded as asked.
    """
    with SparkEngine(master) as spark:
        return reexport.start(
            database,
            entity,
            rate=rate,
            engine=spark if engine == "spark" else None,
            ranges=ranges,
            chunk=chunk,
            ahead=ahead,
            watch_lag=watch_lag,
            on_progress=on_progress,
        )
