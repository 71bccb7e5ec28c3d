"""Own records of a partition of the log are read back, and then forgotten."""

from __future__ import annotations

import pytest

from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Probe,
    Sender,
    Shared,
    Snapshot,
)
from jobs_lib.coordination.place import Place
from jobs_lib.coordination.world import Outcome
from jobs_lib.coordination.writer import Sent
from jobs_lib.errors import UnavailableError

ME = Sender("shop.mailer", "a", "this run")
ORDERS = Shared("shop.mailer", "orders", 0)
LATE = UnavailableError("Kafka has not acknowledged it in time")


def pass_through(place: Place, sent: Sent, *, read_first: bool) -> None:
    """Read the first record and acknowledge it, in one order or the other."""
    if not read_first:
        place.acknowledge(sent, 0)
    place.fold(0, 1, 1, sent.message, ME)
    if read_first:
        place.acknowledge(sent, 0)


@pytest.mark.parametrize("read_first", [True, False])
def test_a_record_is_read_back_in_whatever_order_it_is_acknowledged(read_first):
    place = Place(0, 0, 0)
    sent = Sent(Probe(ME))
    place.unacknowledged.add(sent)
    pass_through(place, sent, read_first=read_first)
    assert sent.outcome is Outcome.VALID
    assert not place._waiting


@pytest.mark.parametrize("read_first", [True, False])
def test_a_snapshot_that_nobody_waits_for_does_not_stay_in_memory(read_first):
    place = Place(0, 0, 0)
    sent = Sent(Snapshot(ME, 0, 1, 0, 1, "digest", "entries", ""))
    pass_through(place, sent, read_first=read_first)
    assert not place._waiting


def test_a_place_is_as_current_as_the_newest_own_record_that_was_read_back():
    place = Place(0, 0, 0, 10.0)
    old, new, unread = (Sent(Probe(ME)) for _ in range(3))
    old.sent_at, new.sent_at, unread.sent_at = 5.0, 20.0, 30.0
    for offset, sent in enumerate((old, new, unread)):
        place.acknowledge(sent, offset)
    place.fold(0, 1, 1, old.message, ME)
    assert place.current_at == 10.0
    place.fold(1, 2, 1, new.message, ME)
    assert place.current_at == 20.0


@pytest.fixture
def holder():
    """A place of one partition, which this run of this member holds."""
    place = Place(0, 0, 0)
    place.fold(0, 1, 1, ClaimingPartition(ME, ORDERS, 500), ME)
    place.fold(1, 2, 1, Heartbeat(ME, ORDERS, 0, 5), ME)
    return place


@pytest.mark.parametrize("read_first", [True, False])
@pytest.mark.guarantee("M15")
def test_a_batch_is_claimed_by_a_record_that_was_not_acknowledged(holder, read_first):
    sent = Sent(ClaimingMessages(ME, ORDERS, 0, 5, 9))
    holder.unacknowledged.add(sent)
    if not read_first:
        holder.give_up(sent, LATE)
    holder.fold(2, 3, 1, sent.message, ME)
    if read_first:
        holder.give_up(sent, LATE)
    assert (sent.outcome, sent.offset) == (Outcome.VALID, 2)


def test_a_claim_of_a_batch_is_not_in_the_log_if_what_was_sent_later_is(holder):
    sent = Sent(ClaimingMessages(ME, ORDERS, 0, 5, 9))
    holder.unacknowledged.add(sent)
    holder.give_up(sent, LATE)
    assert not sent.is_done
    beat = Sent(Heartbeat(ME, ORDERS, 0, 5))
    beat.sent_at = sent.sent_at + 1
    holder.unacknowledged.add(beat)
    holder.acknowledge(beat, 2)
    holder.fold(2, 3, 1, beat.message, ME)
    assert (sent.is_done, sent.error, beat.outcome) == (True, LATE, Outcome.VALID)
    assert sent.is_absent


def test_a_claim_of_a_batch_fails_with_the_log(holder):
    sent = Sent(ClaimingMessages(ME, ORDERS, 0, 5, 9))
    holder.give_up(sent, LATE)
    holder.fail(UnavailableError("the log must be read anew"))
    assert "read anew" in str(sent.error)


@pytest.mark.parametrize("is_acknowledged", [True, False])
@pytest.mark.guarantee("M15")
def test_a_log_that_is_read_anew_tells_of_a_claim_of_a_batch(holder, is_acknowledged):
    claim = Sent(ClaimingMessages(ME, ORDERS, 0, 5, 9))
    beat = Sent(Heartbeat(ME, ORDERS, 0, 5))
    for sent in (claim, beat):
        holder.unacknowledged.add(sent)
    if is_acknowledged:
        holder.acknowledge(claim, 2)
    error = UnavailableError("the log must be read anew")
    assert holder.hand_over(error) == [claim]
    assert (beat.error, claim.is_done) == (error, False)
    again = Place(0, 1, 0)
    again.world = holder.world.copy()
    again.adopt(claim, holder.world.next_offset, error)
    again.fold(2, 3, 1, claim.message, ME)
    assert (claim.outcome, claim.offset) == (Outcome.VALID, 2)


def test_a_claim_of_a_batch_that_was_read_already_is_known(holder):
    sent = Sent(ClaimingMessages(ME, ORDERS, 0, 5, 9))
    holder.unacknowledged.add(sent)
    holder.fold(2, 3, 1, sent.message, ME)
    assert holder.hand_over(LATE) == []
    assert (sent.outcome, sent.offset) == (Outcome.VALID, 2)


def test_a_claim_of_a_batch_is_unknown_if_it_may_lie_before_a_snapshot(holder):
    sent = Sent(ClaimingMessages(ME, ORDERS, 0, 5, 9))
    again = Place(0, 7, 0)
    again.adopt(sent, 6, LATE)
    assert (sent.error, sent.is_absent) == (LATE, False)


def test_what_claims_no_batch_ends_at_once_if_it_is_not_acknowledged(holder):
    sent = Sent(Heartbeat(ME, ORDERS, 0, 5))
    holder.unacknowledged.add(sent)
    holder.give_up(sent, LATE)
    assert sent.error is LATE
    # Another one that says the same is not taken for it.
    assert holder.fold(2, 3, 1, sent.message, ME) is Outcome.VALID
    assert sent.outcome is None
