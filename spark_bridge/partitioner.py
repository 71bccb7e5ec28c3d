"""The producers' choice of partition for a whole column of keys at once.

It equals :mod:`jobs_lib.partitioner` key by key. Each step of the hash is computed for
all keys that still have bytes left, over the bytes of one Arrow array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_MULTIPLIER = np.uint32(0x5BD1E995)
_SEED = np.uint32(0x9747B28C)
_POSITIVE = np.uint32(0x7FFFFFFF)


def murmur2(keys: Sequence[str] | pa.LargeStringArray) -> NDArray[np.uint32]:
    """The hash of each key's UTF-8, as an unsigned 32-bit integer."""
    if not len(keys):
        return np.empty(0, np.uint32)
    if not isinstance(keys, pa.LargeStringArray):
        keys = pa.array(keys, pa.large_string())
    _, offset_buffer, data_buffer = keys.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)
    offsets = offsets[keys.offset : keys.offset + len(keys) + 1]
    starts, lengths, size = offsets[:-1], np.diff(offsets), int(offsets[-1])
    # Padded, so that the word of the last key's tail can be read, too.
    data = np.zeros(size + 4, np.uint8)
    if data_buffer is not None:
        data[:size] = np.frombuffer(data_buffer, np.uint8)[:size]
    # Every four bytes as one number, at any place: no copy of the data.
    words: NDArray[np.uint32] = np.ndarray((size + 1,), "<u4", data, 0, (1,))
    # numpy warns when single numbers overflow, as they must here.
    with np.errstate(over="ignore"):
        h = _SEED ^ lengths.astype(np.uint32)
        blocks = lengths // 4
        shortest = int(blocks.min())
        for block in range(int(blocks.max())):
            # All of them, as long as none ends: that is no copy.
            rows = np.nonzero(blocks > block)[0] if block >= shortest else slice(None)
            k = words[starts[rows] + 4 * block] * _MULTIPLIER
            k = (k ^ (k >> np.uint32(24))) * _MULTIPLIER
            h[rows] = (h[rows] * _MULTIPLIER) ^ k
        rest = lengths & 3
        rows = np.nonzero(rest)[0]
        # The word of a tail also holds bytes of the next key: mask them.
        mask = (np.uint32(1) << (8 * rest[rows]).astype(np.uint32)) - np.uint32(1)
        tail = words[starts[rows] + 4 * blocks[rows]] & mask
        h[rows] = (h[rows] ^ tail) * _MULTIPLIER
        h = (h ^ (h >> np.uint32(13))) * _MULTIPLIER
        return np.asarray(h ^ (h >> np.uint32(15)), np.uint32)


def choose_partitions(
    keys: Sequence[str] | pa.LargeStringArray, partitions: int
) -> NDArray[np.uint32]:
    """The partition that a producer chooses for each key, in the order of the keys."""
    return (murmur2(keys) & _POSITIVE) % np.uint32(partitions)
