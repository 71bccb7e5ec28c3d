"""Repair a topic with Spark: remove its stale keys, or empty and fill it again."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jobs_lib.kafka.checks import KEY_LIMIT
from jobs_lib.reexport import move
from jobs_lib.reexport.plan import plan_ranges
from jobs_lib.reexport.rebuild import rebuild
from jobs_lib.reexport.run import CHUNK
from jobs_lib.reexport.stale import SqlFinder, Stale, remove_stale
from spark_bridge.engine import KEEP, SparkEngine
from spark_bridge.loader import Target
from spark_bridge.master import count_tasks
from spark_bridge.topic import TopicPart, find_newest, read_topic
from spark_bridge.workers import read_settings, watching

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    import pyarrow as pa

    from jobs_lib.outbox.topic import Entity, Topic
    from jobs_lib.postgres.database import Database
    from jobs_lib.reexport import Finder, LagLimit, Progress, Window
    from jobs_lib.reexport.source import Source
    from jobs_lib.settings import Settings


@dataclass(frozen=True)
class SparkFinder:
    """Compares topic and table in Spark, which it starts if there is none."""

    master: str | None = None
    """Spark's master. Defaults to this machine."""
    conf: Mapping[str, str] | None = None
    """Settings of Spark, in addition to ours."""
    packed: str | None = None
    """The file that brings the library to the workers."""

    def check(self, database: Database, settings: Settings) -> None:
        """Check what can be checked without Spark; see :meth:`SparkEngine.check`."""
        with self._make_engine() as engine:
            engine.check(database, settings.kafka)

    def _make_engine(self) -> SparkEngine:
        return SparkEngine(self.master, self.conf, packed=self.packed)

    @contextmanager
    def find(
        self, database: Database, settings: Settings, entity: Entity
    ) -> Iterator[Stale]:
        """Compare the topic with the table; the keys may be read until it is left."""
        with self._make_engine() as engine:
            # Before the table is read: a key of the topic that is not in the table then
            # has been deleted.
            part = TopicPart.of(settings, entity.topic.name)
            spark = engine.open(database)
            stale = find_stale(spark, Target.of(database), entity, part).persist()
            keys = _read(spark, stale)
            try:
                count, unreadable = _count(spark, stale)
                yield Stale(count, unreadable, keys, part.ends)
            finally:
                keys.close()
                stale.unpersist()


def find_stale(spark: Any, target: Target, entity: Entity, part: TopicPart) -> Any:
    """Make a DataFrame of the keys that a topic has and the entity's table has not.

    It has the columns ``key``, ``highest`` (version of the key's records) and
    ``records``; the row with the key null counts the records without a key that a row
    of the outbox could have.

    Args:
        spark: the session.
        target: the database with the entity's table.
        entity: what ``@app.entity`` declared.
        part: what to read of the topic.
    """
    from pyspark.sql import functions as f

    records = read_topic(spark, part)
    key = f.col("key")
    is_storable = (f.octet_length(key).between(1, KEY_LIMIT)) & ~key.contains("\0")
    storable = records.withColumn("key", f.when(is_storable, key))
    # Spark takes a range for one key. It would collect the keys of a small number of
    # ranges in the driver, whose memory ends at some millions of keys.
    keys = read_keys(spark, target, entity).hint("merge")
    # Most keys are in the table, and nobody asks for the newest of their records. Null
    # is equal to nothing, so its rows stay.
    strange = storable.join(keys, "key", "left_anti")
    newest = find_newest(strange, keyless=True)
    stale = newest.where(f.col("key").isNull() | ~f.col("tombstone"))
    return stale.select("key", "highest", "records")


def read_keys(spark: Any, target: Target, entity: Entity) -> Any:
    """Make a DataFrame of the keys of an entity's table, read in parallel ranges."""
    database = target.database()
    with database.connect("re-export") as connection:
        plan = plan_ranges(connection, database.queries, entity)
    bounds = [(piece.lower, piece.upper) for piece in plan.ranges]
    frame = spark.createDataFrame(bounds, "lower string, upper string")
    tasks = count_tasks(read_settings(spark).get("spark.master", ""), len(bounds))
    task = _make_task(target, plan.source)
    return frame.repartition(tasks).mapInArrow(task, "key string")


def start_stale(
    database: Database,
    settings: Settings,
    entity: Entity,
    *,
    rate: int | Window,
    engine: Literal["spark", "sql"] = "spark",
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    packed: str | None = None,
    chunk: int = CHUNK,
    watch_lag: LagLimit | None = None,
) -> Progress:
    """Remove keys that only the topic has, as ``jobs-lib reexport stale`` does.

    Args:
        database: holds the entity's table and the library's schema.
        settings: where Kafka is.
        entity: what ``@app.entity`` declared.
        rate: tombstones a minute at the topic; or the hours of the day in which all of
            them are to be sent.
        engine: compares topic and table: ``spark``, or ``sql`` for this process and the
            database.
        master: Spark's master. Defaults to this machine.
        conf: as for :func:`spark_bridge.start`.
        packed: as for :func:`spark_bridge.start`.
        chunk: keys in one job.
        watch_lag: a group, and the lag above which it pauses the re-export.

    Raises:
        ReexportError: they cannot be removed as asked.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers.
    """
    finder = choose_finder(engine, master, conf, packed)
    if isinstance(finder, SparkFinder):
        # Before anything is begun.
        finder.check(database, settings)
    return remove_stale(
        database,
        settings,
        entity,
        rate=rate,
        finder=finder,
        chunk=chunk,
        watch_lag=watch_lag,
    )


