"""Columns of keys go where the producer sends each of them."""

from __future__ import annotations

import random
import uuid

import pyarrow as pa
import pytest

from jobs_lib import partitioner
from jobs_lib.errors import ReexportError
from spark_bridge.partitioner import choose_partitions, murmur2

RNG = random.Random(5)
KEYS = [
    *("", "a", "ab", "abc", "abcd", "ä", "😀😀", "x" * 1_000),
    *(str(uuid.UUID(int=RNG.getrandbits(128))) for _ in range(1_000)),
    *("k" * RNG.randint(0, 20) + str(RNG.random()) for _ in range(1_000)),
]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.binary()])
def test_hashes_equal_the_scalar_ones(type_):
    array = pa.array([key.encode() for key in KEYS], pa.binary()).cast(type_)
    expected = [partitioner.murmur2(key.encode()) for key in KEYS]
    assert murmur2(array).tolist() == expected
    # A slice shares its parent's buffers; the last key has no padding behind it.
    assert murmur2(array.slice(3, 500)).tolist() == expected[3:503]
    assert murmur2(array.slice(len(KEYS) - 1)).tolist() == expected[-1:]


@pytest.mark.parametrize("keys", [[], [""], ["", "", "abc"]])
def test_empty_columns_and_keys(keys):
    expected = [partitioner.murmur2(key.encode()) for key in keys]
    assert murmur2(pa.array(keys, pa.string())).tolist() == expected


def test_partitions_equal_the_scalar_ones():
    column = pa.array(KEYS)
    chosen = [partitioner.choose_partition(key, 7) for key in KEYS]
    assert choose_partitions(column, 7).tolist() == chosen


def test_a_null_key_is_refused():
    with pytest.raises(ReexportError, match="1 of 2 keys are null"):
        murmur2(pa.array(["a", None]))


@pytest.mark.slow
def test_it_runs_inside_spark(spark):
    def partitions(batches):
        for batch in batches:
            chosen = choose_partitions(batch.column(0), 12)
            yield pa.record_batch(
                [batch.column(0), pa.array(chosen)], names=["key", "partition"]
            )

    frame = spark.createDataFrame([(key,) for key in KEYS], "key string")
    rows = frame.mapInArrow(partitions, "key string, partition int").collect()
    assert {row.key: row.partition for row in rows} == {
        key: partitioner.choose_partition(key, 12) for key in KEYS
    }
