"""The flights service: it keeps the state of every aircraft, and informs a partner.

For each flight, one transaction writes the aircraft's row, the new state to the outbox,
a job for the arrival, and the offset in the topic. It writes all of these or none.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import httpx
from psycopg import Connection  # noqa: TC002
from psycopg.rows import class_row

from examples.flights.flights import Flight
from jobs_lib import App, Job, Record, Snooze, exponential

app = App("flights", home="flights")
logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
partner = httpx.Client(base_url=os.environ.get("PARTNER_URL", ""), timeout=5)


@dataclass
class Aircraft:
    """An aircraft's state, as in the topic ``aircraft-state``."""

    tail: str
    flights: int
    airport: str
    delay: int
    version: int


aircraft_state = app.topic(
    "aircraft-state",
    value=Aircraft,
    compacted=True,
    partitions=4,
    merge=False,  # each state is sent, so that the demo can count them all
)


@app.job(group="tail", retry=exponential(first=0.2, cap=5))
def tell_partner(job: Job, tail: str, flight: int, destination: str) -> None:
    """Inform the partner about an arrival; those of one aircraft go in their order."""
    reply = partner.post(
        "/arrivals",
        json={"tail": tail, "flight": flight, "destination": destination},
        headers={"Idempotency-Key": job.idempotency_key},
    )
    if reply.status_code == 503:
        raise Snooze(1, "the partner is away")
    reply.raise_for_status()


@app.consumer("flights", group="flight-tracker", value=Flight)
def track(record: Record[Flight], conn: Connection[Any]) -> None:
    """Handle one flight in the transaction that also stores the offset."""
    flight = record.value
    conn.execute("insert into handled values (%s, %s)", (flight.id, flight.tail))
    if flight.tail is None:
        return
    aircraft = move_aircraft(conn, flight)
    aircraft_state.send(
        conn, key=aircraft.tail, value=aircraft, version=aircraft.version
    )
    if flight.arrived:
        tell_partner.enqueue(
            conn,
            tail=aircraft.tail,
            flight=flight.id,
            destination=flight.destination,
        )


def move_aircraft(conn: Connection[Any], flight: Flight) -> Aircraft:
    """Return the state of the flight's aircraft after the flight."""
    with conn.cursor(row_factory=class_row(Aircraft)) as cursor:
        moved = cursor.execute(
            """
            insert into aircraft as a (tail, flights, airport, delay, version)
            values (%s, 1, %s, %s, 1)
            on conflict (tail) do update set
                flights = a.flights + 1,
                airport = excluded.airport,
                delay = a.delay + excluded.delay,
                version = a.version + 1
            returning *
            """,
            (
                flight.tail,
                flight.destination if flight.arrived else flight.origin,
                flight.delay or 0,
            ),
        ).fetchone()
    assert moved is not None
    return moved


@app.entity(aircraft_state, source="aircraft", key="tail")
def load_aircraft(conn: Connection[Any], tails: list[str]) -> dict[str, Aircraft]:
    """The states of these aircraft, for a re-export."""
    with conn.cursor(row_factory=class_row(Aircraft)) as cursor:
        cursor.execute("select * from aircraft where tail = any(%s)", (tails,))
        return {aircraft.tail: aircraft for aircraft in cursor}
