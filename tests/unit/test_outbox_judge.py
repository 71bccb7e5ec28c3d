"""The judge of relays finds each kind of violation, and no violation in good runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobs_lib.partitioner import choose_partition
from tests.support.outbox.history import Row
from tests.support.outbox.judge import find_missing, judge
from tests.support.records import Seen

EVENTS, STATES = "events", "states"
PARTITIONS = 4


def write(count: int, *, topic: str = EVENTS, key: str | None = "a") -> list[Row]:
    """Rows 1, 2, … of a key, in the order of their commits."""
    return [
        Row(n, topic, key, b"%d" % n, version=n, headers={"who": "me"}, at=10.0 + n)
        for n in range(1, count + 1)
    ]


def send(rows: list[Row]) -> dict[str, list[Seen]]:
    """The records of these rows, in this order."""
    topics: dict[str, list[Seen]] = {}
    for row in rows:
        of_topic = topics.setdefault(row.topic, [])
        headers = {"ce_id": str(row.id), "ce_version": str(row.version), **row.headers}
        partition = choose_partition(row.key, PARTITIONS) if row.key is not None else 0
        of_topic.append(
            Seen(
                partition,
                len(of_topic),
                row.key or "",
                row.value,
                headers,
                row.at + 0.5,
            )
        )
    return topics


def look(rows, topics, **known):
    """The judge's answer for blocks of four rows, with merged states."""
    return judge(
        rows,
        topics,
        merging={STATES},
        partitions={EVENTS: PARTITIONS, STATES: PARTITIONS},
        block=4,
        **known,
    )


def pick(rows: list[Row], order: str) -> dict[str, list[Seen]]:
    """The records of the rows in an order such as ``1 2 2 3``."""
    return send([rows[int(n) - 1] for n in order.split()])


# Each row of an event is sent; faults explain the repeats.
EVENT_ORDERS = [
    ("1 2 3 4 5", 0, set()),
    ("1 2 3 2 3 4 5", 2, set()),  # a block again
    ("1 2 3 4 5 4 5", 2, set()),  # the last one
    ("1 2 2 1 2 3 4 5", 3, set()),  # a block again, and then again from its start
    ("1 2 3 2 3 4 5", 1, {"I21"}),
    ("1 2 3 4 5 5", 0, {"I21"}),
    ("1 2 4 5", 0, {"I18", "I20"}),  # lost
    ("2 3 4 5", 0, {"I18", "I20"}),  # the first one lost
    ("1 2 3 4", 0, {"I18", "I20"}),  # the last one lost
    ("", 0, {"I18"}),  # all lost
    ("1 3 2 4 5", 9, {"I20"}),  # swapped
    ("1 2 3 5 4", 9, {"I20"}),
    ("1 2 3 4 5 2", 9, {"I20"}),  # a stale one at the end
    ("1 2 3 4 2 5", 9, {"I20"}),  # a stale one in between, of a relay that woke up
    ("1 2 3 4 5 1 2 3 4 5", 9, {"I21"}),  # further back than a block
]
# The last one of several states is enough.
STATE_ORDERS = [
    ("1 2 3 4 5", 0, set()),
    ("5", 0, set()),
    ("2 5", 0, set()),
    ("2 4 3 5", 1, set()),  # a block that was shorter the second time
    ("2 5 5", 1, set()),
    ("2 4", 0, {"I18", "I20"}),  # the last one is lost
    ("", 0, {"I18"}),
    ("2 5 4", 9, {"I20"}),  # a stale one at the end
    ("2 4 3 5", 0, {"I21"}),  # swapped, without a fault
    ("5 5", 0, {"I21"}),
    ("5 1 5", 9, {"I21"}),  # further back than a block
]


@pytest.mark.guarantee("I40")
@pytest.mark.parametrize(("order", "repeats", "broken"), EVENT_ORDERS)
def test_the_judge_finds_a_wrong_order_of_events(order, repeats, broken):
    rows = write(5)
    assert look(rows, pick(rows, order), repeats=repeats).broken == broken


@pytest.mark.guarantee("I40")
@pytest.mark.parametrize(("order", "repeats", "broken"), STATE_ORDERS)
def test_the_judge_finds_a_wrong_order_of_states(order, repeats, broken):
    rows = write(5, topic=STATES)
    assert look(rows, pick(rows, order), repeats=repeats).broken == broken


