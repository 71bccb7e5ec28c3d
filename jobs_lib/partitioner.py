"""Key to partition, as the producers choose it: murmur2 on the key's bytes.

Kafka's Java client uses murmur2 and librdkafka, by default, CRC32: the two agree on a
quarter of all keys at best. Every producer of this library therefore sets
``partitioner=murmur2_random``, and this module computes a group's origin in the same
way.

Source: ``org.apache.kafka.common.utils.Utils.murmur2`` (Apache Kafka), itself Austin
Appleby's MurmurHash2, 32 bit, seed 0x9747b28c.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTITIONS_FOR_WORK = 100
"""Partitions of a topic that carries work: it can be spread over pods for years."""
_MULTIPLIER = 0x5BD1E995
_SEED = 0x9747B28C
_MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """The hash of ``data`` as an unsigned 32-bit integer."""
    length = len(data)
    h = _SEED ^ length
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * _MULTIPLIER & _MASK
        k = (k ^ (k >> 24)) * _MULTIPLIER & _MASK
        h = (h * _MULTIPLIER & _MASK) ^ k
    if whole < length:
        h ^= int.from_bytes(data[whole:], "little")
        h = h * _MULTIPLIER & _MASK
    h = (h ^ (h >> 13)) * _MULTIPLIER & _MASK
    return h ^ (h >> 15)


def choose_partition(key: str | bytes, partitions: int) -> int:
    """The partition, 0 to ``partitions - 1``, that a producer chooses for ``key``."""
    data = key.encode() if isinstance(key, str) else key
    return (murmur2(data) & 0x7FFFFFFF) % partitions


def choose_partitions(keys: Sequence[str], partitions: int) -> list[int]:
    """The partition that a producer chooses for each key, in the order of the keys."""
    return [choose_partition(key, partitions) for key in keys]


def choose_origin(group: str, topic: str, partitions: int) -> str:
    """The origin ``topic/partition`` in which a group lives: always the same one."""
    return f"{topic}/{choose_partition(group, partitions)}"


def split_origin(origin: str) -> tuple[str, int]:
    """The topic and the number of the partition of an origin ``topic/partition``."""
    topic, _, number = origin.rpartition("/")
    return topic, int(number)


def partitions_for(entities: int) -> int:
    """How many partitions a topic gets for this number of entities: 3, 8 or 16."""
    if entities > 1_000_000:
        return 16
    return 8 if entities > 100_000 else 3


def choose_shard(topic: str, key: str | None, shards: int) -> int:
    """The outbox shard, 0 to ``shards - 1``, of a key of a topic.

    The topic is part of the hash so that one key's topics spread over the relays.
    A row without a key has no order to keep and goes by its topic alone. Kafka does not
    see shards, so the hash is one that SQL has, too.
    """
    digest = sha256(f"{topic}\0{key or ''}".encode()).digest()
    return int.from_bytes(digest[:2]) % shards
