"""The facts at the end of the demo, as pure functions of the data that were found.

The expected results are computed from the flights alone, and compared with the tables,
the topic and the partner's log. No counter of jobs_lib is used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime

    from examples.flights.flights import Flight

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Fact:
    """One line of the summary."""

    name: str
    holds: bool
    measured: str


@dataclass(frozen=True)
class State:
    """One record of the topic ``aircraft-state``."""

    tail: str
    value: Row | None
    """None: the aircraft is gone."""
    cause: str
    """``live``, or ``reexport``."""
    at: float
    """The time at which the broker appended it, in seconds since 1970."""

    @property
    def version(self) -> int:
        """How many changes the aircraft had gone through."""
        return int(self.value["version"]) if self.value is not None else 0


@dataclass(frozen=True)
class Post:
    """One arrival that the partner accepted."""

    tail: str
    flight: int
    repeat: bool


def expected_states(flights: Iterable[Flight]) -> dict[str, list[Row]]:
    """Every state of every aircraft, in order, as the service should compute them."""
    states: dict[str, list[Row]] = defaultdict(list)
    for flight in flights:
        if flight.tail is None:
            continue
        of_aircraft = states[flight.tail]
        before = of_aircraft[-1] if of_aircraft else {"flights": 0, "delay": 0}
        of_aircraft.append(
            {
                "tail": flight.tail,
                "flights": before["flights"] + 1,
                "airport": flight.destination if flight.arrived else flight.origin,
                "delay": before["delay"] + (flight.delay or 0),
                "version": len(of_aircraft) + 1,
            }
        )
    return dict(states)


def processed_once(flights: Sequence[Flight], handled: Sequence[int]) -> Fact:
    """Each flight was handled, and no flight twice."""
    times = Counter(handled)
    missing = sum(flight.id not in times for flight in flights)
    twice = sum(count > 1 for count in times.values())
    return Fact(
        "every flight processed once",
        not missing and not twice and len(times) == len(flights),
        f"{len(times):,} of {len(flights):,} flights, {missing} missing, {twice} twice",
    )


def counted_apart(
    flights: Iterable[Flight], handled: Iterable[int], aircraft: Mapping[str, Row]
) -> Fact:
    """Flights without a tail number were handled, and changed no aircraft's state."""
    wanted = sorted(flight.id for flight in flights if flight.tail is None)
    return Fact(
        "flights without a tail number counted apart",
        sorted(handled) == wanted and "NA" not in aircraft and "" not in aircraft,
        f"{len(wanted):,} flights, keyed by carrier and number",
    )


def table_right(
    expected: Mapping[str, Sequence[Row]], aircraft: Mapping[str, Row]
) -> Fact:
    """The service's table holds the last state of each aircraft."""
    wrong = _differences({tail: s[-1] for tail, s in expected.items()}, aircraft)
    return Fact(
        "the table holds the right state of every aircraft",
        not wrong,
        f"{len(aircraft):,} aircraft, {wrong} wrong",
    )


def partner_in_order(flights: Iterable[Flight], posts: Sequence[Post]) -> Fact:
    """The partner got each arrival, and those of an aircraft in their order."""
    wanted: dict[str, list[int]] = defaultdict(list)
    for flight in flights:
        if flight.arrived and flight.tail is not None:
            wanted[flight.tail].append(flight.id)
    told: dict[str, list[int]] = defaultdict(list)
    for post in posts:
        if not post.repeat:
            told[post.tail].append(post.flight)
    wrong = _differences(wanted, told)
    repeats = sum(post.repeat for post in posts)
    return Fact(
        "the partner's log: complete, and per aircraft in order",
        not wrong,
        f"{len(posts) - repeats:,} arrivals, {wrong} aircraft wrong, "
        f"{repeats} repeats dropped by their key",
    )


def topic_in_order(states: Sequence[State]) -> Fact:
    """No state follows a newer one of its aircraft, except as a repeat.

    A repeat is a record that is sent again after a crash: the same state.
    """
    highest: dict[str, int] = defaultdict(int)
    seen: set[tuple[str, int]] = set()
    wrong = repeats = 0
    for state in states:
        version = state.version
        if state.cause == "live" and (state.tail, version) in seen:
            repeats += 1
            continue
        if state.cause == "live":
            seen.add((state.tail, version))
        wrong += version < highest[state.tail]
        highest[state.tail] = max(version, highest[state.tail])
    return Fact(
        "the topic: per aircraft in order",
        not wrong,
        f"{len(states):,} records, {wrong} out of order, {repeats} repeats",
    )


