"""Columns of keys go where the producer sends each of them."""

from __future__ import annotations

import random
import uuid

import pytest

from jobs_lib import partitioner
from spark_bridge.partitioner import choose_partitions, murmur2
from tests.support.records import make_producer

RNG = random.Random(5)
KEYS = [
    *("", "a", "ab", "abc", "abcd", "ä", "😀😀", "x" * 1_000),
    *(str(uuid.UUID(int=RNG.getrandbits(128))) for _ in range(1_000)),
    *("k" * RNG.randint(0, 20) + str(RNG.random()) for _ in range(1_000)),
]


def make_key(number: int) -> str:
    """Keys of all lengths up to 40 characters, with one, two and four bytes each."""
    text = f"{number}-{number * 0x9E3779B97F4A7C15:x}-é😀"
    return text[: number % 20 + 10] if number % 3 else text


@pytest.mark.parametrize(
    "keys", [KEYS, KEYS[:1], KEYS[7:8], ["", "", "abc"], []], ids=len
)
def test_hashes_equal_those_of_single_keys(keys):
    assert murmur2(keys).tolist() == [partitioner.murmur2(key.encode()) for key in keys]


@pytest.mark.parametrize("partitions", [1, 7, 16, 100])
def test_partitions_equal_those_of_single_keys(partitions):
    expected = partitioner.choose_partitions(KEYS, partitions)
    assert choose_partitions(KEYS, partitions).tolist() == expected
    assert expected == [partitioner.choose_partition(key, partitions) for key in KEYS]


@pytest.mark.slow
@pytest.mark.guarantee("X5")
def test_a_million_keys_go_where_a_producer_sends_them(bootstrap_servers, topic):
    name = topic(100)
    keys = [make_key(number) for number in range(1_000_000)]
    sent = [-1] * len(keys)

    def note(number: int):
        def delivered(error, message) -> None:
            assert error is None, error
            sent[number] = message.partition()

        return delivered

    producer = make_producer(bootstrap_servers)
    for number, key in enumerate(keys):
        while True:
            try:
                producer.produce(name, b"", key, on_delivery=note(number))
                break
            except BufferError:
                producer.poll(0.1)
        if number % 1_000 == 0:
            producer.poll(0)
    assert producer.flush(120) == 0
    assert choose_partitions(keys, 100).tolist() == sent
