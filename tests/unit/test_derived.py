"""How far a derived topic is done, in the offsets of what it is made of."""

from __future__ import annotations

from unittest.mock import Mock
from uuid import uuid4

import pytest

from jobs_lib.consuming.derived import Derived
from jobs_lib.consuming.done import Done
from jobs_lib.consuming.progress import Progress
from jobs_lib.kafka.dependencies import Dependency
from jobs_lib.kafka.positions import KnownOffsets

MAKER = Dependency("payments", "transfers.done")
OWN = ("transfers", 0)
COMMON = ("payments", 0)


class Answers:
    """What Kafka has answered in each round."""

    def __init__(self) -> None:
        self._made: KnownOffsets | None = None
        self._ends: KnownOffsets | None = None
        self._starts: KnownOffsets | None = None

    def give(
        self,
        at: float,
        made: dict[int, int],
        ends: dict[int, int],
        starts: dict[int, int] | None = None,
    ) -> None:
        """Answer the questions of the round that began at a time."""
        self._made = KnownOffsets(1, made, at)
        self._ends = KnownOffsets(1, ends, at)
        self._starts = None if starts is None else KnownOffsets(1, starts, at)

    def ask_committed(self, group: str, topic: str) -> KnownOffsets | None:
        """How far the maker is."""
        assert (topic, group) == MAKER
        return self._made

    def ask_high(self, topic: str) -> KnownOffsets | None:
        """Where the derived topic ends."""
        assert topic == OWN[0]
        return self._ends

    def ask_starts(self, topic: str) -> KnownOffsets | None:
        """Where the derived topic begins."""
        assert topic == OWN[0]
        return self._starts

    def fall_silent(self) -> None:
        """Have no answer that is new enough."""
        self._made = None


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def derived(answers) -> Derived:
    return Derived({OWN[0]: MAKER}, answers)


def test_it_is_done_up_to_the_maker_once_all_is_done_that_was_made_by_then(
    answers, derived
):
    answers.give(1.0, {0: 10}, {0: 4})
    assert derived.find({OWN: 4}) == {}
    # This end was asked for after the maker had said 10.
    answers.give(2.0, {0: 12}, {0: 6})
    assert derived.find({OWN: 5}) == {}
    assert derived.find({OWN: 6}) == {COMMON: 10}
    answers.give(3.0, {0: 12}, {0: 6})
    assert derived.find({OWN: 6}) == {COMMON: 12}


def test_an_end_of_the_same_round_may_be_older_than_what_the_maker_says(
    answers, derived
):
    # The record made of offset 9 came between the two answers.
    answers.give(1.0, {0: 10}, {0: 0})
    for _ in range(3):
        assert derived.find({OWN: 0}) == {}
    answers.give(2.0, {0: 10}, {0: 1})
    assert derived.find({OWN: 0}) == {}
    assert derived.find({OWN: 1}) == {COMMON: 10}


def test_records_of_which_nothing_is_made_are_done_as_well(answers, derived):
    for at in (1.0, 2.0):
        answers.give(at, {0: 50}, {0: 0})
        found = derived.find({OWN: 0})
    assert found == {COMMON: 50}


@pytest.mark.guarantee("K5")
@pytest.mark.parametrize("start", [0, 49, 50])
def test_a_partition_whose_records_have_all_expired_is_done_for_a_new_group(
    answers, derived, start
):
    for at in (1.0, 2.0):
        answers.give(at, {0: 10}, {0: 50}, {0: start})
        found = derived.find({OWN: 0}, new=[OWN])
    assert found == ({COMMON: 10} if start == 50 else {})


def test_a_group_that_has_lost_records_is_not_done_with_them(answers, derived):
    for at in (1.0, 2.0):
        answers.give(at, {0: 10}, {0: 50}, {0: 50})
        # It stands still at its offset.
        found = derived.find({OWN: 7}, new=[])
    assert found == {}


def test_a_new_group_is_not_done_while_nobody_knows_where_its_topic_begins(
    answers, derived
):
    for at in (1.0, 2.0):
        answers.give(at, {0: 10}, {0: 50})
        found = derived.find({OWN: 0}, new=[OWN])
    assert found == {}


@pytest.mark.parametrize("state", ["nothing", "waiting", "busy", "stored"])
def test_records_in_memory_are_not_done_although_they_have_expired(monkeypatch, state):
    progress = Progress(OWN, epoch=1, stored=50 if state == "stored" else None)
    progress.busy = state == "busy"
    if state == "waiting":
        progress.waiting.append(Mock())
    find = Mock(return_value={})
    done = Done(
        Mock(), Mock(), "g", uuid4(), Mock(), Mock(return_value=None),
        derived=Mock(find=find),
    )  # fmt: skip
    # The database has no offset of it, or had none a moment ago.
    monkeypatch.setattr(done, "_look", Mock(return_value=(0.0, [], [OWN])))
    done._tell(Mock(), {OWN: progress}, Mock())
    find.assert_called_once_with({OWN: 0}, [OWN] if state == "nothing" else [])


def test_a_maker_that_is_set_back_takes_it_back(answers, derived):
    for at in (1.0, 2.0):
        answers.give(at, {0: 50}, {0: 7})
        derived.find({OWN: 7})
    # Not only once what it makes again is done.
    answers.give(3.0, {0: 20}, {0: 9})
    assert derived.find({OWN: 7}) == {COMMON: 20}


@pytest.mark.parametrize("silent", ["no answer", "no offset"])
def test_what_the_maker_does_not_say_is_not_done(answers, derived, silent):
    answers.give(1.0, {0: 50}, {0: 7})
    derived.find({OWN: 7})
    if silent == "no answer":
        answers.fall_silent()
    else:
        answers.give(2.0, {}, {0: 7})
    assert derived.find({OWN: 7}) == {}


def test_a_topic_that_was_made_anew_does_not_wait_for_an_end_of_the_old_one(
    answers, derived
):
    for at in (1.0, 2.0):
        answers.give(at, {0: 50}, {0: 7_000})
        derived.find({OWN: 6_000})
    for at in (3.0, 4.0, 5.0):
        answers.give(at, {0: 60}, {0: 2})
        found = derived.find({OWN: 2})
    assert found == {COMMON: 60}


def test_a_partition_that_others_own_now_is_forgotten(answers, derived):
    for at in (1.0, 2.0):
        answers.give(at, {0: 50}, {0: 7})
        derived.find({OWN: 7})
    assert derived.find({}) == {}
    assert derived.find({OWN: 3}) == {}
