"""Right and wrong uses of the public interface; a wrong line ends in `# error`.

This file never runs, and `make check` leaves it out: test_uses.py compares what mypy
and pyright report.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_type

import psycopg

from jobs_lib import (
    App,
    Discard,
    EntityState,
    Exact,
    Job,
    Published,
    Record,
    Snooze,
    exponential,
    reexport,
)
from jobs_lib.consuming.answer_steps import ValidSince
from jobs_lib.outbox.topic import Topic
from jobs_lib.streams.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg import AsyncConnection, Connection

    from jobs_lib.testing import Jobs


@dataclass
class AircraftState:
    """The values of a topic."""

    tail: str
    version: int


@dataclass
class Flight:
    """The values of another topic."""

    tail: str


app = App("flights")
conn = psycopg.connect()


# Streams: `publish` takes the values that are declared.

flights = app.stream("flights", value=Flight, acks=1)
assert_type(flights, Stream[Flight])
assert_type(flights.publish("N1", Flight("N1"), request="r1"), Published)
flights.publish("N1", None)
flights.publish("N1", "N1")  # error
flights.publish(1, None)  # error
app.stream("more", acks=2)  # error


# Jobs: `enqueue` has the signature of the handler.


@app.job(group="tail")
def tell_partner(job: Job, tail: str, flight: int = 0) -> None: ...


tell_partner.enqueue(conn, tail="N1", flight=7)
tell_partner.enqueue(conn, "N1")
tell_partner.options(run_at=datetime.now(UTC)).enqueue(conn, tail="N1")
tell_partner.options(delay=0.5).enqueue(conn, tail="N1")
tell_partner.options(delay="5").enqueue(conn, tail="N1")  # error
tell_partner.enqueue(conn, tail=1)  # error
tell_partner.enqueue(conn, tail="N1", fligth=7)  # error
tell_partner.enqueue(conn)  # error
tell_partner.enqueue(tail="N1")  # error
tell_partner.enqueue("postgresql://host/db", tail="N1")  # error
tell_partner.options(run_at="tomorrow").enqueue(conn, tail="N1")  # error


tell_partner.enqueue_many(conn, [{"tail": "N1"}])
tell_partner.enqueue_many(conn, ["N1"])  # error


@app.job()  # error
def no_job(tail: str) -> None: ...


@app.job(group=lambda tail: tail, retry=exponential(first=0.2, cap=5))
def patient(job: Job, tail: str) -> None:
    assert_type(job.id, int)
    with job.transaction() as connection:
        connection.execute("select 1")
    if job.attempt > 3:
        raise Discard("too often")
    raise Snooze(seconds="30")  # error


@app.job(retry="5")  # error
def impatient(job: Job) -> None: ...


# The test kit: its assertions take any job type.


def test_kit(jobs: Jobs) -> None:
    jobs.assert_enqueued(tell_partner, tail="N1")
    jobs.assert_not_enqueued(tell_partner)
    assert_type(jobs.enqueued(tell_partner)[0].attempt, int)
    jobs.assert_enqueued("tell_partner")  # error


# Topics: a sent value has the type that the topic declares.

states = app.topic("states", value=AircraftState, compacted=True)
assert_type(states, Topic[AircraftState])
states.send(conn, key="N1", value=AircraftState("N1", 1), version=1)
states.tombstone(conn, key="N1")
states.send(conn, key="N1", value=Flight("N1"))  # error
states.send(conn, key="N1", value={"tail": "N1", "version": 1})  # error
states.send(conn, key="N1", value=b"{}")  # error
states.send(conn, key="N1", value=None)  # error
states.send(conn, key=1, value=AircraftState("N1", 1))  # error
states.tombstone(conn, key=None)  # error

either = app.topic("either", value=AircraftState | Flight)
either.send(conn, key="N1", value=Flight("N1"))
either.send(conn, key="N1", value="N1")  # error

lists = app.topic("lists", value=list[int])
lists.send(conn, key=None, value=[1, 2])
lists.send(conn, key=None, value=["1"])  # error

raw = app.topic("raw", value=bytes)
raw.send(conn, key=None, value=b"\x00")
raw.send(conn, key=None, value="text")  # error

anything = app.topic("anything")
anything.send(conn, key="N1", value={"n": 1})
app.topic("wrong", value=7)  # error

avro = app.topic("avro", value=Flight, schema=Path("flight.avsc"))
avro.send(conn, key="N1", value=AircraftState("N1", 1))  # error
app.topic("written-out", value=Flight, schema={"type": "record", "name": "Flight"})
app.topic("no-path", value=Flight, schema="flight.avsc")  # error


# Consumers: the record's value has the type that the decorator declares.


@app.consumer("flights", group="tracker", value=Flight)
def track(record: Record[Flight], conn: Connection[Any]) -> None:
    assert_type(record.value, Flight)
    tell_partner.enqueue(conn, tail=record.value.tail)
    tell_partner.enqueue(conn, tail=record.value)  # error


@app.consumer("flights", group="with-tombstones", value=Flight)
def track_gone(record: Record[Flight | None], conn: Connection[Any]) -> None:
    print(record.value.tail)  # error


@app.consumer("flights", group="loose", value=Flight)
def loose(record: Record, conn: Connection[Any]) -> None:
    print(record.value.whatever)


@app.consumer("flights", group="avro", value=Flight, schema="registered")
def avro_values(record: Record[Flight], conn: Connection[Any]) -> None: ...


app.consumer("flights", group="misspelt", schema="registred")  # error


@app.consumer("flights", group="undeclared")
def undeclared(record: Record[Flight], conn: Connection[Any]) -> None: ...


@app.consumer("flights", group="other", value=Flight)  # error
def other(record: Record[AircraftState], conn: Connection[Any]) -> None: ...


@app.consumer("flights", group="no-connection", value=Flight)  # error
def no_connection(record: Record[Flight]) -> None: ...


# A key has the declared type, too.


@app.consumer("flights", group="by-number", value=Flight, key_type=int)
def by_number(record: Record[Flight, int], conn: Connection[Any]) -> None:
    assert_type(record.key, int | None)


@app.consumer("flights", group="by-text", value=Flight, key_type=int)  # error
def by_text(record: Record[Flight], conn: Connection[Any]) -> None: ...


app.consumer("flights", group="by-float", key_type=float)  # error
app.consumer("flights", group="per-batch", per="batch")  # error
app.batch(after=[("flights", "by-number")])  # error
app.consumer(Exact("their.flights"), group=Exact("theirs"))


# A handler takes blocks, and may be async; then its connection is, too.


@app.consumer("flights", group="blocks", value=Flight, per="block")
def track_all(records: list[Record[Flight]], conn: Connection[Any]) -> None:
    assert_type(records[0].key, str | None)


@app.consumer("flights", group="async", value=Flight)
async def track_later(record: Record[Flight], conn: AsyncConnection[Any]) -> None: ...


@app.consumer("flights", group="plain-connection", value=Flight)  # error
async def track_wrong(record: Record[Flight], conn: Connection[Any]) -> None: ...


# The function still exists, and a test can call it.
handler: Callable[[Record[Flight], Connection[Any]], None] = track


# Read models and entities.


@app.read_model("states", table="t", key="tail", group="board", value=AircraftState)
def row(record: Record[AircraftState]) -> dict[str, Any]:
    return {"v": record.value.version, "delay": record.value.delay}  # error


@app.read_model("n", table="t", key="n", group="numbers", key_type=int)
def numbered(record: Record[Any, int]) -> dict[str, Any]:
    return {"n": record.key}


def tell(records: list[Record[AircraftState | None]], conn: Any) -> None:
    for record in records:
        print(record.value.delay)  # error


def tell_numbers(records: list[Record[int]], conn: Any) -> None: ...


@app.read_model("c", table="c", key="k", group="g", value=AircraftState, on_change=tell)
def changed(record: Record[AircraftState]) -> dict[str, Any]:
    return {"v": record.value.version}


app.read_model(
    "d",
    table="d",
    key="k",
    group="g",
    value=AircraftState,
    on_change=tell_numbers,  # error
)


@app.read_model("s", table="t", key="k", group="g", value=AircraftState)  # error
def not_a_row(record: Record[AircraftState]) -> int:
    return record.value.version


answers = app.answers(row)
since = answers.valid_since(conn).at
assert_type(answers.put(conn, key="N1", version=1, entity={"v": 1}), bool)
answers.put(conn, key="N1", version="1", entity={})  # error
answers.put(conn, key=1.5, version=1, entity={})  # error
states_of_others = [EntityState("N1", 1, None)]
assert_type(answers.newer(conn, given=states_of_others), list[EntityState])
answers.merge([{"tail": "N1"}], answers.newer(conn), belongs=lambda row: row["v"] > 1)
version: int = answers.wait_for(conn, key="N1", version=1).version  # error


async def ask(connection: AsyncConnection[Any]) -> None:
    found = await answers.wait_for(connection, key="N1", version=1, timeout=0.5)
    assert_type(found.is_gone if found is not None else False, bool)
    assert_type(answers.valid_since(connection), ValidSince)  # error


@app.entity(states, source="aircraft", key="tail")
def load(conn: Connection[Any], tails: list[str]) -> dict[str, AircraftState]:
    return {tail: AircraftState(tail, 1) for tail in tails}


@app.entity(states, source="aircraft", key="tail")  # error
def load_flights(conn: Connection[Any], tails: list[str]) -> dict[str, Flight]:
    return {tail: Flight(tail) for tail in tails}


reexport.start(app.database(), app.entities["aircraft"], rate=6_000)
reexport.start(app.database(), "aircraft", rate=6_000)  # error
reexport.start(app.database(), app.entities["aircraft"])  # error
assert_type(reexport.status(app.database(), "aircraft").sent, int)
