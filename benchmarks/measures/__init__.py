"""The measures by their names for ``--only``, in the order in which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.measures import (
    drain,
    enqueue,
    groups,
    held_xmin,
    history,
    idle,
    limits,
    memory,
    metrics,
    over_limit,
    pickup,
    raw_sql,
    steps,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.bench import Bench, Figures

MEASURES: dict[str, Callable[[Bench], Figures]] = {
    "drain": drain.measure,
    "raw_sql": raw_sql.measure,
    "groups": groups.measure,
    "hot_group": groups.measure_hot,
    "blocked_heads": groups.measure_blocked,
    "crowded": groups.measure_crowded,
    "pickup": pickup.measure,
    "pickup_steps": steps.measure,
    "enqueue": enqueue.measure,
    "bulk": enqueue.measure_bulk,
    "history": history.measure,
    "history_drop": history.measure_drop,
    "memory": memory.measure,
    "metrics": metrics.measure,
    "limits": limits.measure,
    "over_limit": over_limit.measure,
    "idle": idle.measure,
    "drain_1m": drain.measure_1m,
    "drain_10m": drain.measure_10m,
    "held_xmin": held_xmin.measure,
}
