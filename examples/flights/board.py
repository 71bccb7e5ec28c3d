"""The board: another service. Its own database has a read model of the aircraft."""

from __future__ import annotations

from typing import Any

from jobs_lib import App, Record

app = App("board")


@app.read_model("aircraft-state", table="aircraft_rm", key="tail", group="board")
def aircraft_rm(record: Record) -> dict[str, Any]:
    """The row of one aircraft; the library adds its key and version."""
    state = record.value
    return {
        "airport": state["airport"],
        "flights": state["flights"],
        "minutes_late": state["delay"],
    }
