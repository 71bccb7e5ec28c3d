"""The checker of runs finds each error that is planted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    Probe,
    ReleaseGroup,
    ReleasingPartition,
    Sender,
    Shared,
    encode,
)
from jobs_lib.coordination.world import Outcome, World
from tests.coordination.checker import (
    Batch,
    History,
    Places,
    Run,
    Told,
    count_repeats,
    judge_at_least_once,
    judge_at_most_once,
    replay,
)
from tests.coordination.overlaps import Clocks, judge_times

if TYPE_CHECKING:
    from collections.abc import Callable

ANN = Sender("shop.mailer", "ann", "1")
BEN = Sender("shop.mailer", "ben", "2")
MAIL = Shared("shop.mailer", "mails", 0)
INTERVAL = 500
TAKEN = 2 * INTERVAL + 1
"""Milliseconds after which a silent holder has lost all."""
MOST = 20


class Written:
    """A log that is written by hand, and what its members have processed."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int, bytes | None]] = []
        self._time = 1_000_000

    def say(self, message: Message, after: int = 10) -> int:
        """Append a record some milliseconds later; return its offset."""
        self._time += after
        self.records.append((len(self.records), self._time, encode(message, 1)))
        return len(self.records) - 1

    def claim(self, sender: Sender, after: int = 10) -> int:
        """Claim and confirm the partition; return the claim."""
        claim = self.say(ClaimingPartition(sender, MAIL, INTERVAL), after)
        self.say(Heartbeat(sender, MAIL, claim, None))
        return claim

    @property
    def places(self) -> Places:
        """All records."""
        return {0: self.records}


def take_over_at_most_once() -> tuple[Written, list[Run]]:
    """Ann is killed with a batch that she has claimed, and Ben goes on behind it."""
    log = Written()
    ann = log.claim(ANN)
    log.say(ClaimingMessages(ANN, MAIL, ann, None, 10))
    log.say(ClaimingMessages(ANN, MAIL, ann, 10, 20))
    ben = log.claim(BEN, after=TAKEN)
    log.say(ClaimingMessages(BEN, MAIL, ben, 20, 30))
    log.say(ReleasingPartition(BEN, MAIL, ben, 30))
    return log, [
        Run("ann", "1", (Batch(0, 0, 10, ann),), may_lose=True),
        Run("ben", "2", (Batch(0, 20, 30, ben),)),
    ]


def take_over_at_least_once() -> tuple[Written, list[Run]]:
    """Ann is killed when she has told 10, and Ben repeats what she did since."""
    log = Written()
    ann = log.claim(ANN)
    log.say(Heartbeat(ANN, MAIL, ann, 10))
    ben = log.claim(BEN, after=TAKEN)
    log.say(ReleasingPartition(BEN, MAIL, ben, 30))
    return log, [
        Run("ann", "1", (Batch(0, 0, 10, ann), Batch(0, 10, 20, ann)), may_lose=True),
        Run("ben", "2", (Batch(0, 10, 20, ben), Batch(0, 20, 30, ben))),
    ]


def judge_once(history: History, runs: list[Run], end: int = 30) -> list[str]:
    return judge_at_most_once(history, runs, "mails", {0: end})


def judge_least(
    history: History, runs: list[Run], end: int = 30, most: int = MOST
) -> list[str]:
    return judge_at_least_once(history, runs, "mails", {0: end}, most)


def with_batches(run: Run, *batches: Batch) -> Run:
    return replace(run, batches=batches)


def test_a_right_run_has_no_faults():
    log, runs = take_over_at_most_once()
    assert judge_once(replay(log.places), runs) == []
    log, runs = take_over_at_least_once()
    assert judge_least(replay(log.places), runs) == []


@pytest.mark.guarantee("I40")
@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (
            lambda a, b: [a, with_batches(b, *b.batches, *b.batches)],
            "was processed 2 times",
        ),
        (
            lambda a, b: [a, with_batches(b, replace(b.batches[0], claim=0))],
            "without a valid claim",
        ),
        (
            lambda a, b: [with_batches(a, *a.batches, Batch(0, 30, 40, 0)), b],
            "ann never claimed",
        ),
        (lambda a, b: [with_batches(a), b], "lost 2 batches that it had claimed"),
        (lambda a, b: [a, with_batches(b)], "lost 1 batches that it had claimed"),
        (
            lambda a, b: [replace(a, may_lose=False), b],
            "('ann', '1') lost 1 batches",
        ),
    ],
)
def test_planted_errors_of_processes_are_found_at_most_once(
    plant: Callable[[Run, Run], list[Run]], told
):
    log, runs = take_over_at_most_once()
    assert told in " ".join(judge_once(replay(log.places), plant(*runs)))


