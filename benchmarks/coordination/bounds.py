"""What the figures must be at least or at most, whatever the machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

BOUNDS: dict[str, tuple[float, float]] = {
    "race_50_winners": (1, 1),
    "race_50_winners_min": (1, 1),
    "takeover_intervals_min": (2, 3),
    "takeover_intervals_max": (2, 3),
    "handover_clean_ms": (0, 1_000),
    "fold_events_s": (200_000, math.inf),
    "consume_vs_group": (0.9, math.inf),
}
"""Of each figure, the least and the most."""


def find_missed(figures: Mapping[str, float | None]) -> list[str]:
    """Name each figure that is not within its bounds, or has no value."""
    missed = []
    for name, (least, most) in BOUNDS.items():
        if name not in figures:
            continue  # It was not measured in this run.
        value = figures[name]
        if value is None or not least <= value <= most:
            told = "nothing" if value is None else f"{value:g}"
            missed.append(f"{name} is {told}, and must be {_spell(least, most)}")
    return missed


def _spell(least: float, most: float) -> str:
    if least == most:
        return f"{least:,g}"
    if most == math.inf:
        return f"{least:,g} at least"
    return f"from {least:,g} to {most:,g}"
