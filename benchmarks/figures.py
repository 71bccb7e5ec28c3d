"""The arithmetic of the benchmark: medians, percentiles, ratios."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def median(values: Iterable[float | None]) -> float | None:
    """The median of the values; None if there are none."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of all do not exceed (nearest rank).

    Args:
        values: the values, in any order.
        share: above 0, and 1 at most; 0.99 for the 99th percentile.
    """
    if not 0 < share <= 1:
        raise ValueError(f"a share is more than 0 and 1 at the most, not {share}")
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """``part / whole``; None if either is missing or the whole is 0."""
    return part / whole if part is not None and whole else None


def best(
    medians: Mapping[str, float | None], *, lowest: bool = False
) -> tuple[str, float] | None:
    """The name with the best figure, and the figure; None if nothing was measured."""
    found = [(name, value) for name, value in medians.items() if value is not None]
    if not found:
        return None
    return (min if lowest else max)(found, key=lambda one: one[1])


def bucketed(
    points: Sequence[tuple[float, float]], width: float
) -> list[tuple[float, list[float]]]:
    """Group (time, value) points into spans of ``width``; their start names them."""
    buckets: dict[int, list[float]] = {}
    for time, value in points:
        buckets.setdefault(int(time // width), []).append(value)
    return [(number * width, buckets[number]) for number in sorted(buckets)]


def count_fullest(times: Sequence[float], seconds: float = 60.0) -> int:
    """Count the times in the fullest window; they are sorted."""
    first = most = 0
    for number, at in enumerate(times):
        while at - times[first] >= seconds:
            first += 1
        most = max(most, number - first + 1)
    return most
