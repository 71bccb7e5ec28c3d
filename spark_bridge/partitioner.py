"""Choose partitions as producers do, for a whole column of keys at once.

The result equals :mod:`jobs_lib.partitioner` for each key. It is computed over the
bytes of an Arrow array: each step handles all keys that still have bytes left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from jobs_lib.errors import ReexportError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MULTIPLIER = np.uint32(0x5BD1E995)
_SEED = np.uint32(0x9747B28C)
_POSITIVE = np.uint32(0x7FFFFFFF)


def murmur2(keys: pa.Array[Any]) -> NDArray[np.uint32]:
    """Hash each key of a string or binary array without nulls.

    Raises:
        ReexportError: a key is null; it would go to a random partition.
    """
    if keys.null_count:
        raise ReexportError(
            f"{keys.null_count} of {len(keys)} keys are null: a record without a key "
            "has no partition of its own, so filter them out"
        )
    keys = keys.cast(pa.large_binary())
    _, offset_buffer, data_buffer = keys.buffers()
    count = len(keys)
    if count == 0:
        return np.empty(0, np.uint32)
    # A sliced array shares its parent's buffers.
    offsets = np.frombuffer(offset_buffer, np.int64)[keys.offset :][: count + 1]
    data = np.zeros(int(offsets[-1]) + 4, np.uint8)
    if data_buffer is not None:
        data[:-4] = np.frombuffer(data_buffer, np.uint8)[: int(offsets[-1])]
    starts, lengths = offsets[:-1], np.diff(offsets)
    # Every four bytes as one number, at any place: no copy of the data.
    words = np.lib.stride_tricks.as_strided(
        data.view(), shape=(len(data) - 3, 4), strides=(1, 1)
    )
    with np.errstate(over="ignore"):
        h = _SEED ^ lengths.astype(np.uint32)
        blocks = lengths // 4
        for block in range(int(blocks.max())):
            rows = np.nonzero(blocks > block)[0]
            k = _words(words, starts[rows] + 4 * block) * _MULTIPLIER
            k = (k ^ (k >> np.uint32(24))) * _MULTIPLIER
            h[rows] = (h[rows] * _MULTIPLIER) ^ k
        rest = lengths & 3
        rows = np.nonzero(rest)[0]
        # The padding makes the last key's word readable; foreign bytes are masked.
        mask = (np.uint32(1) << (rest[rows] * 8).astype(np.uint32)) - np.uint32(1)
        tail = _words(words, starts[rows] + 4 * blocks[rows]) & mask
        h[rows] = (h[rows] ^ tail) * _MULTIPLIER
        h = (h ^ (h >> np.uint32(13))) * _MULTIPLIER
        return np.asarray(h ^ (h >> np.uint32(15)), np.uint32)


def choose_partitions(keys: pa.Array[Any], partitions: int) -> NDArray[np.int32]:
    """Choose each key's partition, 0 to ``partitions - 1``, as a producer does."""
    chosen = (murmur2(keys) & _POSITIVE) % np.uint32(partitions)
    return np.asarray(chosen, np.int32)


def _words(words: NDArray[np.uint8], places: NDArray[np.int64]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(words[places]).view("<u4")[:, 0].astype(np.uint32)