def topic_complete(
    expected: Mapping[str, Sequence[Row]], states: Sequence[State]
) -> Fact:
    """Each change is in the topic; each record is a change; the last is the newest."""
    wanted = {(tail, row["version"]): row for tail, s in expected.items() for row in s}
    live = {(s.tail, s.version) for s in states if s.cause == "live"}
    missing = len(wanted.keys() - live)
    invented = sum(wanted.get((s.tail, s.version)) != s.value for s in states)
    last = {state.tail: state.value for state in states}
    stale = _differences({tail: s[-1] for tail, s in expected.items()}, last)
    return Fact(
        "the topic: no event missing, none invented",
        not missing and not invented and not stale,
        f"{len(wanted):,} changes, {missing} missing, {invented} invented, "
        f"{stale} aircraft end with an old state",
    )


def read_model_equal(
    aircraft: Mapping[str, Row], read_model: Mapping[str, Row]
) -> Fact:
    """The other service's read model and the table are the same, row by row."""
    names = {"minutes_late": "delay"}
    renamed = {
        tail: {names.get(column, column): value for column, value in row.items()}
        for tail, row in read_model.items()
    }
    wrong = _differences(aircraft, renamed)
    return Fact(
        "the read model equals the table, row by row",
        not wrong,
        f"{len(read_model):,} rows, {wrong} different",
    )


def reexport_complete(
    known: Iterable[str], since: float, states: Sequence[State]
) -> Fact:
    """Each aircraft known at the start was sent again, or a newer state of it was.

    Flights also went on: changes were sent between the first record of the re-export
    and its last.
    """
    wanted = set(known)
    again = {state.tail for state in states if state.cause == "reexport"}
    newer = {state.tail for state in states if state.at >= since} - again
    missing = len(wanted - again - newer)
    times = [state.at for state in states if state.cause == "reexport"]
    first, last = min(times, default=0.0), max(times, default=0.0)
    meanwhile = sum(s.cause == "live" and first <= s.at <= last for s in states)
    return Fact(
        "the re-export sent every aircraft, while flights went on",
        bool(wanted) and not missing and meanwhile > 0,
        f"{len(wanted & again):,} of {len(wanted):,} sent again, "
        f"{len(wanted & newer):,} had a newer state on its way, {missing} missing; "
        f"{meanwhile:,} changes meanwhile",
    )


def reexport_rate(states: Iterable[State], limit: int) -> Fact:
    """In no minute were more records re-exported than its limit allows.

    A shorter re-export is measured over its whole length, with the burst of 1.5 % that
    the limit allows.
    """
    times = sorted(state.at for state in states if state.cause == "reexport")
    window = min(60.0, times[-1] - times[0]) if times else 0.0
    allowed = limit * min(1.0, window / 60 + 0.015)
    peak = most_within(times, window)
    return Fact(
        "the re-export's peak rate is within its limit",
        0 < peak <= allowed,
        f"{peak:,} records in the fullest {window:.0f} s, limit {allowed:,.0f}",
    )


def history_filled(retired: Iterable[str], states: Sequence[State]) -> Fact:
    """What only the history knew was sent from there."""
    wanted = set(retired)
    sent = {s.tail for s in states if s.tail in wanted and s.value is not None}
    return Fact(
        "the Parquet history filled what the topic had not",
        sent == wanted,
        f"{len(sent)} of {len(wanted)} retired aircraft sent",
    )


def stale_removed(
    retired: Iterable[str], states: Iterable[State], read_model: Mapping[str, Row]
) -> Fact:
    """Keys without a row ended, and no others; the read model has none of them."""
    wanted = set(retired)
    last = {state.tail: state.value for state in states}
    gone = {tail for tail, value in last.items() if value is None}
    left = len(wanted & read_model.keys())
    return Fact(
        "keys that the table has not were removed, and no others",
        gone == wanted and not left,
        f"{len(gone & wanted)} of {len(wanted)} removed, {len(gone - wanted)} others, "
        f"{left} left in the read model",
    )


def owners_found(
    killed_at: datetime, taken: Mapping[str, datetime | None], allowed: float
) -> Fact:
    """The killed executor's partitions had a new owner in time."""
    gaps = [(at - killed_at).total_seconds() for at in taken.values() if at]
    open_ = len(taken) - len(gaps)
    longest = max(gaps, default=0.0)
    return Fact(
        "the killed executor's partitions were taken over in time",
        bool(taken) and not open_ and longest <= allowed,
        f"{len(gaps)} partitions without an owner for {min(gaps, default=0):.1f} to "
        f"{longest:.1f} s, at most {allowed:g} s allowed, {open_} still without",
    )


def most_within(times: Sequence[float], seconds: float) -> int:
    """How many of the sorted times lie in the fullest window of this many seconds."""
    first = most = 0
    for last, time in enumerate(times):
        while time - times[first] > seconds:
            first += 1
        most = max(most, last - first + 1)
    return most


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> int:
    return sum(
        wanted.get(key) != found.get(key) for key in wanted.keys() | found.keys()
    )
