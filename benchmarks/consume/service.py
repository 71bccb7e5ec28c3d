"""The service that reads: a read model, a handler, or a handler of whole blocks."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from benchmarks.consume.statements import INSERT
from jobs_lib import App, ConfigurationError, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    Connection = psycopg.Connection[Any]

TOPIC = os.environ.get("BENCH_TOPIC", "bench")
GROUP = os.environ.get("BENCH_GROUP", "bench")
OPEN_GROUP = "bench-open"
WAIT_SECONDS = 0.001


def declare_read_model(app: App) -> None:
    """Keep the table equal to the topic."""

    @app.read_model(TOPIC, table="aircraft_rm", key="tail", group=GROUP)
    def aircraft_rm(record: Record) -> dict[str, Any]:
        state = record.value
        return {
            "airport": state["airport"],
            "flights": state["flights"],
            "minutes_late": state["minutes_late"],
        }


def declare_two_versions(app: App) -> None:
    """Keep two versions of the table."""
    for version in (1, 2):

        @app.read_model(
            TOPIC, table="aircraft_rm", key="tail", group=GROUP, version=version
        )
        def aircraft_rm(record: Record) -> dict[str, Any]:
            return {"flights": record.value["flights"], "minutes_late": 0}


def declare_slow_read_model(app: App) -> None:
    """Keep the table equal to the topic; each row waits, as for another system."""

    @app.read_model(TOPIC, table="aircraft_rm", key="tail", group=GROUP)
    def aircraft_rm(record: Record) -> dict[str, Any]:
        time.sleep(WAIT_SECONDS)
        return {"flights": record.value["flights"]}


def declare_handler(app: App) -> None:
    """Insert a row for each record."""

    @app.consumer(TOPIC, group=GROUP)
    def handle(record: Record, conn: Connection) -> None:
        conn.execute(INSERT, _row(record))


def declare_gated_handler(app: App) -> None:
    """Do the same behind a group that has handled everything already."""

    @app.consumer(TOPIC, group=GROUP, after=[(TOPIC, OPEN_GROUP)])
    def handle(record: Record, conn: Connection) -> None:
        conn.execute(INSERT, _row(record))


def declare_block_handler(app: App) -> None:
    """Insert the rows of a block at once."""
    # A library that hands out no blocks refuses the argument.
    whole: dict[str, Any] = {"per": "block"}

    def handle_block(records: Sequence[Record], conn: Connection) -> None:
        with conn.cursor() as cursor:
            cursor.executemany(INSERT, [_row(record) for record in records])

    handler: Any = handle_block
    app.consumer(TOPIC, group=GROUP, **whole)(handler)


def takes_blocks() -> bool:
    """Whether a consumer can be declared that is given whole blocks."""
    try:
        declare_block_handler(App("bench"))
    except (ConfigurationError, TypeError):
        return False
    return True


def _row(record: Record) -> tuple[Any, ...]:
    state = record.value
    if state is None:
        return record.key, None, None, None, None
    return (
        record.key,
        state["airport"],
        state["flights"],
        state["minutes_late"],
        state["version"],
    )


KINDS = {
    "read_model": declare_read_model,
    "slow_read_model": declare_slow_read_model,
    "two_versions": declare_two_versions,
    "handler": declare_handler,
    "block_handler": declare_block_handler,
    "gated_handler": declare_gated_handler,
}
app = App("bench")
KINDS[os.environ.get("BENCH_KIND", "read_model")](app)