@pytest.mark.guarantee("I40")
def test_records_that_nobody_claimed_are_found():
    log, runs = take_over_at_most_once()
    faults = judge_once(replay(log.places), runs, end=40)
    assert faults == ["0 of mails was claimed to 30, not to 40"]


@pytest.mark.guarantee("I40")
@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (lambda a, b: [a, with_batches(b, *b.batches[:1])], "10 were never processed"),
        (lambda a, b: [a, with_batches(b, *b.batches[1:])], "and 10 was next"),
        (
            lambda a, b: [with_batches(a, *a.batches, Batch(0, 20, 31, 0)), b],
            "who lost it, and goes on at 10",
        ),
        (
            lambda a, b: [a, with_batches(b, *b.batches, Batch(0, 30, 40, 1))],
            "without a valid claim",
        ),
    ],
)
def test_planted_errors_of_processes_are_found_at_least_once(
    plant: Callable[[Run, Run], list[Run]], told
):
    log, runs = take_over_at_least_once()
    assert told in " ".join(judge_least(replay(log.places), plant(*runs)))


def test_a_process_that_reads_the_log_anew_begins_again_at_what_it_has_told():
    log, (ann, ben) = take_over_at_least_once()
    again = Batch(0, 5, 20, ann.batches[0].claim)
    ann = with_batches(ann, ann.batches[0], again)
    (fault,) = judge_least(replay(log.places), [ann, ben])
    assert "10 was next" in fault
    anew = replace(ann, may_repeat=True)
    assert judge_least(replay(log.places), [anew, ben]) == []
    later = replace(again, first=11)
    faults = judge_least(
        replay(log.places), [with_batches(anew, ann.batches[0], later), ben]
    )
    assert "10 was next" in faults[0]


@pytest.mark.guarantee("I40")
def test_a_release_that_hands_over_too_low_a_position_is_found():
    log = Written()
    ann = log.claim(ANN)
    log.say(ReleasingPartition(ANN, MAIL, ann, 9))
    ben = log.claim(BEN)
    runs = [
        Run("ann", "1", (Batch(0, 0, 10, ann),)),
        Run("ben", "2", (Batch(0, 9, 30, ben),)),
    ]
    (fault,) = judge_least(replay(log.places), runs)
    assert "by ann, who released it, and goes on at 9" in fault


class Greedy(World):
    """Each claim is valid."""

    def judge(self, sender: Sender, shared: Shared) -> Outcome:
        return Outcome.VALID


class Impatient(World):
    """A holder has lost all after one interval."""

    def judge(self, sender: Sender, shared: Shared) -> Outcome:
        holding = self.find(shared).holding
        if holding is None or self.now_ms - holding.last_ms > holding.interval_ms:
            return Outcome.VALID
        return Outcome.HELD


class Late(World):
    """Whoever held a partition once may say where it stands."""

    def fold(
        self, offset: int, time_ms: int, partitions: int, message: Message
    ) -> Outcome:
        outcome = super().fold(offset, time_ms, partitions, message)
        return Outcome.VALID if isinstance(message, Heartbeat) else outcome


@pytest.mark.guarantee("I40", "I31")
@pytest.mark.parametrize(
    ("world", "after", "told"),
    [
        (Greedy, 10, "beside ann, who was heard 10 ms before"),
        (Impatient, INTERVAL + 1, "beside ann, who was heard 501 ms before"),
    ],
)
def test_two_holders_are_found(world, after, told):
    log = Written()
    log.claim(ANN)
    log.claim(BEN, after=after)
    assert replay(log.places).faults == []
    faults = replay(log.places, world).faults
    assert any(told in one for one in faults), faults
    assert any("lets two readers differ" in one for one in faults)


@pytest.mark.guarantee("I40")
def test_a_record_that_counts_without_its_holder_is_found():
    log = Written()
    ann = log.claim(ANN)
    log.claim(BEN, after=TAKEN)
    log.say(Heartbeat(ANN, MAIL, ann, 50))
    assert replay(log.places).faults == []
    assert any("ann holds nothing" in one for one in replay(log.places, Late).faults)


class Forgetful(World):
    """A range may be claimed again."""

    def fold(
        self, offset: int, time_ms: int, partitions: int, message: Message
    ) -> Outcome:
        if isinstance(message, ClaimingMessages):
            message = message._replace(first=self.find(message.shared).position)
            super().fold(offset, time_ms, partitions, message._replace(end=2**62))
            return Outcome.VALID
        return super().fold(offset, time_ms, partitions, message)


@pytest.mark.guarantee("I40", "M23")
def test_a_range_that_is_claimed_twice_is_found():
    log = Written()
    ann = log.claim(ANN)
    for _ in range(2):
        log.say(ClaimingMessages(ANN, MAIL, ann, None, 10))
    faults = replay(log.places, Forgetful).faults
    assert any("claims None of" in one for one in faults), faults