def start_rebuild(
    database: Database,
    settings: Settings,
    entity: Entity,
    *,
    rate: int | Window,
    engine: Literal["spark", "sql"] = "spark",
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    packed: str | None = None,
    keep: float = KEEP,
    although_behind: bool = False,
) -> Progress:
    """Empty a topic and fill it again, as ``jobs-lib reexport rebuild`` does.

    Args:
        database: holds the entity's table and the library's schema.
        settings: where Kafka is.
        entity: what ``@app.entity`` declared.
        rate: as for :func:`spark_bridge.start`.
        engine: loads the keys: ``spark``, or ``sql`` for this process alone.
        master: Spark's master. Defaults to this machine.
        conf: as for :func:`spark_bridge.start`.
        packed: as for :func:`spark_bridge.start`.
        keep: as for :func:`spark_bridge.start`.
        although_behind: whether to delete records that a group has not read yet.

    Raises:
        ReexportError: it cannot be rebuilt as asked, or a group is behind.
        TopicError: the topic does not exist, or Kafka refuses a step.
        UnavailableError: no broker answers.
    """
    with SparkEngine(master, conf, keep, packed) as spark:
        if engine == "spark":
            # Before the topic is emptied.
            spark.check(database)
        return rebuild(
            database,
            settings,
            entity,
            rate=rate,
            engine=spark if engine == "spark" else None,
            although_behind=although_behind,
        )


def start_move(
    database: Database,
    settings: Settings,
    entity: Entity,
    topic: Topic[Any],
    *,
    rate: int | Window,
    engine: Literal["spark", "sql"] = "spark",
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    packed: str | None = None,
    keep: float = KEEP,
    chunk: int = CHUNK,
    watch_lag: LagLimit | None = None,
) -> Progress:
    """Fill a new topic, as ``jobs-lib reexport start --topic`` does.

    Args:
        database: holds the entity's table and the library's schema.
        settings: where Kafka is.
        entity: what ``@app.entity`` declared.
        topic: the new one, as ``app.topic`` declared it.
        rate: as for :func:`spark_bridge.start`.
        engine: loads the keys: ``spark``, or ``sql`` for this process alone.
        master: Spark's master. Defaults to this machine.
        conf: as for :func:`spark_bridge.start`.
        packed: as for :func:`spark_bridge.start`.
        keep: as for :func:`spark_bridge.start`.
        chunk: keys in one job.
        watch_lag: a group, and the lag above which it pauses the re-export.

    Raises:
        ReexportError: the entity cannot be moved there.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers.
    """
    with SparkEngine(master, conf, keep, packed) as spark:
        if engine == "spark":
            # Before the new topic is fed.
            spark.check(database)
        return move.start_move(
            database,
            settings,
            entity,
            topic,
            rate=rate,
            engine=spark if engine == "spark" else None,
            chunk=chunk,
            watch_lag=watch_lag,
        )


def choose_finder(
    engine: Literal["spark", "sql"],
    master: str | None,
    conf: Mapping[str, str] | None = None,
    packed: str | None = None,
) -> Finder:
    """Choose what compares topic and table."""
    return SparkFinder(master, conf, packed) if engine == "spark" else SqlFinder()


def _count(spark: Any, stale: Any) -> tuple[int, int]:
    """Count the stale keys, and the records that no row of the outbox could have."""
    from pyspark.sql import functions as f

    unreadable = f.when(f.col("key").isNull(), f.col("records"))
    with watching(spark):
        (row,) = stale.agg(f.count("key"), f.sum(unreadable)).collect()
    return row[0], row[1] or 0


def _read(spark: Any, stale: Any) -> Generator[tuple[str, int | None]]:
    """Yield the stale keys with the highest version of each.

    Spark may have lost what was counted, and finds it again.
    """
    from pyspark.sql import functions as f

    keys = stale.where(f.col("key").isNotNull()).select("key", "highest")
    with watching(spark):
        for one in keys.toLocalIterator():
            yield one[0], one[1]


def _make_task(
    target: Target, source: Source
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function of one task: batches of bounds in, keys out."""

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Imported here because this runs on the worker.
        import pyarrow as pa

        from spark_bridge.columns import KeyColumn

        database = target.database()
        queries = database.queries
        with database.connect("re-export task") as connection:
            for batch in batches:
                for bounds in batch.to_pylist():
                    with connection.transaction():
                        connection.execute(queries["settle_text_forms"])
                        found = KeyColumn.read(connection, queries, source, **bounds)
                    yield pa.record_batch({"key": found.keys.cast(pa.string())})

    return read
