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


def murmur2(keys: Sequence[str]) -> NDArray[np.uint32]:
    """The hash of each key's UTF-8, as an unsigned 32-bit integer."""
    if not keys:
        return np.empty(0, np.uint32)
    _, offset_buffer, data_buffer = pa.array(keys, pa.large_string()).buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[: len(keys) + 1]
    starts, lengths, size = offsets[:-1], np.diff(offsets), int(offsets[-1])
    # Padded, so that the word of the last key's tail can be read, too.
    data = np.zeros(size + 4, np.uint8)
    if data_buffer is not None:
        data[:size] = np.frombuffer(data_buffer, np.uint8)[:size]
    # Every four bytes as one number, at any place: no copy of the data.
    words = np.lib.stride_tricks.sliding_window_view(data, 4)
    # numpy warns when single numbers overflow, as they must here.
    with np.errstate(over="ignore"):
        h = _SEED ^ lengths.astype(np.uint32)
        blocks = lengths // 4
        for block in range(int(blocks.max())):
            rows = np.nonzero(blocks > block)[0]
            k = _read_words(words, starts[rows] + 4 * block) * _MULTIPLIER
            k = (k ^ (k >> np.uint32(24))) * _MULTIPLIER
            h[rows] = (h[rows] * _MULTIPLIER) ^ k
        rest = lengths & 3
        rows = np.nonzero(rest)[0]
        # The word of a tail also holds bytes of the next key: mask them.
        mask = (np.uint32(1) << (8 * rest[rows]).astype(np.uint32)) - np.uint32(1)
        tail = _read_words(words, starts[rows] + 4 * blocks[rows]) & mask
        h[rows] = (h[rows] ^ tail) * _MULTIPLIER
        h = (h ^ (h >> np.uint32(13))) * _MULTIPLIER
        return np.asarray(h ^ (h >> np.uint32(15)), np.uint32)


def choose_partitions(keys: Sequence[str], partitions: int) -> list[int]:
    """The partition that a producer chooses for each key, in the order of the keys."""
    chosen: list[int] = ((murmur2(keys) & _POSITIVE) % np.uint32(partitions)).tolist()
    return chosen


def _read_words(
    words: NDArray[np.uint8], places: NDArray[np.int64]
) -> NDArray[np.uint32]:
    return np.ascontiguousarray(words[places]).view("<u4")[:, 0].astype(np.uint32)