class Backwards(World):
    """The time of the log goes back with a broker's clock."""

    def pass_over(self, offset: int, time_ms: int) -> None:
        self.next_offset, self.now_ms = offset + 1, time_ms


class Restless(World):
    """A group is never paused."""

    def _pause(self, message: ReleaseGroup) -> Outcome:
        return Outcome.VALID


class Uncounted(World):
    """The last record says how many partitions the log has."""

    def fold(
        self, offset: int, time_ms: int, partitions: int, message: Message
    ) -> Outcome:
        self.partitions = partitions
        return super().fold(offset, time_ms, partitions, message)


@pytest.mark.guarantee("I40", "I31")
@pytest.mark.parametrize("world", [Backwards, Restless, Uncounted])
def test_readers_that_differ_about_more_than_a_partition_are_found(world):
    log = Written()
    log.claim(ANN)
    log.say(ReleaseGroup(ANN, 2_000_000))
    log.records.append((3, 999_000, b"no message"))
    log.records.append((4, 1_000_100, encode(Probe(BEN), 2)))
    assert replay(log.places).faults == []
    faults = replay(log.places, world).faults
    assert faults
    assert all("lets two readers differ" in one for one in faults)


@pytest.mark.guarantee("I40")
def test_a_gap_in_the_log_is_found():
    log, _ = take_over_at_most_once()
    del log.records[3]
    assert replay(log.places).faults == ["0@4 comes where 3 was next"]


EXACT = Clocks(shift_ms=0, slack_ms=0)


def wake_beside_a_successor(*batches: tuple[int, int]) -> list[str]:
    """Judge the batches of one who stood still: when each began and ended.

    Ann claims at 1,000,010 and is heard last at 1,000,020. Ben claims 1,001 ms later.
    """
    log = Written()
    ann = log.claim(ANN)
    log.claim(BEN, after=TAKEN)
    found = [Batch(0, 10 * n, 10 * n + 10, ann, *at) for n, at in enumerate(batches)]
    history = replay(log.places)
    return judge_times(history, [Run("ann", "1", tuple(found))], "mails", EXACT)


@pytest.mark.guarantee("I40", "M18", "I32")
def test_a_second_batch_of_a_process_that_has_woken_is_found():
    last, taken = 1_000_020, 1_000_020 + TAKEN
    sure = last + INTERVAL - 1
    # It was sure still, and stood still in the handler, or before it.
    assert wake_beside_a_successor((last, last + 50), (sure, taken + 1)) == []
    assert wake_beside_a_successor((last, last + 50), (taken + 5, taken + 9)) == []
    late = [(sure + 1, sure + 40), (sure + 50, sure + 90)]
    (fault,) = wake_beside_a_successor(*late)
    assert "ann began 2 batches of 0 by the claim 0 more than an interval" in fault
    (fault,) = wake_beside_a_successor((sure, taken + 1), (taken + 2, taken + 9))
    assert "ann processed 2 batches of 0 by the claim 0 beside its successor" in fault


def test_clocks_that_differ_a_little_let_no_right_process_seem_wrong():
    log = Written()
    ann = log.claim(ANN)
    beat = 1_000_020 + INTERVAL + 100
    log.say(Heartbeat(ANN, MAIL, ann, 10), after=INTERVAL + 100)
    # It stood still before the first one, and was sure again when it began the second.
    late = Batch(0, 0, 10, ann, beat - 60, beat - 10)
    sure = Batch(0, 10, 20, ann, beat + 4, beat + 50)
    runs = [Run("ann", "1", (late, sure))]
    behind = Clocks(shift_ms=-9, slack_ms=20)
    assert judge_times(replay(log.places), runs, "mails", behind) == []
    assert judge_times(replay(log.places), runs, "mails", EXACT) == []


@pytest.mark.guarantee("I40", "M16")
def test_a_position_that_was_told_and_is_that_of_a_batch_long_before_is_found():
    log, (ann, ben) = take_over_at_least_once()
    claim = ann.batches[0].claim
    ann = with_batches(ann, *ann.batches, Batch(0, 20, 30, claim))
    # The end of the last batch may be noted just then.
    right = replace(ann, told=(Told(0, 20, claim, 3),))
    wrong = replace(ann, told=(Told(0, 10, claim, 3),))
    assert judge_times(replay(log.places), [right, ben], "mails", EXACT) == []
    (fault,) = judge_times(replay(log.places), [wrong, ben], "mails", EXACT)
    assert fault == "ann tells 10 of 0, and has processed it to 20"
    anew = replace(wrong, may_repeat=True)
    assert judge_times(replay(log.places), [anew, ben], "mails", EXACT) == []


def test_repeats_are_those_of_an_interval_and_of_the_batch_that_runs():
    assert count_repeats(10, 0.5, 0.2) == 40
