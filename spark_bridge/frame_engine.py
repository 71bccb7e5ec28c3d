"""Re-export the states of a DataFrame: examine it, begin, and load it by Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib import reexport
from jobs_lib.errors import ReexportError
from jobs_lib.kafka.places import keeps_all_keys
from jobs_lib.reexport.plan import Range
from jobs_lib.reexport.staging import begin_staged, stage_range
from spark_bridge.frames import (
    number_rows,
    open_frame,
    plan_frame,
    reading,
    whole_groups,
)
from spark_bridge.loader import RESULT, Target
from spark_bridge.staging import KEY, RANGE, VERSION, StateEncoder, make_stage
from spark_bridge.topic import TopicPart, find_newest, read_topic
from spark_bridge.workers import check_encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs_lib.outbox.topic import Entity
    from jobs_lib.postgres.database import Database
    from jobs_lib.reexport import LagLimit, Loading, Progress, Window
    from spark_bridge.engine import SparkEngine
    from spark_bridge.frames import FrameSource


_WAVES = 8
"""At the least, this part of all keys is loaded ahead: each wave reads the whole frame
and the whole topic. The first one loads it, and later ones half of it."""


class FrameEngine:
    """Loads ranges of a frame in Spark tasks; see :class:`SparkEngine`.

    Args:
        spark: starts and stops Spark.
        entity: what ``@app.entity`` declared.
        source: the frame.
    """

    def __init__(self, spark: SparkEngine, entity: Entity, source: FrameSource) -> None:
        self._spark = spark
        self._entity = entity
        self._source = source

    def load(self, database: Database, loading: Loading, ranges: Sequence[int]) -> None:
        """Load those of the ranges that are not loaded yet.

        Raises:
            ReexportError: Spark does not start, or the frame cannot be read.
        """
        with database.connect("re-export") as connection:
            rows = connection.execute(
                database.queries["read_ranges"],
                {"reexport": loading.reexport, "ranges": list(ranges)},
            ).fetchall()
        wanted = [(number, Range(lower, upper, 0)) for number, lower, upper in rows]
        if not wanted:
            return
        spark = self._spark.open(database)
        loaded = _load(spark, database, loading, self._entity, self._source, wanted)
        # Spark gives no group for a range without rows. One that a lost task has loaded
        # is left as it is.
        with database.connect("re-export") as connection:
            for number, _ in wanted:
                if number not in loaded:
                    stage_range(connection, database.queries, loading, number, [])

    def idle(self, seconds: float) -> None:
        """Stop Spark if nothing was to be loaded for long enough."""
        self._spark.idle(seconds)


def plan_states(
    database: Database,
    entity: Entity,
    source: FrameSource,
    engine: SparkEngine,
    ranges: int | None,
) -> tuple[Range, ...]:
    """Examine all rows of a frame, and cut its keys into ranges; change nothing.

    Raises:
        ReexportError: the frame or the topic is not fit for it.
    """
    engine.check(database, entity.topic.settings.kafka)
    check_topic(entity)
    spark = engine.open(database)
    check_encoder(spark, StateEncoder.of(entity))
    return plan_frame(spark, open_frame(spark, source, entity), entity, ranges)


def start_frame(
    database: Database,
    entity: Entity,
    source: FrameSource,
    engine: SparkEngine,
    *,
    rate: int | Window,
    ranges: int | None,
    chunk: int,
    ahead: int,
    watch_lag: LagLimit | None,
    on_progress: Callable[[Progress], None] | None,
) -> Progress:
    """Begin or resume a re-export of a frame; see :func:`spark_bridge.start`.

    Raises:
        ReexportError: the frame or the topic is not fit for it, or it cannot be begun.
    """
    planned = plan_states(database, entity, source, engine, ranges)
    begun = begin_staged(
        database, entity, planned, rate=rate, chunk=chunk, watch_lag=watch_lag
    )
    loader = FrameEngine(engine, entity, source)
    ahead = max(ahead, sum(piece.keys for piece in planned) // _WAVES)
    return reexport.load(database, begun, loader, ahead, on_progress)


def check_topic(entity: Entity) -> None:
    """Refuse a topic in which nothing says which of two states is newer.

    Raises:
        ReexportError: its values have no versions, or it does not keep each key.
    """
    topic = entity.topic
    if not topic.versioned:
        raise ReexportError(
            f"the values of the topic {topic.name!r} have no version, so nothing says "
            "whether a state of the DataFrame is older than what the topic has: "
            "declare app.topic(…, value=…) with a type that has a field `version`"
        )
    if not topic.settings.kafka_bootstrap_servers:
        raise ReexportError(
            "Kafka is not known, and the topic must be compared with the DataFrame: "
            "set JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS"
        )
    if not (topic.compacted and keeps_all_keys(topic.settings, topic.name)):
        raise ReexportError(
            f"the topic {topic.name!r} is not compacted (cleanup.policy=compact), so "
            "it may have lost versions that are newer than the DataFrame's: declare it "
            "with compacted=True and run `jobs-lib topics apply`"
        )


def _load(
    spark: Any,
    database: Database,
    loading: Loading,
    entity: Entity,
    source: FrameSource,
    ranges: Sequence[tuple[int, Range]],
) -> set[int]:
    """Load the ranges; returns the numbers of those that this call has loaded."""
    from pyspark.sql import functions as f

    frame = open_frame(spark, source, entity)
    kind = frame.schema[KEY].dataType.simpleString()
    columns = [name for name in frame.columns if name not in (KEY, VERSION)]
    # The ends are taken now: relays have noted since the begin what leaves later.
    part = TopicPart.of(entity.topic.settings, entity.topic.name)
    topic = find_newest(read_topic(spark, part)).select("key", "version")
    # A key that is no number is in no range of numbers.
    topic = topic.withColumn(KEY, f.expr(f"try_cast(key as {kind})"))
    stage = make_stage(Target.of(database), loading, StateEncoder.of(entity), columns)
    with whole_groups(spark), reading(spark, "the states cannot be loaded"):
        left = number_rows(spark, frame, ranges).groupBy(RANGE)
        right = number_rows(spark, topic, ranges).groupBy(RANGE)
        loaded = left.cogroup(right).applyInArrow(stage, RESULT).collect()
    return {row["range"] for row in loaded}
