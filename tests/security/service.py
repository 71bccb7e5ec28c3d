"""A service with a part of every kind, for commands that name an app."""

from __future__ import annotations

from typing import Any

from jobs_lib import App

app = App("guarded", home="guarded")
plain = App("plain")
states = app.topic("guarded-states", value=int, compacted=True)
events = app.stream("guarded-events", value=int, partitions=3)


@app.consumer("guarded", group="guarded-group", repeatable=True)
def handle(record: Any, connection: Any) -> None:
    """Do nothing."""


@app.consumer(
    "guarded-states",
    group="guarded-waiting",
    after=[("guarded-states", "guarded-others")],
)
def wait(record: Any, connection: Any) -> None:
    """Do nothing."""


@app.job()
def work(job: Any) -> None:
    """Do nothing."""


@plain.job(name="work")
def work_without_kafka(job: Any) -> None:
    """Do nothing."""


@app.entity(states, source="things", key="id")
def load(connection: Any, keys: list[str]) -> dict[str, int]:
    """Load the same state for all keys."""
    return dict.fromkeys(keys, 1)
