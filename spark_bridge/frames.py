"""Any DataFrame as the source of a re-export: it carries key, version and state itself.

The frame is examined before anything begins: its keys, its versions, and each state by
the encoder of the topic. Its keys are cut into ranges by quantiles. A range is loaded
by one task in one transaction, without the states that the topic has already.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from jobs_lib.errors import ReexportError
from jobs_lib.kafka.checks import KEY_LIMIT
from jobs_lib.masking import describe
from jobs_lib.outbox.keys import join_key
from jobs_lib.reexport.plan import KEYS_PER_RANGE, RANGE_LIMIT, Range, range_size
from spark_bridge.staging import (
    KEY,
    RANGE,
    VERSION,
    StateEncoder,
    make_check,
)
from spark_bridge.workers import awaiting_executors, explain_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from jobs_lib.outbox.topic import Entity

_WHOLE = ("byte", "short", "integer", "long")
_BATCH = 10_000
"""Rows in an Arrow batch; the setting of our own sessions is made for ranges."""
_MOST_TASKS = 64
_OURS = re.compile(r"\bReexportError: (.+)")
_ARROW_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


@dataclass(frozen=True, slots=True)
class FrameSource:
    """A DataFrame that carries key, version and state itself.

    It is made again when a re-export goes on after an interruption, and must then have
    the same rows.

    Args:
        load: makes the DataFrame of a Spark session.
    """

    load: Callable[[Any], Any]

    @classmethod
    def parquet(cls, path: str) -> Self:
        """Read Parquet files.

        Args:
            path: a file or a folder, as Spark takes it.
        """
        return cls(lambda spark: spark.read.parquet(path))

    @classmethod
    def csv(cls, path: str) -> Self:
        """Read CSV files, whose first line has the names of the columns.

        Every value is a text, or null where there is none.

        Args:
            path: a file or a folder, as Spark takes it.
        """
        return cls(lambda spark: spark.read.csv(path, header=True, inferSchema=False))


def open_frame(spark: Any, source: FrameSource, entity: Entity) -> Any:
    """Make the frame, with its key and its version in columns of ours.

    Raises:
        ReexportError: it cannot be made, or lacks a column, or one has a type that no
            key or version can have.
    """
    from pyspark.sql import functions as f

    with reading(spark):
        frame = source.load(spark)
        columns = list(frame.columns)
    names = [name.lower() for name in columns]
    if len({*names}) < len(names):
        raise ReexportError(
            "two columns of the DataFrame have the same name: rename one, or select "
            "those of the state"
        )
    kinds = {field.name: field.dataType for field in frame.schema.fields}
    for column, use in (
        *((one, "key") for one in entity.columns),
        ("version", "version"),
    ):
        if column not in kinds:
            raise ReexportError(
                f"the DataFrame has no column {column!r} with the {use} of "
                f"{entity.name!r} (columns: {', '.join(columns) or 'none'}): give one "
                "that has, or rename it"
            )
    version = kinds["version"].typeName()
    for column in entity.columns:
        if (key := kinds[column].typeName()) not in (*_WHOLE, "string"):
            raise ReexportError(
                f"the key column {column!r} of the DataFrame is of type {key}, whose "
                "order and text may not be the topic's: cast it to a string, in the "
                "form that the topic's keys have"
            )
    exact = version == "decimal" and kinds["version"].scale == 0
    if version not in (*_WHOLE, "string") and not exact:
        raise ReexportError(
            f"the column 'version' of the DataFrame is of type {version}, and a "
            "version is a whole number: cast it to one"
        )
    text = "trim(cast(`version` as string))"
    number = f"case when {text} rlike '^[0-9]+$' then try_cast({text} as bigint) end"
    return frame.withColumns({KEY: _key_of(kinds, entity), VERSION: f.expr(number)})


def _key_of(kinds: Mapping[str, Any], entity: Entity) -> Any:
    """The column of the key; of several columns the text that the records have."""
    from pyspark.sql import functions as f

    if len(entity.columns) > 1:
        texts = [f.col(f"`{one}`").cast("string") for one in entity.columns]
        return f.udf(_join_key, "string")(*texts)
    (column,) = entity.columns
    found = f.col(f"`{column}`")
    return found if kinds[column].typeName() == "string" else found.cast("bigint")


def _join_key(*parts: str | None) -> str | None:
    texts = [part for part in parts if part is not None]
    return join_key(*texts) if len(texts) == len(parts) else None


def plan_frame(
    spark: Any, frame: Any, entity: Entity, ranges: int | None = None
) -> tuple[Range, ...]:
    """Examine all rows of a frame, and cut its keys into ranges of about equal size.

    The cuts are quantiles of the distinct keys, so neither gaps nor skew matter.

    Args:
        spark: the session.
        frame: of :func:`open_frame`.
        entity: what ``@app.entity`` declared.
        ranges: the number of ranges. Defaults to one for each 20,000 keys.

    Raises:
        ReexportError: a key, a version or a state cannot be sent.
    """
    if ranges is not None and not 1 <= ranges <= RANGE_LIMIT:
        raise ReexportError(
            f"a re-export has 1 to {RANGE_LIMIT:,} ranges, not {ranges}: without a "
            f"number there is one for each {KEYS_PER_RANGE:,} keys"
        )
    with reading(spark):
        pairs = frame.groupBy(KEY, VERSION).count().persist()
        try:
            keys = _examine(pairs, entity)
            planned = _cut(pairs.select(KEY).distinct(), keys, ranges)
        finally:
            pairs.unpersist()
        _refuse_states(spark, frame, entity, planned)
    return planned


def number_rows(spark: Any, frame: Any, ranges: Sequence[tuple[int, Range]]) -> Any:
    """Give each row that lies in one of the ranges the range's number.

    The same ranges give the same rows after a restart.
    """
    from pyspark.sql import functions as f

    kind = frame.schema[KEY].dataType.simpleString()
    ordered = sorted(ranges, key=lambda one: _place(kind, one[1].lower))
    wanted = frame.where(f.col(KEY).isNotNull())
    # Most waves are neighbours, and Parquet passes over files without such keys.
    if (first := ordered[0][1].lower) is not None:
        wanted = wanted.where(f.col(KEY) >= f.lit(first).cast(kind))
    if (last := ordered[-1][1].upper) is not None:
        wanted = wanted.where(f.col(KEY) < f.lit(last).cast(kind))
    numbered = wanted.withColumn(RANGE, _make_finder(kind, ordered)(f.col(KEY)))
    tasks = min(len(ranges), _MOST_TASKS)
    return numbered.where(f.col(RANGE) >= 0).repartition(tasks, RANGE)


def _make_finder(kind: str, ordered: Sequence[tuple[int, Range]]) -> Any:
    """Make the function of columns that finds the range of each key; -1 for none."""
    import pandas as pd
    from pyspark.sql import functions as f

    as_key = int if kind == "bigint" else str
    # One without a lower bound is the first, and one without an upper bound the last.
    lowers = [as_key(p.lower) for _, p in ordered if p.lower is not None]
    uppers = [as_key(p.upper) for _, p in ordered if p.upper is not None]
    numbers = [number for number, _ in ordered]

    def find(keys: Any) -> Any:
        return pd.Series(find_ranges(keys.to_numpy(), lowers, uppers, numbers))

    # Spark takes the kind of function from its types, and does not know them as texts.
    find.__annotations__ = {"keys": pd.Series, "return": pd.Series}
    return f.pandas_udf(find, "int")


def find_ranges(
    keys: NDArray[Any],
    lowers: Sequence[Any],
    uppers: Sequence[Any],
    numbers: Sequence[int],
) -> NDArray[np.int64]:
    """Find the range of each key; -1 for none.

    It looks each key up among the sorted bounds. A join with the bounds would compare
    each key with all of them.

    Args:
        keys: numbers or texts. Texts compare by code points, as Spark's by their bytes.
        lowers: where the ranges begin; one fewer if the first has no such bound.
        uppers: before which they end; one fewer if the last has no such bound.
        numbers: of the ranges, in the order of their bounds.
    """
    import numpy as np

    begun = np.searchsorted(np.array(lowers, keys.dtype), keys, "right")
    begun += len(numbers) - len(lowers)
    ended = np.searchsorted(np.array(uppers, keys.dtype), keys, "right")
    # A key between two ranges is behind as many ends as begins.
    return np.where(begun > ended, np.array([-1, *numbers])[begun], -1)


@contextmanager
def reading(spark: Any, what: str = "the DataFrame cannot be read") -> Iterator[None]:
    """Turn an error of Spark, or of the application's function, into one line.

    Raises:
        ReexportError: there was one; if a task has raised one of ours, it is that. Or
            the cluster has had no executor for too long.
    """
    try:
        with awaiting_executors(spark):
            yield
    except ReexportError:
        raise
    except Exception as error:
        # Spark gives the traceback of a task as a text.
        if ours := _OURS.search(str(error)):
            raise ReexportError(ours[1].strip()) from error
        if lacking := explain_missing(error):
            raise lacking from error
        line = describe(error).splitlines()[0]
        raise ReexportError(f"{what}: {line}. Correct it, and start again") from error


@contextmanager
def whole_groups(spark: Any) -> Iterator[None]:
    """Let Spark give many rows at once to Python; our own sessions give one."""
    before = spark.conf.get(_ARROW_ROWS)
    spark.conf.set(_ARROW_ROWS, str(_BATCH))
    try:
        yield
    finally:
        spark.conf.set(_ARROW_ROWS, before)


def _place(kind: str, lower: str | None) -> tuple[bool, Any]:
    """Where a range stands among others: the one without a lower bound first."""
    return (False, b"") if lower is None else (True, _order(kind)(lower))


def _order(kind: str) -> Callable[[Any], Any]:
    """The order of bounds, which are texts, as Spark sorts the keys."""
    return int if kind == "bigint" else (lambda text: text.encode())


def _examine(pairs: Any, entity: Entity) -> int:
    """Refuse keys and versions that cannot be sent; returns the number of keys."""
    from pyspark.sql import functions as f

    key = f.col(KEY).cast("string")
    size = f.octet_length(key)
    faults = {
        "have no key": f.col(KEY).isNull(),
        "have an empty key": size == 0,
        f"have a key of more than {KEY_LIMIT:,} bytes": size > KEY_LIMIT,
        "have a key with NUL": f.contains(key, f.lit("\0")),
        "have no whole number of 64 bits from 0 on as version": f.col(VERSION).isNull(),
    }
    (counts,) = pairs.agg(
        *(
            f.sum(f.when(one, f.col("count"))).alias(name)
            for name, one in faults.items()
        ),
        f.count_if(f.col("count") > 1).alias("repeated"),
        f.count_distinct(KEY).alias("keys"),
    ).collect()
    for fault in faults:
        if counts[fault]:
            raise ReexportError(
                f"{counts[fault]:,} rows of the DataFrame for {entity.name!r} {fault}: "
                "correct them or leave them out"
            )
    if counts["repeated"]:
        raise ReexportError(
            f"the DataFrame for {entity.name!r} has {counts['repeated']:,} keys with "
            "two states of one version, so nothing says which is right: give each "
            "state a version of its own, or leave repeated rows out"
        )
    return int(counts["keys"])


def _cut(keys: Any, total: int, ranges: int | None) -> tuple[Range, ...]:
    """Cut the distinct keys into ranges, each of which begins at one of them."""
    from pyspark.sql import functions as f

    count = -(-total // range_size(total, ranges))
    if count <= 1:
        return (Range(None, None, total),)
    parts = (
        keys.repartitionByRange(count, KEY)
        .groupBy(f.spark_partition_id())
        .agg(f.min(KEY).alias("first"), f.count("*").alias("keys"))
        .collect()
    )
    # Of one type: both numbers and texts sort as Spark has sorted them.
    kind = keys.schema[KEY].dataType.simpleString()
    parts.sort(key=lambda part: _order(kind)(part["first"]))
    bounds = [None, *(str(part["first"]) for part in parts[1:]), None]
    return tuple(
        Range(bounds[i], bounds[i + 1], part["keys"]) for i, part in enumerate(parts)
    )


def _refuse_states(
    spark: Any, frame: Any, entity: Entity, planned: Sequence[Range]
) -> None:
    """Refuse a frame with a state that its topic cannot have.

    The newest state of each key is encoded, as when it is loaded.
    """
    encoder = StateEncoder.of(entity)
    columns = [name for name in frame.columns if name not in (KEY, VERSION)]
    with whole_groups(spark):
        numbered = number_rows(spark, frame, [*enumerate(planned)])
        found = (
            numbered.groupBy(RANGE)
            .applyInArrow(
                make_check(encoder, columns), "range int, refused long, why string"
            )
            .where("refused > 0")
            .collect()
        )
    if found:
        first = min(found, key=lambda row: row["range"])
        refused = sum(row["refused"] for row in found)
        raise ReexportError(
            f"{refused:,} states of the DataFrame do not fit the topic "
            f"{entity.topic.name!r}, the first in range {first['range']} of "
            f"{len(planned)}: {first['why']}. Give the DataFrame the columns and types "
            "of the topic's values"
        )