@pytest.mark.guarantee("I40")
def test_the_judge_finds_a_record_that_was_not_committed():
    rows = write(5)
    committed = rows[1:]  # the first row was rolled back
    assert look(committed, send(rows)).broken == {"I19"}
    topics = send(rows)
    del topics[EVENTS][2].headers["ce_id"]
    assert "I19" in look(rows, topics).broken
    # The same id in another topic.
    assert "I19" in look(committed, {STATES: send(committed)[EVENTS]}).broken


@pytest.mark.guarantee("I40")
@pytest.mark.parametrize(
    ("wrong", "broken"),
    [
        ({"value": b"torn"}, "I19"),
        ({"value": None}, "I19"),
        ({"key": "b"}, "I19"),
        ({"headers": {"ce_id": "3", "ce_version": "4", "who": "me"}}, "I19"),
        ({"headers": {"ce_id": "3", "ce_version": "3"}}, "I19"),
        ({"partition": 3 - choose_partition("a", PARTITIONS)}, "I18"),
    ],
)
def test_the_judge_finds_a_record_that_differs_from_its_row(wrong, broken):
    rows = write(5)
    topics = send(rows)
    topics[EVENTS][2] = replace(topics[EVENTS][2], **wrong)
    assert broken in look(rows, topics).broken


@pytest.mark.guarantee("I40")
@pytest.mark.parametrize("topic", [EVENTS, STATES])
def test_the_judge_finds_a_lost_or_changed_tombstone(topic):
    rows = write(3, topic=topic)
    rows[2] = replace(rows[2], value=None)
    verdict = look(rows, send(rows))
    assert not verdict.violations
    assert verdict.tombstones == 1
    # Once lost, and once as a value.
    assert look(rows, send(rows[:2])).broken == {"I18", "I20"}
    topics = send(rows)
    topics[topic][2] = replace(topics[topic][2], value=b"3")
    assert "I19" in look(rows, topics).broken


@pytest.mark.guarantee("I40")
def test_records_without_a_key_have_no_order():
    rows = write(4, key=None)
    backwards = send(rows[::-1])
    assert not look(rows, backwards).violations
    assert look(rows, send(rows[:3])).broken == {"I18"}
    assert look(rows, send([*rows, rows[0]])).broken == {"I21"}


@pytest.mark.guarantee("I40")
def test_the_order_is_that_of_commits_not_of_ids():
    low, high = write(2)
    late = [replace(high, version=1), replace(low, version=2)]
    verdict = look(late, send(late))
    assert not verdict.violations
    assert verdict.late == 1
    assert "I20" in look(late, send(late[::-1])).broken


@pytest.mark.guarantee("I40")
def test_the_judge_finds_a_version_that_falls():
    rows = write(3)
    rows[2] = replace(rows[2], version=1)
    assert look(rows, send(rows)).broken == {"I26"}
    # In a replay it may: a consumer that has seen a version skips it.
    rows = write(3)
    assert not look(rows, pick(rows, "1 2 1 2 3"), repeats=2).violations


def test_the_judge_judges_each_key_alone_and_counts_rows_and_records():
    events = write(4)
    states = [
        replace(row, id=row.id + 10, topic=STATES, key="b")
        for row in write(4)
    ]  # fmt: skip
    topics = pick(events, "1 2 3 2 3 4") | pick(states, "1 4")
    verdict = look([*events, *states], topics, repeats=2)
    assert not verdict.violations
    assert (verdict.rows, verdict.records) == (8, 8)
    assert (verdict.merged, verdict.repeats, verdict.late) == (2, 2, 0)
    assert verdict.delay(0.5) == 0.5


def test_a_held_row_may_stay_and_return_under_its_id():
    rows = write(3)
    assert not look(rows, send(rows[:2]), left={3}).violations
    # The row was held and released: it is inserted again, after others.
    again = [rows[0], rows[1], rows[2], rows[1]]
    assert not look(again, send(rows)).violations


@pytest.mark.guarantee("I39")
def test_a_run_in_which_something_never_struck_does_not_count():
    assert not find_missing({"kills": 1, "rollbacks": 7})
    (missing,) = find_missing({"kills": 0, "rollbacks": 7})
    assert missing == ("I39", "kills: not once")
