"""All interleavings of small systems, with the functions that run in production.

Where members share two partitions, both lie in one partition of the log: there,
records about one move the time of the other. Such a member has one record on its way
at a time. Partitions with different places share nothing. And records about one
partition do no more than move the time of another, as `test_random_logs.py` shows. Time
may pass at any step here, and a member takes the steps about a partition by what it
knows of that one alone: see `test_reduction.py`. So what happens to one of several
partitions can happen to a single one, and three members with crashes need no second
partition.

Three members of two partitions are searched at most once and without crashes, with the
steps of `reduced.py`. At least once they have too many states: with one partition,
there are 133,000 where a member has one record on its way, and two share little.

A killed process is one that stands still for good while its late records are
appended, and its restart is another process of its client. Two processes of one
client stand for both, and steps that are crashes are checked beside.
"""

from __future__ import annotations

import pytest

from tests.coordination.reduced import Reduced
from tests.coordination.rules import (
    AnnouncedOnly,
    AnyClaim,
    FreshRestart,
    LatestWins,
    OwnClock,
    Rules,
    StaleAtOne,
)
from tests.coordination.search import search
from tests.coordination.system import Members

CRASHES = frozenset({"crash"})
KEPT = {
    "time passes", "claim", "keep", "release",
    "ClaimingPartition valid", "ClaimingPartition refused",
    "read ClaimingPartition back", "Heartbeat valid", "Heartbeat refused",
    "read Heartbeat back", "ReleasingPartition valid", "ReleasingPartition refused",
    "read ReleasingPartition back",
}  # fmt: skip
BATCHES = {
    False: {"begin a batch", "finish a batch"},
    True: {
        "claim a batch", "ClaimingMessages valid", "ClaimingMessages refused",
        "read ClaimingMessages back",
    },
}  # fmt: skip
TAKEN = "a partition is taken from a holder that may live"
LOST = "a batch begins though the partition is lost"
WRONG = {
    "the latest claim wins": (Rules(LatestWins), (1, 1), False, TAKEN),
    "others take at one interval": (Rules(StaleAtOne), (1, 1), False, TAKEN),
    "each asks its own clock": (Rules(OwnClock), (1, 1), False, TAKEN),
    "a restart takes while fresh": (Rules(FreshRestart), (2,), False, TAKEN),
    "old claims count": (
        Rules(AnyClaim), (2,), False, "a record counts without its claim",
    ),
    "no second read": (Rules(reads_claim_back=False), (1, 1), False, LOST),
    "the first heartbeat is not read back": (
        Rules(reads_first_heartbeat_back=False), (1, 1), False,
        "a partition is held without a heartbeat",
    ),
    "nobody asks whether it is sure": (
        Rules(asks_whether_sure=False), (1, 1), False, LOST,
    ),
    "the well-known steps": (
        Rules(AnnouncedOnly, processes_before_reading_back=True), (1, 1), True,
        "a record is processed twice",
    ),
}  # fmt: skip


def check(members: Members, least: int, most: int) -> None:
    """Search a system in which all must hold, and in which each step is taken.

    It has more than ``least`` states, ``most`` at the most, and no dead end.
    """
    found = search(members, crashes=CRASHES, most=most)
    print(f"{members.processes} {members.partitions} partitions: {found}")
    assert found.broken is None, str(found)
    expected = KEPT | BATCHES[members.at_most_once]
    if isinstance(members, Reduced):
        expected -= {one for one in expected if one.startswith("read ")}
    assert expected | (CRASHES if members.crashes else set()) == set(found.steps)
    assert found.states > least
    assert found.stuck == 0


@pytest.mark.guarantee("M8", "M9", "M16", "M18")
def test_two_members_hold_and_process_as_stated():
    check(Members((1, 1)), 5_000, 100_000)


@pytest.mark.guarantee("M14", "M23", "I32")
def test_three_members_process_nothing_twice_at_most_once():
    check(Members((1, 1, 1), at_most_once=True), 20_000, 100_000)


@pytest.mark.guarantee("M14", "M15")
def test_a_crash_at_most_once_repeats_nothing_and_holds_up_nobody():
    check(Members((1, 1), at_most_once=True, crashes=1), 20_000, 100_000)


def test_records_that_come_out_of_order_repeat_nothing_at_most_once():
    members = Members((1, 1), at_most_once=True, ordered=False, unread=2)
    check(members, 5_000, 20_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.guarantee("M8", "M16")
def test_records_that_come_out_of_order_take_nothing_from_a_holder():
    check(Members((1, 1), ordered=False, unread=2), 100_000, 300_000)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.guarantee("M8", "M16", "M18", "I31")
def test_a_crash_of_one_of_three_takes_nothing_from_a_holder():
    check(Members((1, 1, 1), crashes=1), 3_000_000, 4_000_000)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.guarantee("M14", "M15", "I31")
def test_a_crash_of_one_of_three_repeats_nothing_at_most_once():
    check(Members((1, 1, 1), at_most_once=True, crashes=1), 500_000, 700_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.guarantee("M8", "M16", "M18", "I32")
def test_three_members_hold_and_process_as_stated():
    check(Members((1, 1, 1)), 100_000, 300_000)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.guarantee("M14", "I31")
def test_two_members_of_two_partitions_process_nothing_twice_at_most_once():
    # With several records on their way there are more than three million states.
    members = Members((1, 1), partitions=2, at_most_once=True, alone=True)
    check(members, 500_000, 700_000)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.guarantee("M14", "M23", "I31", "I32")
def test_three_members_of_two_partitions_process_nothing_twice_at_most_once():
    check(Reduced((1, 1, 1), partitions=2), 1_000_000, 2_000_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.guarantee("M11", "M14")
def test_a_restart_beside_another_member_repeats_nothing_at_most_once():
    check(Members((2, 1), at_most_once=True), 60_000, 200_000)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.guarantee("I40")
def test_a_wrong_rule_is_found(name):
    rules, processes, at_most_once, broken = WRONG[name]
    members = Members(processes, at_most_once=at_most_once, rules=rules)
    found = search(members, crashes=CRASHES, most=100_000)
    print(f"{name}: {found}")
    assert found.broken == broken


@pytest.mark.parametrize(
    "rules",
    [Rules(reads_claim_back=False), Rules(reads_first_heartbeat_back=False)],
    ids=["no second read", "the first heartbeat is not read back"],
)
@pytest.mark.guarantee("I40", "M8")
def test_who_begins_too_early_processes_records_beside_their_holder(rules):
    members = Members((1, 1), rules=rules, restates=False)
    found = search(members, crashes=CRASHES, most=100_000)
    assert found.broken == "a batch begins beside one of the holder"


@pytest.mark.guarantee("I40", "M14")
@pytest.mark.slow
def test_the_well_known_steps_fail_among_three_members_of_two_partitions_too():
    rules, _, _, broken = WRONG["the well-known steps"]
    members = Reduced((1, 1, 1), partitions=2, rules=rules)
    assert search(members, crashes=CRASHES, most=100_000).broken == broken
