"""The hash and the choices made with it, compared with Kafka's published answers."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import pytest

from jobs_lib.partitioner import (
    choose_origin,
    choose_partition,
    choose_shard,
    murmur2,
)

# From Kafka's UtilsTest.testMurmur2 and librdkafka's unittest_murmur2.
KNOWN = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("data", "signed"), KNOWN.items())
def test_the_hash_is_the_one_of_kafkas_java_client(data, signed):
    assert murmur2(data) == signed % 2**32


def test_every_length_of_the_tail_is_hashed():
    hashes = {murmur2(b"kafka"[:length]) for length in range(6)}
    assert len(hashes) == 6
    assert all(0 <= value < 2**32 for value in hashes)


@pytest.mark.parametrize("partitions", [1, 3, 100, 1_000])
def test_a_negative_hash_is_made_positive_as_kafka_does(partitions):
    # Kafka clears the sign bit; the absolute value would choose another partition.
    assert murmur2(b"foobar") > 2**31
    expected = ((-790332482) & 0x7FFFFFFF) % partitions
    assert choose_partition("foobar", partitions) == expected


def test_a_key_is_hashed_as_utf_8():
    key = "Zürich ✈"
    assert (
        choose_partition(key, 1_000)
        == (murmur2(b"Z\xc3\xbcrich \xe2\x9c\x88") & 0x7FFFFFFF) % 1_000
    )


def test_an_origin_names_topic_and_partition():
    assert choose_origin("foobar", "orders", 1) == "orders/0"
    assert choose_origin("a", "x", 100) == f"x/{choose_partition('a', 100)}"


@pytest.mark.guarantee("W42")
def test_uuid_keys_spread_evenly_over_partitions():
    keys = (str(UUID(int=number * 0x9E3779B97F4A7C15)) for number in range(32_000))
    counts = Counter(choose_partition(key, 16) for key in keys)
    assert len(counts) == 16
    assert max(counts.values()) / min(counts.values()) < 1.2
    assert all(1_800 < count < 2_200 for count in counts.values())


def test_the_shard_of_a_key_depends_on_its_topic():
    keys = [str(number) for number in range(200)]
    orders = [choose_shard("orders", key, 8) for key in keys]
    assert orders == [choose_shard("orders", key, 8) for key in keys]
    assert set(orders) == set(range(8))
    assert orders != [choose_shard("invoices", key, 8) for key in keys]


def test_rows_without_a_key_go_by_their_topic_alone():
    assert choose_shard("orders", None, 8) == choose_shard("orders", "", 8)
    assert 0 <= choose_shard("orders", None, 8) < 8
