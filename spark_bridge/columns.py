"""The keys of a range as one Arrow column, from the table to the chunk jobs.

No step in Python is taken for a key: the server sends the bytes of all keys and their
lengths, numpy chooses the partitions, and Arrow writes the lines of COPY.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jobs_lib.kafka.checks import KEY_LIMIT
from jobs_lib.reexport.loading import frame_chunks, refuse_empty_key, refuse_long_key
from spark_bridge.partitioner import choose_partitions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    import psycopg
    from numpy.typing import NDArray

    from jobs_lib.postgres.queries import Queries
    from jobs_lib.reexport import Loading, Source

_BLOCK = 1 << 20
_TEXT = pa.large_string()
_CONTROLS = {"\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r"}
"""What JSON calls these control characters; it writes the others as numbers."""


class KeyColumn:
    """The keys of a range, each once."""

    def __init__(self, keys: pa.LargeStringArray) -> None:
        self.keys = keys
        """Their texts."""

    @classmethod
    def read(
        cls,
        connection: psycopg.Connection[Any],
        queries: Queries,
        source: Source,
        lower: str | None,
        upper: str | None,
    ) -> KeyColumn:
        """Read the keys from one bound up to the other."""
        query = source.packed_keys_between(queries, lower, upper)
        with connection.cursor(binary=True) as cursor:
            row = cursor.execute(query).fetchone()
        data, lengths = row if row is not None and row[0] is not None else (b"", b"")
        offsets = np.zeros(len(lengths) // 4 + 1, np.int64)
        np.cumsum(np.frombuffer(lengths, ">i4"), out=offsets[1:])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return cls(pa.Array.from_buffers(_TEXT, len(offsets) - 1, buffers))

    def __len__(self) -> int:
        return len(self.keys)

    def check(self) -> None:
        """Refuse keys that the outbox cannot store.

        Raises:
            ReexportError: a key is empty or too long.
        """
        if not len(self):
            return
        lengths = pc.binary_length(self.keys)
        bounds = pc.min_max(lengths).as_py()
        if bounds["min"] == 0:
            raise refuse_empty_key()
        if bounds["max"] > KEY_LIMIT:
            longest = self.keys[pc.index(lengths, bounds["max"]).as_py()]
            raise refuse_long_key(len(longest.as_py()))

    def encode(
        self, loading: Loading, due: datetime | None = None
    ) -> Iterator[bytes | memoryview]:
        """Yield the chunk jobs as lines of COPY's text format, in blocks."""
        if not len(self):
            return
        partitions = choose_partitions(self.keys, loading.partitions)
        order = np.argsort(partitions, kind="stable")
        counts = np.bincount(partitions, minlength=loading.partitions)
        chunks, offsets = _cut(counts, loading.chunk)
        quoted = _quote(self.keys.take(pa.array(order)))
        lists = pa.LargeListArray.from_arrays(pa.array(offsets), quoted)
        origins = [f"{loading.home}/{number}" for number in range(loading.partitions)]
        head, tail = frame_chunks(loading, due)
        lines = _join(
            pa.array(origins, _TEXT).take(pa.array(chunks)),
            head + "[",
            pc.binary_join(lists, pa.scalar(", ", _TEXT)),
            "]" + tail,
        )
        text = _bytes_of(lines)
        for start in range(0, len(text), _BLOCK):
            yield text[start : start + _BLOCK]


def _cut(
    counts: NDArray[np.int64], chunk: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut each partition's keys into chunks.

    Returns the partition of each chunk, and where the chunks begin and end.
    """
    numbers = -(-counts // chunk)
    partitions = np.repeat(np.arange(len(counts)), numbers)
    # The number of each chunk within its partition.
    within = np.arange(numbers.sum()) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    starts = np.repeat(np.cumsum(counts) - counts, numbers) + within * chunk
    return partitions, np.append(starts, counts.sum())


def _quote(keys: pa.LargeStringArray) -> pa.LargeStringArray:
    """Write each key as a JSON string, with the backslashes that COPY needs."""
    found = np.bincount(np.frombuffer(_bytes_of(keys), np.uint8), minlength=128)
    # The backslash first: the others are written with one.
    if found[ord("\\")]:
        keys = pc.replace_substring(keys, "\\", "\\\\\\\\")
    if found[ord('"')]:
        keys = pc.replace_substring(keys, '"', '\\\\"')
    for code in np.nonzero(found[:32])[0].tolist():
        escape = _CONTROLS.get(chr(code), f"u{code:04x}")
        keys = pc.replace_substring(keys, chr(code), f"\\\\{escape}")
    return _join('"', keys, '"')


def _join(*parts: pa.LargeStringArray | str) -> pa.LargeStringArray:
    """Write texts one behind the other, in each row."""
    given = [pa.scalar(one, _TEXT) if isinstance(one, str) else one for one in parts]
    return pc.binary_join_element_wise(*given, pa.scalar("", _TEXT))


def _bytes_of(texts: pa.LargeStringArray) -> memoryview:
    """The bytes of all texts, one behind the other."""
    _, offset_buffer, data = texts.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)
    start, end = offsets[texts.offset], offsets[texts.offset + len(texts)]
    return memoryview(data if data is not None else b"")[start:end]
