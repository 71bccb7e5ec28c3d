"""Draw a measurement over time: ``python -m benchmarks.chart DATA PICTURE``."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path


def draw_held_xmin(data: Path, picture: Path) -> Path | None:
    """Draw throughput and pick-up under an old transaction.

    Args:
        data: the file that the measure ``held_xmin`` wrote.
        picture: the SVG to write.

    Returns:
        The picture; None if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    curves = json.loads(data.read_text())
    figure = Figure(figsize=(8, 6), layout="constrained")
    rate, wait = figure.subplots(2, 1, sharex=True)
    for name, curve in curves.items():
        # The end of the measurement cuts the last span short.
        minutes = [point["at_s"] / 60 for point in curve[:-1]]
        rate.plot(minutes, [point["jobs_s"] for point in curve[:-1]], label=name)
        wait.plot(minutes, [point["p99_ms"] for point in curve[:-1]], label=name)
    rate.set_title("One transaction stays open, 800 jobs/s are sent")
    rate.set_ylabel("jobs started a second")
    rate.set_ylim(bottom=0)
    rate.legend()
    wait.set_ylabel("pick-up, p99, ms")
    wait.set_yscale("log")
    wait.set_xlabel("minutes since the transaction began")
    for axes in (rate, wait):
        axes.grid(alpha=0.3)
    figure.savefig(picture, metadata={"Date": None})
    return picture


if __name__ == "__main__":
    draw_held_xmin(Path(sys.argv[1]), Path(sys.argv[2]))
