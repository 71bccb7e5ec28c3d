"""Read a topic in Spark, by a Python Data Source over the bounded reader.

No connector of the JVM is needed. Each task reads some offsets of one partition, up to
the ends that were taken before, and gives its records as Arrow columns.

**Where the credentials are.** They travel with the pickled class of the data source,
which Spark sends to its Python workers, and not in its options, which plans and the UI
show. See :mod:`spark_bridge.loader` for the way over a network.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jobs_lib.kafka.keys import PIECE, cut, read_keys
from jobs_lib.kafka.places import find_places, find_settled_ends
from spark_bridge.master import check_kafka
from spark_bridge.workers import read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from jobs_lib.kafka.keys import Keys, Piece
    from jobs_lib.settings import Settings

SCHEMA = "partition int, offset long, key string, version long, tombstone boolean"
_PATH = "PYTHONPATH"
_NOT_FOR_TASKS = {
    "database_url": "",
    "direct_url": "",
    "schema_registry_url": "",
    "schema_registry": {},
}
"""Settings that hold secrets and go to no worker: tasks reach Kafka alone."""


@dataclass(frozen=True, slots=True)
class TopicPart:
    """What is to be read of a topic: its records up to some offsets."""

    settings: Settings = field(repr=False)
    """Not shown: they may hold passwords."""
    topic: str
    """By its name in Kafka."""
    starts: Mapping[int, int]
    """The offset of the oldest record of each partition."""
    ends: Mapping[int, int]
    """The offset before which each partition ends."""
    values: bool = False
    """Whether there is a column ``value``."""
    size: int = PIECE
    """Offsets in one task."""

    @classmethod
    def of(cls, settings: Settings, topic: str, *, values: bool = False) -> Self:
        """Take all committed records that a topic has now.

        Args:
            settings: where Kafka is.
            topic: by its name in Kafka.
            values: whether there shall be a column ``value``.

        Raises:
            AccessError: Kafka does not let this client in.
            TopicError: the topic does not exist, or is not visible.
            UnavailableError: no broker answers in time.
        """
        ends = find_settled_ends(settings, topic)
        starts = find_places(settings, topic, "start")
        return cls(
            settings.model_copy(update=dict(_NOT_FOR_TASKS)),
            topic,
            starts,
            ends,
            values,
        )

    @property
    def schema(self) -> str:
        """The columns, as Spark writes them."""
        return f"{SCHEMA}, value binary" if self.values else SCHEMA

    def cut(self) -> list[Piece]:
        """Cut it into the parts of tasks."""
        return cut(self.starts, self.ends, self.size)

    def read(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Read the part of one task, in columns; runs on a worker."""
        for block in read_keys(self.settings, self.topic, piece, values=self.values):
            yield _make_batch(block, values=self.values)


def read_topic(spark: Any, part: TopicPart) -> Any:
    """Make a DataFrame of a topic's records, one row for each.

    Its columns are ``partition``, ``offset``, ``key``, ``version`` (of the header
    ``ce_version``), ``tombstone`` and, if asked for, ``value``. The key is null where a
    record has none, or one that is not UTF-8.

    Args:
        spark: the session.
        part: what to read; the same one gives the same records each time, as long as
            compaction leaves them.

    Raises:
        ReexportError: a secret of Kafka's client would cross a network in the open.
    """
    known = read_settings(spark)
    check_kafka(known.get("spark.master", ""), part.settings.kafka, known)
    source = _make_source(part)
    with _finding_packages(spark):
        spark.dataSource.register(source)
    return spark.read.format(source.name()).load()


@contextmanager
def _finding_packages(spark: Any) -> Iterator[None]:
    """Let a process that Spark starts beside this one find the packages, too.

    Spark makes a data source there, by the Python of the workers. What is packed is
    unpacked on workers alone, where these folders come last.
    """
    try:
        context = spark.sparkContext
    except Exception:
        # Spark Connect has none; its server runs what is made of a source.
        yield
        return
    before = dict(context.environment)
    if context.pythonExec != sys.executable:
        paths = sysconfig.get_paths()
        ours = str(Path(__file__).parents[1])
        given = filter(None, [before.get(_PATH)])
        folders = (*given, ours, paths["purelib"], paths["platlib"])
        context.environment[_PATH] = os.pathsep.join(dict.fromkeys(folders))
    try:
        yield
    finally:
        context.environment.clear()
        context.environment.update(before)


def find_newest(records: Any, *, keyless: bool = False) -> Any:
    """Find the newest record of each key.

    Within a partition the last record is the newest. A key that has records in several
    partitions, since the topic has grown, is where its version is the highest.

    Args:
        records: a DataFrame of :func:`read_topic`.
        keyless: whether there is also a row with the key null, if some records have no
            readable key.

    Returns a DataFrame with the columns ``key``, ``partition``, ``offset``, ``version``
    and ``tombstone``, and ``value`` if the records have one; and of all records of the
    key the ``highest`` version, and the number of ``records``.
    """
    from pyspark.sql import functions as f

    columns = [name for name in records.columns if name != "key"]
    keyed = records if keyless else records.where(f.col("key").isNotNull())
    # Spark groups by the key alone afterwards, without another exchange.
    last = keyed.groupBy("key", "partition").agg(
        f.max_by(f.struct(*columns), f.col("offset")).alias("last"),
        f.max("version").alias("highest"),
        f.count(f.lit(1)).alias("records"),
    )
    rank = f.struct(f.coalesce("last.version", f.lit(-1)), f.col("last.offset"))
    newest = last.groupBy("key").agg(
        f.max_by("last", rank).alias("newest"),
        f.max("highest").alias("highest"),
        f.sum("records").alias("records"),
    )
    of_newest = (f.col(f"newest.{name}") for name in columns)
    return newest.select("key", *of_newest, "highest", "records")


def _make_source(part: TopicPart) -> type[Any]:
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    # Each has a name of its own: another frame of the session may still be read.
    name = f"jobs_lib_topic_{uuid.uuid4().hex}"

    class TopicReader(DataSourceReader):  # type: ignore[misc]
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(piece) for piece in part.cut()]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            if partition.value is not None:
                yield from part.read(partition.value)

    class TopicSource(DataSource):  # type: ignore[misc]
        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> str:
            return part.schema

        def reader(self, schema: Any) -> DataSourceReader:
            return TopicReader()

    return TopicSource


def _make_batch(block: Keys, *, values: bool) -> pa.RecordBatch:
    # Imported here because this runs on the worker.
    import numpy as np
    import pyarrow as pa

    count = len(block.offsets)
    columns = {
        "partition": pa.array(np.full(count, block.partition, np.int32)),
        "offset": pa.array(block.offsets, pa.int64()),
        "key": pa.array(block.keys, pa.string()),
        "version": pa.array(block.versions, pa.int64()),
        "tombstone": pa.array(block.tombstones, pa.bool_()),
    }
    if values:
        columns["value"] = pa.array(block.values, pa.binary())
    return pa.record_batch(columns)
