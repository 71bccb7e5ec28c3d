"""A history of the aircraft as a Parquet file, as an older system left it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

RETIRED = [f"RETIRED-{number:02}" for number in range(1, 26)]
"""Aircraft that only the history knows."""


def write_history(path: Path, states: Mapping[str, Sequence[Mapping[str, Any]]]) -> int:
    """Write all states but the newest of each aircraft, and those of the retired ones.

    Returns how many rows there are.
    """
    # Imported here: the services run without it.
    import pyarrow as pa
    from pyarrow import parquet

    rows = [dict(state) for of_one in states.values() for state in of_one[:-1]]
    rows += [
        {"tail": tail, "flights": 1, "airport": "EWR", "delay": 0, "version": 1}
        for tail in RETIRED
    ]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return len(rows)
