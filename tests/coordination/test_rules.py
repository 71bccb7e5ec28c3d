"""The rules of the log, one by one, at their boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs_lib.coordination.messages import (
    LARGEST_OFFSET,
    LONGEST_INTERVAL_MS,
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    Probe,
    ReleaseGroup,
    ReleasingPartition,
    Sender,
    Shared,
    Snapshot,
    Unreadable,
    decode,
    encode,
    find_place,
)
from jobs_lib.coordination.world import Outcome, World
from tests.coordination.agreement import compare
from tests.coordination.listener import Listener

ANN = Sender("shop.mailer", "ann", "1")
ANN_AGAIN = Sender("shop.mailer", "ann", "2")
BEN = Sender("shop.mailer", "ben", "1")
OTHER_GROUP = Sender("shop.billing", "ben", "1")
MAIL = Shared("shop.mailer", "mails", 0)
SECOND = 1_000
PLACES = [18, 44, 43, 33, 34]

offsets = st.integers(0, LARGEST_OFFSET)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)
senders = st.builds(Sender, names, names, names)


class Log:
    """A log of one partition, whose records are folded as they come.

    A reader written from the page alone agrees about each of them.
    """

    def __init__(self) -> None:
        self.world = World(0)
        self.listener = Listener(0)
        self.time = 1_000_000

    def send(self, message: Message, after: int = 0) -> Outcome:
        """Append a record, some milliseconds after the one before."""
        return self.append(encode(message, 1), after)

    def append(self, value: bytes, after: int = 0) -> Outcome:
        """Append what may be no message."""
        self.time += after
        record = self.world.next_offset, self.time, value
        outcome = self.world.apply(*record)
        self.listener.hear(*record)
        compare(self.world, self.listener)
        return outcome

    def claim(self, sender: Sender, after: int = 0, shared: Shared = MAIL) -> Outcome:
        """Claim a partition with an interval of a second."""
        return self.send(ClaimingPartition(sender, shared, SECOND), after)

    def hold(self, sender: Sender, position: int | None = None) -> int:
        """Claim a partition and confirm it; return the claim."""
        claim = self.world.next_offset
        assert self.claim(sender) is Outcome.VALID
        beat = Heartbeat(sender, MAIL, claim, position)
        assert self.send(beat) is Outcome.VALID
        return claim


@st.composite
def any_message(draw: st.DrawFn) -> Message:
    """Draw a message with any fields within their bounds."""
    sender = draw(senders)
    topic = draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))[:249]
    shared = Shared(sender.group_id, topic, draw(st.integers(0, 2**31 - 1)))
    claim, position = draw(offsets), draw(st.none() | offsets)
    interval = draw(st.integers(100, LONGEST_INTERVAL_MS))
    text = draw(st.text(st.characters(exclude_categories=["Cs"])))
    choices: list[Message] = [
        ClaimingPartition(sender, shared, interval),
        Heartbeat(sender, shared, claim, position),
        ClaimingMessages(sender, shared, claim, position, claim),
        ReleasingPartition(sender, shared, claim, position),
        ReleaseGroup(sender, claim),
        Probe(sender, wants_snapshot=draw(st.booleans())),
        Snapshot(sender, claim, claim, 0, 1, text, text, text, draw(st.booleans())),
    ]
    return draw(st.sampled_from(choices))


@pytest.mark.guarantee("M2")
@given(any_message(), st.integers(1, 2**31 - 1))
def test_each_message_is_read_as_it_was_written(message, partitions):
    found = decode(encode(message, partitions))
    assert found == (partitions, message)
    assert type(found[1]) is type(message)


@pytest.mark.guarantee("M2")
def test_an_unknown_type_moves_the_time_alone():
    log = Log()
    log.hold(ANN, 5)
    before = dict(log.world.entries)
    value = encode(Probe(ANN), 1).replace(b"Probe", b"Later")
    assert log.append(value, after=7) is Outcome.UNREADABLE
    assert (log.world.now_ms, log.world.next_offset) == (log.time, 3)
    assert log.world.entries == before


@pytest.mark.guarantee("M2")
@pytest.mark.parametrize("extra", ['"v":1', '"w":[1.5]', '"w":NaN'])
def test_a_probe_that_leaves_a_field_out_is_read_with_care(extra):
    whole = encode(Probe(ANN), 8)
    short = whole.replace(b',"wants_snapshot":false', b"")
    assert decode(short) == decode(whole) == (8, Probe(ANN))
    spoilt = short.replace(b"}", f",{extra}}}".encode())
    assert decode(spoilt) is Unreadable.NO_MESSAGE


@pytest.mark.guarantee("M5")
def test_a_place_is_the_partition_that_kafkas_producers_choose():
    # Worked out by the definition of the hash, not by this library.
    assert [find_place("orders", one, 50) for one in range(5)] == PLACES
    assert find_place("orders", 0, 1) == 0


@pytest.mark.guarantee("M7", "M9", "M10")
@pytest.mark.parametrize(
    ("age", "freshness", "again", "other"),
    [
        (SECOND - 1, "fresh", Outcome.HELD, Outcome.HELD),
        (SECOND, "unknown", Outcome.VALID, Outcome.HELD),
        (SECOND * 3 // 2, "unknown", Outcome.VALID, Outcome.HELD),
        (2 * SECOND, "unknown", Outcome.VALID, Outcome.HELD),
        (2 * SECOND + 1, "stale", Outcome.VALID, Outcome.VALID),
    ],
)
def test_a_holding_is_taken_by_its_age(age, freshness, again, other):
    for sender, outcome in ((ANN_AGAIN, again), (BEN, other)):
        log = Log()
        log.hold(ANN, 5)
        holding = log.world.find(MAIL).holding
        assert holding is not None
        assert holding.find_freshness(log.time + age) == freshness
        assert log.claim(sender, after=age) is outcome
        assert log.world.find(MAIL).position == 5


@pytest.mark.guarantee("M11")
def test_a_second_run_of_a_client_that_lives_gets_nothing():
    log = Log()
    claim = log.hold(ANN)
    for _ in range(3):
        assert log.claim(ANN_AGAIN, after=SECOND - 1) is Outcome.HELD
        assert log.send(Heartbeat(ANN, MAIL, claim, None)) is Outcome.VALID
    beat = Heartbeat(ANN_AGAIN, MAIL, claim, None)
    assert log.send(beat) is Outcome.NOT_HELD


@pytest.mark.guarantee("M8")
def test_the_first_of_two_claims_wins_and_an_old_claim_stays_without_effect():
    log = Log()
    assert [log.claim(ANN), log.claim(BEN)] == [Outcome.VALID, Outcome.HELD]
    # Ann stops before her first heartbeat, and wakes when Ben has taken over.
    assert log.claim(BEN, after=2 * SECOND + 1) is Outcome.VALID
    for late in (
        Heartbeat(ANN, MAIL, 0, 9),
        ClaimingMessages(ANN, MAIL, 0, None, 9),
        ReleasingPartition(ANN, MAIL, 0, 9),
    ):
        assert log.send(late) is Outcome.NOT_HELD
    assert log.world.find(MAIL).position is None


@pytest.mark.guarantee("M12")
def test_groups_share_nothing():
    log = Log()
    log.hold(ANN, 5)
    theirs = Shared(OTHER_GROUP.group_id, MAIL.topic, MAIL.partition)
    log.send(ReleaseGroup(BEN, log.time + 60 * SECOND))
    assert log.claim(OTHER_GROUP, shared=theirs) is Outcome.VALID
    assert log.world.find(theirs).position is None


@pytest.mark.guarantee("M13")
def test_a_released_partition_is_taken_at_once_where_it_was_left():
    log = Log()
    claim = log.hold(ANN, 5)
    assert log.send(ReleasingPartition(ANN, MAIL, claim, 8)) is Outcome.VALID
    assert log.claim(BEN) is Outcome.VALID
    assert log.world.find(MAIL).position == 8


@pytest.mark.guarantee("M19", "M20")
def test_who_pauses_a_group_sets_its_position_and_nobody_else_claims():
    log = Log()
    claim = log.hold(ANN, 5)
    assert log.send(ReleaseGroup(BEN, log.time + 10 * SECOND)) is Outcome.VALID
    batch = ClaimingMessages(ANN, MAIL, claim, 5, 6)
    assert log.send(batch) is Outcome.PAUSED
    assert log.send(ReleasingPartition(ANN, MAIL, claim, 4)) is Outcome.VALID
    assert log.world.find(MAIL).position == 5  # Only who pauses sets it back.
    assert log.claim(ANN) is Outcome.PAUSED
    claim = log.hold(BEN)
    assert log.send(ReleasingPartition(BEN, MAIL, claim, 2)) is Outcome.VALID
    assert log.world.find(MAIL).position == 2
    assert log.claim(ANN, after=10 * SECOND - 1) is Outcome.PAUSED
    assert log.claim(ANN, after=1) is Outcome.VALID


@pytest.mark.guarantee("M19", "M20")
def test_a_pause_is_that_of_one_run_and_its_rights_end_with_it():
    log = Log()
    ben_again = BEN._replace(instance_id="2")
    log.send(ReleaseGroup(BEN, log.time + 10 * SECOND))
    assert log.claim(ben_again) is Outcome.PAUSED
    claim = log.hold(BEN, 5)
    # The last one counts, also if it is the shorter one.
    log.send(ReleaseGroup(BEN, log.time + SECOND))
    release = ReleasingPartition(BEN, MAIL, claim, 4)
    assert log.send(release, after=SECOND) is Outcome.VALID
    assert log.world.find(MAIL).position == 5
    assert log.claim(ANN) is Outcome.VALID


@pytest.mark.guarantee("M23")
def test_a_batch_begins_where_the_one_before_ended():
    log = Log()
    assert log.claim(ANN) is Outcome.VALID
    batch = ClaimingMessages(ANN, MAIL, 0, None, 3)
    assert log.send(batch) is Outcome.UNCONFIRMED
    log.send(Heartbeat(ANN, MAIL, 0, None))
    assert log.send(ClaimingMessages(ANN, MAIL, 0, None, 0)) is Outcome.NOT_NEXT
    assert log.send(batch) is Outcome.VALID
    for first, end in ((None, 4), (2, 4), (4, 5), (3, 3)):
        wrong = ClaimingMessages(ANN, MAIL, 0, first, end)
        assert log.send(wrong) is Outcome.NOT_NEXT
    assert log.send(ClaimingMessages(ANN, MAIL, 0, 3, 4)) is Outcome.VALID
