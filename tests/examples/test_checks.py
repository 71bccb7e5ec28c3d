"""Each fact of the demo holds for a good history, and for no bad one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from examples.flights import checks
from examples.flights.checks import Post, State
from examples.flights.flights import Flight, read_flights

NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)


def flight(number: int, tail: str | None, *, arrived: bool = True) -> Flight:
    return Flight(
        id=number,
        departure=NOON + timedelta(minutes=number),
        carrier="UA",
        number=1545,
        tail=tail,
        origin="EWR",
        destination="IAH",
        arrived=arrived,
        delay=number if arrived else None,
    )


FLIGHTS = [
    flight(1, "N1"),
    flight(2, "N2"),
    flight(3, "N1", arrived=False),
    flight(4, None, arrived=False),
    flight(5, "N1"),
]
EXPECTED = checks.expected_states(FLIGHTS)
TABLE = {tail: states[-1] for tail, states in EXPECTED.items()}
STATES = [
    State(tail, row, "live", 100.0) for tail, rows in EXPECTED.items() for row in rows
]
POSTS = [Post("N1", 1, False), Post("N2", 2, False), Post("N1", 5, False)]


def again(state: State, cause: str = "reexport", at: float = 200.0) -> State:
    return replace(state, cause=cause, at=at)


def test_the_expected_states_follow_from_the_flights_alone():
    assert EXPECTED["N1"] == [
        {"tail": "N1", "flights": 1, "airport": "IAH", "delay": 1, "version": 1},
        {"tail": "N1", "flights": 2, "airport": "EWR", "delay": 1, "version": 2},
        {"tail": "N1", "flights": 3, "airport": "IAH", "delay": 6, "version": 3},
    ]
    assert set(EXPECTED) == {"N1", "N2"}


@pytest.mark.parametrize(
    ("handled", "holds"),
    [
        ([5, 4, 3, 2, 1], True),
        ([1, 2, 3, 4], False),
        ([1, 2, 3, 4, 5, 5], False),
        ([1, 2, 3, 4, 5, 6], False),
        ([1, 2, 3, 4, 6], False),
    ],
    ids=["good", "missing", "twice", "invented", "another"],
)
def test_every_flight_is_processed_once(handled, holds):
    assert checks.processed_once(FLIGHTS, handled).holds is holds


@pytest.mark.parametrize(
    ("handled", "aircraft", "holds"),
    [
        ([4], TABLE, True),
        ([], TABLE, False),
        ([3, 4], TABLE, False),
        ([4], {**TABLE, "NA": {}}, False),
    ],
    ids=["good", "missing", "too-many", "an-aircraft-of-none"],
)
def test_flights_without_a_tail_number_are_counted_apart(handled, aircraft, holds):
    assert checks.counted_apart(FLIGHTS, handled, aircraft).holds is holds


@pytest.mark.parametrize(
    ("table", "holds"),
    [
        (TABLE, True),
        ({"N1": TABLE["N1"]}, False),
        ({**TABLE, "N3": TABLE["N2"]}, False),
        ({**TABLE, "N1": EXPECTED["N1"][1]}, False),
    ],
    ids=["good", "missing", "invented", "old"],
)
def test_the_table_is_compared_with_the_flights(table, holds):
    assert checks.table_right(EXPECTED, table).holds is holds


@pytest.mark.parametrize(
    ("posts", "holds"),
    [
        (POSTS, True),
        ([POSTS[1], POSTS[0], POSTS[2]], True),
        ([*POSTS, Post("N1", 1, True)], True),
        (POSTS[:2], False),
        ([POSTS[2], POSTS[1], POSTS[0]], False),
        ([*POSTS, Post("N1", 3, False)], False),
        ([*POSTS, Post("N1", 5, False)], False),
        ([*POSTS, Post("N9", 1, False)], False),
    ],
    ids=[
        "good",
        "aircraft-in-any-order",
        "repeat",
        "missing",
        "swapped",
        "did-not-arrive",
        "twice-with-two-keys",
        "invented",
    ],
)
def test_the_posts_to_the_partner_are_checked_for_order_and_repeats(posts, holds):
    assert checks.partner_in_order(FLIGHTS, posts).holds is holds


def test_the_topic_is_in_order_with_repeats_and_a_reexport():
    first, second, third, *_ = STATES
    assert checks.topic_in_order(STATES).holds
    assert checks.topic_in_order([first, second, first, second, third]).holds
    assert checks.topic_in_order([first, second, again(second), third]).holds


@pytest.mark.parametrize(
    "states",
    [
        [STATES[1], STATES[0]],
        [STATES[0], STATES[1], again(STATES[0])],
        [again(STATES[1]), STATES[0]],
    ],
    ids=["swapped", "reexport-of-an-old-state", "reexport-ahead-of-its-change"],
)
def test_an_older_state_after_a_newer_one_is_out_of_order(states):
    assert not checks.topic_in_order(states).holds


def test_a_complete_topic_may_repeat_and_reexport():
    assert checks.topic_complete(EXPECTED, STATES).holds
    repeated = [STATES[0], *STATES, again(STATES[-1])]
    assert checks.topic_complete(EXPECTED, repeated).holds


@pytest.mark.parametrize(
    "states",
    [
        STATES[1:],
        [*STATES[1:], again(STATES[0])],
        [*STATES, State("N9", {"version": 1}, "live", 1.0)],
        [replace(STATES[0], value={**(STATES[0].value or {}), "delay": 99}), *STATES],
        [*STATES, again(STATES[0])],
    ],
    ids=["missing", "only-reexported", "invented", "wrong-value", "ends-with-an-old"],
)
def test_a_missing_or_invented_event_is_found(states):
    assert not checks.topic_complete(EXPECTED, states).holds


def test_the_read_model_is_compared_row_by_row():
    rows = {
        tail: {
            **{column: row[column] for column in ("tail", "flights", "airport")},
            "minutes_late": row["delay"],
            "version": row["version"],
        }
        for tail, row in TABLE.items()
    }
    assert checks.read_model_equal(TABLE, rows).holds
    late = {**rows, "N2": {**rows["N2"], "minutes_late": 99}}
    assert not checks.read_model_equal(TABLE, late).holds
    assert not checks.read_model_equal(TABLE, {"N1": rows["N1"]}).holds
    assert not checks.read_model_equal(TABLE, {**rows, "N3": rows["N2"]}).holds


def test_the_reexport_sends_every_aircraft_that_was_known():
    one, other = STATES[2], STATES[3]
    newer = again(other, cause="live")
    later = again(one, at=201)

    def holds(*states):
        return checks.reexport_complete(TABLE, 150, states).holds

    assert holds(one, again(one), newer, later)
    assert holds(again(one), again(other), newer)
    assert not holds(again(one), other, later), "one is missing"
    assert not holds(again(one), again(other)), "no flights meanwhile"
    assert not holds(newer, again(one, cause="live")), "nothing was re-exported"
    assert not checks.reexport_complete([], 150, []).holds


@pytest.mark.parametrize(
    ("times", "holds"),
    [
        ([second * 1.0 for second in range(120)], True),
        ([*(second * 1.0 for second in range(120)), 60.5, 60.6], False),
        ([second * 1.0 for second in range(20)], True),
        ([second * 0.5 for second in range(40)], False),
        ([100.0] * 10, False),
        ([], False),
    ],
    ids=["good", "a-burst", "short", "short-and-too-fast", "at-once", "none"],
)
def test_the_rate_is_measured_in_the_fullest_minute(times, holds):
    states = [again(STATES[0], at=at) for at in times]
    assert checks.reexport_rate(states, 61).holds is holds
    live = [again(STATES[0], cause="live") for _ in range(1_000)]
    assert checks.reexport_rate([*states, *live], 61).holds is holds


@pytest.mark.parametrize(
    ("seconds", "holds"),
    [([6.5, 7.9], True), ([6.5, 8.1], False), ([6.5, None], False), ([], False)],
    ids=["good", "late", "never", "nothing-owned"],
)
def test_every_partition_of_the_killed_pod_is_taken_over_in_time(seconds, holds):
    taken = {
        f"flights/{number}": None if gap is None else NOON + timedelta(seconds=gap)
        for number, gap in enumerate(seconds)
    }
    assert checks.owners_found(NOON, taken, 8.0).holds is holds


def test_the_fullest_window_includes_its_ends():
    assert checks.most_within([0, 10, 60, 60.1], 60) == 3
    assert checks.most_within([], 60) == 0


def test_the_flights_are_read_in_the_order_of_time():
    flights = read_flights()
    assert len(flights) == 336_776
    assert sum(flight.tail is None for flight in flights) == 2_512
    assert [flight.id for flight in flights] == list(range(1, len(flights) + 1))
    departures = [flight.departure for flight in flights]
    assert departures == sorted(departures)
    assert len({flight.tail for flight in flights if flight.tail}) == 4_043


def test_each_retired_aircraft_must_come_from_the_history():
    sent = [State("R1", {"version": 1}, "reexport", 1.0)]
    assert checks.history_filled(["R1"], [*STATES, *sent]).holds
    assert not checks.history_filled(["R1", "R2"], [*STATES, *sent]).holds
    gone = [State("R1", None, "reexport", 1.0)]
    assert not checks.history_filled(["R1"], [*STATES, *gone]).holds


def test_retired_aircraft_and_no_others_must_be_gone():
    sent = State("R1", {"version": 1}, "reexport", 1.0)
    gone = State("R1", None, "reexport", 2.0)
    assert checks.stale_removed(["R1"], [*STATES, sent, gone], {}).holds
    assert not checks.stale_removed(["R1"], [*STATES, sent], {}).holds
    assert not checks.stale_removed(["R1"], [*STATES, sent, gone], {"R1": {}}).holds
    other = State(STATES[0].tail, None, "reexport", 2.0)
    late = [one for one in STATES if one.tail != other.tail]
    assert not checks.stale_removed(["R1"], [*late, sent, gone, other], {}).holds
