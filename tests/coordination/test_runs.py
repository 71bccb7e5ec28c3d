"""Of two runs of a client one goes on, whichever stands still: the log decides."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest

from jobs_lib.coordination.log import Log
from jobs_lib.coordination.member import Member
from jobs_lib.coordination.messages import Probe, Sender
from jobs_lib.coordination.place import Place
from jobs_lib.coordination.runs import Runs, Verdict
from jobs_lib.coordination.world import Outcome
from jobs_lib.settings import Settings
from tests.coordination.pair import ANOTHER, Pair
from tests.coordination.search import search

INTERVAL_MS = 1_000
STEPS = {
    "time passes", "begin", "another takes it", "append to the home",
    "append to the place", "read the home", "read the place", "say that it lives",
    "keep", "claim",
}  # fmt: skip


def probe(instance_id: str, interval_ms: int | None = None) -> Probe:
    """Make a probe of a run; one with an interval says that the run begins."""
    return Probe(Sender("shop.mailer", "ann", instance_id), interval_ms=interval_ms)


def begin(instance_id="mine", at_ms=5_000) -> Runs:
    """Make a run that has begun."""
    runs = Runs(instance_id, INTERVAL_MS)
    runs.note_probe(probe(instance_id, INTERVAL_MS), at_ms)
    return runs


def judge(runs) -> Verdict:
    """What it should do while no claim of it is on its way."""
    return runs.judge(is_claiming=False)


@pytest.mark.guarantee("M11")
@pytest.mark.parametrize(
    ("at_ms", "verdict"),
    [
        (5_000, Verdict.IS_REFUSED),
        (5_999, Verdict.IS_REFUSED),
        (6_000, Verdict.GO_ON),
        (99_999, Verdict.GO_ON),
    ],
)
def test_a_run_ends_only_if_an_earlier_one_answers_within_an_interval(at_ms, verdict):
    runs = Runs("mine", INTERVAL_MS)
    # What it said before means nothing.
    runs.note_probe(probe("earlier"), 4_999)
    runs.note_probe(probe("mine", INTERVAL_MS), 5_000)
    assert judge(runs) is Verdict.GO_ON
    runs.note_probe(probe("earlier"), at_ms)
    assert judge(runs) is verdict


@pytest.mark.guarantee("M11")
@pytest.mark.parametrize(
    ("at_ms", "verdict"), [(7_999, Verdict.GO_ON), (8_000, Verdict.IS_REPLACED)]
)
def test_a_run_that_answers_too_late_has_been_replaced(at_ms, verdict):
    runs = begin()
    assert not runs.owes_answer
    # The later one has another interval: its own counts, since it is what it waits for.
    runs.note_probe(probe("later", 1_000), 7_000)
    assert (runs.owes_answer, judge(runs)) == (True, Verdict.GO_ON)
    runs.note_probe(probe("mine"), at_ms)
    assert (runs.owes_answer, judge(runs)) == (False, verdict)
    runs.note_probe(probe("later", 1_000), 8_100)
    assert (runs.owes_answer, judge(runs)) == (False, verdict)


def test_of_two_runs_that_begin_together_the_first_in_the_log_goes_on():
    first, second = Runs("first", INTERVAL_MS), Runs("second", INTERVAL_MS)
    probes = [
        (probe("first", INTERVAL_MS), 5_000),
        (probe("second", INTERVAL_MS), 5_001),
        # Its first probe was not acknowledged.
        (probe("first", INTERVAL_MS), 5_200),
        (probe("second", INTERVAL_MS), 5_400),
        (probe("first"), 5_600),
    ]
    for one in probes:
        first.note_probe(*one)
        second.note_probe(*one)
    assert (judge(first), judge(second)) == (Verdict.GO_ON, Verdict.IS_REFUSED)


def test_a_run_that_loses_a_partition_to_a_later_one_ends_and_that_one_goes_on():
    earlier, later = begin("earlier"), begin("later", 7_000)
    earlier.note_probe(probe("later", INTERVAL_MS), 7_000)
    for runs in (earlier, later):
        # It answers in time, and its partition was not fresh any more.
        runs.note_probe(probe("earlier"), 7_100)
    assert later.judge(is_claiming=True) is Verdict.WAIT
    for runs in (earlier, later):
        runs.note_claim("later", "earlier")
    assert (judge(earlier), judge(later)) == (Verdict.IS_REPLACED, Verdict.GO_ON)


def test_a_run_that_woke_and_took_what_the_later_one_held_goes_on():
    earlier, later = begin("earlier"), begin("later", 7_000)
    earlier.note_probe(probe("later", INTERVAL_MS), 7_000)
    # Both have stood still, and the later one's partition was not fresh any more.
    for runs in (earlier, later):
        runs.note_probe(probe("earlier"), 9_000)
    assert earlier.judge(is_claiming=True) is Verdict.WAIT
    for runs in (earlier, later):
        runs.note_claim("earlier", "later")
    assert (judge(earlier), judge(later)) == (Verdict.GO_ON, Verdict.IS_REPLACED)


@pytest.mark.guarantee("M11")
@pytest.mark.parametrize("first", ["earlier", "later"])
def test_of_two_runs_that_took_a_partition_from_each_other_the_later_goes_on(first):
    earlier, later = Runs("earlier", INTERVAL_MS), Runs("later", INTERVAL_MS)
    for runs in (earlier, later):
        runs.note_probe(probe("earlier", INTERVAL_MS), 5_000)
        runs.note_probe(probe("later", INTERVAL_MS), 7_000)
    # Nobody knows the order of records at two places of the log.
    takers = ["earlier", "later"] if first == "earlier" else ["later", "earlier"]
    for taker, holder in (takers, takers[::-1]):
        for runs in (earlier, later):
            runs.note_claim(taker, holder)
        assert later.judge(is_claiming=True) in (Verdict.GO_ON, Verdict.WAIT)
    assert (judge(earlier), judge(later)) == (Verdict.IS_REPLACED, Verdict.GO_ON)


def test_a_later_run_that_loses_a_partition_ends_once_its_claim_was_refused():
    runs = Runs("later", INTERVAL_MS)
    runs.note_probe(probe("earlier", INTERVAL_MS), 5_000)
    runs.note_probe(probe("later", INTERVAL_MS), 7_000)
    runs.note_claim("earlier", "later")
    assert runs.judge(is_claiming=True) is Verdict.WAIT
    assert judge(runs) is Verdict.IS_REPLACED


def test_a_log_that_is_read_anew_answers_nobody_again():
    runs = begin()
    runs.note_probe(probe("later", INTERVAL_MS), 6_000)
    for now_ms in (5_000, 5_500):
        runs.note_probe(probe("mine", INTERVAL_MS), now_ms)
        runs.note_probe(probe("long gone"), now_ms)
    assert (runs.owes_answer, judge(runs)) == (True, Verdict.GO_ON)


@pytest.mark.guarantee("M11")
@pytest.mark.parametrize(
    ("group", "is_run"), [("shop.mailer", True), ("shop.billing", False)]
)
def test_a_client_of_another_group_is_no_run_of_this_one(group, is_run):
    member = Member(
        Settings(kafka_bootstrap_servers="127.0.0.1:1"),
        log="log",
        group="shop.mailer",
        client_id="ann",
        topics=["mails"],
        listener=None,  # type: ignore[arg-type]
    )
    member.log.partitions = 1
    own = Probe(member.sender, interval_ms=INTERVAL_MS)
    later = Probe(Sender(group, "ann", "later"), interval_ms=INTERVAL_MS)
    member._note_run(0, own, Outcome.VALID, 5_000)
    member._note_run(0, later, Outcome.VALID, 5_100)
    assert member._runs.owes_answer is is_run


class NeverTooLate(Runs):
    """What an earlier run says counts for good."""

    def note_probe(self, probe: Probe, now_ms: int) -> None:
        super().note_probe(probe, now_ms)
        if self._until_ms is not None:
            self._until_ms = math.inf  # type: ignore[assignment]


class NeverReplaced(Runs):
    """A run that answers too late goes on."""

    def _note_own(self, now_ms: int, interval_ms: int | None) -> None:
        super()._note_own(now_ms, interval_ms)
        self._missed.clear()


class NeverWaits(Runs):
    """A run ends by an answer, though a claim of it is on its way."""

    def judge(self, *, is_claiming: bool) -> Verdict:
        del is_claiming
        return super().judge(is_claiming=False)


WRONG = {
    NeverTooLate: "both runs have ended",
    NeverReplaced: "both runs go on",
    NeverWaits: "both runs have ended",
}


@pytest.mark.guarantee("M11", "FK18")
def test_one_of_two_runs_goes_on_and_the_other_ends():
    found = search(Pair(time=2, home=3, part=2), crashes=frozenset(), most=30_000)
    assert found.broken is None, str(found)
    assert found.states > 20_000
    assert found.steps.keys() == STEPS - {"another takes it"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.guarantee("M11", "FK18")
def test_one_of_two_runs_goes_on_also_if_another_client_takes_the_partition():
    found = search(Pair(time=3, home=3, part=3), crashes=frozenset(), most=600_000)
    assert found.broken is None, str(found)
    assert found.states > 400_000
    assert found.steps.keys() == STEPS


@pytest.mark.guarantee("M11")
def test_each_probe_of_a_run_that_waits_for_a_snapshot_wants_one():
    # It has not begun: another one would say that it is at work.
    settings = Settings(kafka_bootstrap_servers="127.0.0.1:1")
    log = Log(settings, "log", Sender("shop.mailer", "ann", "mine"))
    place = Place(0, 0, 0)
    sent: list[Any] = []
    log._places, log.partitions = [place], 1
    log._writer = Mock(send=lambda one, *_: sent.append(one))
    log._ask_for_snapshot(place)
    place.note_asked(sent[0])
    place._moved_at = -math.inf
    log._ask_for_snapshot(place)
    assert [one.message.wants_snapshot for one in sent] == [True, True]


class AskingCounts(Runs):
    """A run that asks for a snapshot says that it is at work."""

    def note_probe(self, probe: Probe, now_ms: int) -> None:
        super().note_probe(probe._replace(wants_snapshot=False), now_ms)


@pytest.mark.guarantee("M11", "FK18", "I40")
@pytest.mark.parametrize(
    ("rules", "broken"), [(Runs, None), (AskingCounts, "both runs have ended")]
)
def test_of_two_runs_that_ask_for_a_snapshot_before_they_begin_one_goes_on(
    rules, broken
):
    pair = Pair(rules=rules, time=0, home=5, part=1, holder=ANOTHER, asks=True)
    found = search(pair, crashes=frozenset(), most=100_000)
    assert found.broken == broken, str(found)
    assert found.states > 30_000 or broken
    assert "ask for a snapshot" in found.steps


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.guarantee("M11", "FK18")
def test_of_two_runs_that_ask_for_a_snapshot_one_goes_on_also_if_answers_come_late():
    pair = Pair(time=1, home=5, part=1, holder=ANOTHER, asks=True)
    found = search(pair, crashes=frozenset(), most=300_000)
    assert found.broken is None, str(found)
    assert found.states > 200_000


class AlwaysReplaced(Runs):
    """A run that answers too late ends, whatever it has claimed."""

    def judge(self, *, is_claiming: bool) -> Verdict:
        verdict = super().judge(is_claiming=is_claiming)
        return Verdict.IS_REPLACED if self._missed else verdict


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.guarantee("M11", "FK18", "I40")
@pytest.mark.parametrize(
    ("rules", "broken"), [(Runs, None), (AlwaysReplaced, "both runs have ended")]
)
def test_one_of_two_runs_goes_on_also_if_the_earlier_one_has_lost_all(rules, broken):
    pair = Pair(rules=rules, time=4, home=3, part=3, holder=ANOTHER)
    found = search(pair, crashes=frozenset(), most=3_000_000)
    assert found.broken == broken, str(found)
    assert found.states > 1_000_000


@pytest.mark.parametrize("rules", WRONG, ids=lambda rules: rules.__name__)
@pytest.mark.guarantee("I40")
def test_a_wrong_rule_about_runs_is_found(rules):
    members = Pair(rules=rules, time=2, home=3, part=3)
    found = search(members, crashes=frozenset(), most=100_000)
    assert found.broken == WRONG[rules], str(found)
