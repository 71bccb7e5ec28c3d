"""Spark as the engine of a re-export."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, Self

from jobs_lib import reexport
from jobs_lib.errors import ReexportError
from jobs_lib.reexport.run import AHEAD, CHUNK
from jobs_lib.reexport.snapshot import HOLD_SECONDS
from spark_bridge.frame_engine import plan_states, start_frame
from spark_bridge.loader import Target, load_with_spark
from spark_bridge.master import (
    check_answers,
    check_form,
    check_kafka,
    check_password,
    read_defaults,
)
from spark_bridge.pack import add_packed
from spark_bridge.session import default_master, find_session, open_session
from spark_bridge.workers import check_session, read_settings, watching

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jobs_lib.outbox.topic import Entity
    from jobs_lib.postgres.database import Database
    from jobs_lib.reexport import LagLimit, Loading, Progress, Range, Window
    from spark_bridge.frames import FrameSource

KEEP = 60.0
"""Seconds for which Spark is kept while nothing is to be loaded: a cluster needs some
to give executors again, and those that wait are lost to others."""


class SparkEngine:
    """Loads ranges in Spark tasks; starts Spark when there are ranges to load.

    It stops the Spark that it started, and with it the executors, when nothing was to
    be loaded for ``keep`` seconds, and starts it again for the next ranges. Use it as a
    context manager: leaving it stops Spark, too. A session that existed before is used
    and never stopped.

    Args:
        master: ``local[2]``, ``spark://host:7077``, …. Defaults to this machine.
        conf: settings of Spark, in addition to ours.
        keep: seconds for which Spark is kept while nothing is to be loaded.
        packed: the file that ``jobs-lib reexport pack`` has written, which brings the
            library to the workers.
    """

    def __init__(
        self,
        master: str | None = None,
        conf: Mapping[str, str] | None = None,
        keep: float = KEEP,
        packed: str | None = None,
    ) -> None:
        self._master = master
        self._settings = dict(conf or {})
        if packed is not None:
            self._settings = add_packed(self._settings, packed)
        self._keep = keep
        self._stack = ExitStack()
        self._session: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def check(self, database: Database, kafka: Mapping[str, str] | None = None) -> None:
        """Check what can be checked without Spark, so before anything is begun.

        Args:
            database: the one that tasks reach.
            kafka: the settings of Kafka's client, if tasks read a topic.

        Raises:
            ReexportError: the master does not answer, the database's password or a
                secret of Kafka's client would cross a network in the open, or the
                process has a session already that is not as asked.
        """
        session = find_session()
        if session is not None:
            settings = read_settings(session)
            self._check_wishes(settings)
            master = settings.get("spark.master", "")
        else:
            settings = read_defaults() | self._settings
            master = self._master or default_master()
            check_form(master)
        check_password(master, database.url, settings)
        check_kafka(master, kafka or {}, settings)
        if session is None:
            check_answers(master)

    def _check_wishes(self, settings: Mapping[str, str]) -> None:
        """Check that the session that is there already has what this one was to have.

        Raises:
            ReexportError: it has another master, or not these settings.
        """
        master = settings.get("spark.master", "")
        if self._master is not None and self._master != master:
            raise ReexportError(
                f"this process has a Spark session on {master!r} already, so the "
                f"master {self._master!r} would not be used: leave it out, or stop "
                "that session first"
            )
        missing = [n for n, value in self._settings.items() if settings.get(n) != value]
        if missing:
            raise ReexportError(
                "this process has a Spark session already, so it is too late for "
                f"settings of Spark ({', '.join(sorted(missing))}): give "
                "them to spark-submit, or when you open the session"
            )

    def load(self, database: Database, loading: Loading, ranges: Sequence[int]) -> None:
        """Load those of the ranges that are not loaded yet.

        Raises:
            ReexportError: Spark does not start, a worker of it cannot load, or a task
                has failed.
        """
        target = Target.of(database)
        session = self.open(database)
        with watching(session):
            load_with_spark(session, target, loading, ranges)

    def open(self, database: Database) -> Any:
        """Start Spark unless it runs, and return its session.

        Raises:
            ReexportError: Spark does not start, or a worker of it cannot load.
        """
        if self._session is None:
            self.check(database)
            opened = open_session(self._master, self._settings)
            session = self._stack.enter_context(opened)
            check_session(session, Target.of(database))
            self._session = session
        return self._session

    def idle(self, seconds: float) -> None:
        """Stop Spark if nothing was to be loaded for long enough."""
        if seconds >= self._keep:
            self._release()

    def _release(self) -> None:
        self._session = None
        self._stack.close()


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
    keep: float = KEEP,
    on_progress: Callable[[Progress], None] | None = None,
    snapshot: bool = False,
    hold_for: float = HOLD_SECONDS,
    frame: FrameSource | None = None,
    conf: Mapping[str, str] | None = None,
    packed: str | None = None,
) -> Progress:
    """Begin or resume a re-export, as ``jobs-lib reexport start`` does.

    Args:
        database: holds the entity's table and the library's schema.
        entity: what ``@app.entity`` declared.
        rate: records a minute at the topic; or the hours of the day in which all keys
            are to be sent.
        engine: ``spark``, or ``sql`` for this process alone.
        master: Spark's master. Defaults to this machine.
        ranges: the number of ranges. Defaults to one for each 20,000 keys, 10,000 at
            most.
        chunk: keys in one job.
        ahead: keys that may be loaded and not yet sent; then the call waits until half
            of them are sent. Of a DataFrame it is at least an eighth of all.
        watch_lag: a group, and the lag above which it pauses the re-export.
        keep: seconds for which Spark is kept while nothing is to be loaded.
        on_progress: called before each wave of ranges and at the end.
        snapshot: load the keys that the table has at one moment; see the page about
            re-exports.
        hold_for: seconds for which the snapshot may be held.
        frame: a DataFrame that carries the states, with their keys and versions.
            Defaults to the entity's own table.
        conf: settings of Spark, in addition to ours.
        packed: the file that ``jobs-lib reexport pack`` has written, which brings the
            library to the workers.

    Raises:
        ReexportError: it cannot be planned, begun or loaded as asked.
    """
    if frame is not None and snapshot:
        raise ReexportError(
            "a snapshot is one of the entity's table, and a DataFrame has none: leave "
            "one of both out"
        )
    if frame is not None and engine == "sql":
        raise ReexportError(
            "only Spark reads a DataFrame: leave `sql` out as the engine"
        )
    with SparkEngine(master, conf, keep, packed) as spark:
        if engine == "spark":
            spark.check(database)
        if frame is not None:
            return start_frame(
                database,
                entity,
                frame,
                spark,
                rate=rate,
                ranges=ranges,
                chunk=chunk,
                ahead=ahead,
                watch_lag=watch_lag,
                on_progress=on_progress,
            )
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
            snapshot=snapshot,
            hold_for=hold_for,
        )


def examine(
    database: Database,
    entity: Entity,
    frame: FrameSource,
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    packed: str | None = None,
    ranges: int | None = None,
) -> tuple[Range, ...]:
    """Examine a DataFrame as :func:`start` does, and begin nothing.

    Returns the ranges of its keys, each with its number of keys.

    Args:
        database: as for :func:`start`.
        entity: as for :func:`start`.
        frame: as for :func:`start`.
        master: as for :func:`start`.
        conf: as for :func:`start`.
        packed: as for :func:`start`.
        ranges: as for :func:`start`.

    Raises:
        ReexportError: a row, or the topic, is not fit for it.
    """
    with SparkEngine(master, conf, packed=packed) as spark:
        spark.check(database)
        return plan_states(database, entity, frame, spark, ranges)
