"""A consumer, a relay, and a re-export that read or write one topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.processes.kinds import kind

if TYPE_CHECKING:
    from jobs_lib import App


# A short session: the group waits this long for a killed member.
@kind("consumers", consumer_block=7, session_timeout=2)
def sums(app: App, topic: str) -> None:
    """A consumer that adds up the values of each partition."""

    @app.consumer(topic, group=f"{topic}-g")
    def add(record: Any, connection: Any) -> None:
        connection.execute(
            "insert into sums as s values (%s, %s)"
            " on conflict (partition) do update set n = s.n + excluded.n",
            (record.partition, record.value),
        )


@kind("consumers", session_timeout=6)
def flight_sums(app: App, topic: str) -> None:
    """A consumer that adds up the flights of each partition."""

    @app.consumer(topic, group=f"{topic}-g")
    def add(record: Any, connection: Any) -> None:
        flight = record.value
        connection.execute(
            "insert into flight_sums as s values (%s, 1, %s, %s, %s)"
            " on conflict (partition) do update set records = s.records + 1,"
            " ids = s.ids + excluded.ids, squares = s.squares + excluded.squares,"
            " minutes = s.minutes + excluded.minutes",
            (
                record.partition,
                flight["id"],
                flight["id"] ** 2,
                flight["minutes"],
            ),
        )


@kind("relay")
def relay(app: App, topic: str) -> None:
    """A relay."""
    app.topic(topic)


@kind("executor", "relay")
def reexport(app: App, topic: str) -> None:
    """A pod that exports items again."""
    items = app.topic(topic, compacted=True)

    @app.entity(items, source="items", key="id")
    def load_items(connection: Any, keys: list[str]) -> dict[str, Any]:
        rows = connection.execute(
            "select id, name, version from items where id = any (%s::int[])",
            ([*map(int, keys)],),
        )
        return {str(i): {"id": i, "name": n, "version": v} for i, n, v in rows}


@dataclass
class FlightState:
    """What the topic has of a flight."""

    version: int
    delay: int | None


@dataclass
class AircraftState:
    """What the second topic has of an aircraft."""

    version: int


# A busy machine makes no process count as dead, and a killed one soon does.
@kind("executor", "relay", heartbeat_interval=0.5, stale_after=6.0)
def flights(app: App, topic: str, second: str) -> None:
    """A pod that exports all flights again, and aircraft."""
    states = app.topic(topic, value=FlightState, compacted=True)
    others = app.topic(second, value=AircraftState, compacted=True)

    @app.entity(states, source="flights", key="id")
    def load_flights(connection: Any, keys: list[str]) -> dict[str, FlightState]:
        rows = connection.execute(
            "select id::text, version, delay from flights where id = any (%s::int[])",
            ([*map(int, keys)],),
        )
        return {key: FlightState(version, delay) for key, version, delay in rows}

    @app.entity(others, source="aircraft", key="tail")
    def load_aircraft(connection: Any, keys: list[str]) -> dict[str, AircraftState]:
        rows = connection.execute(
            "select tail, version from aircraft where tail = any (%s)", (keys,)
        )
        return {tail: AircraftState(version) for tail, version in rows}
