"""A member draws its conclusions from its own records, in whatever order they come."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import pytest

from jobs_lib.coordination.claims import Hold, Phase
from jobs_lib.coordination.kept import Kept
from jobs_lib.coordination.member import Member
from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    Probe,
    ReleasingPartition,
    Sender,
    Shared,
)
from jobs_lib.coordination.patience import read_clock
from jobs_lib.coordination.place import Place
from jobs_lib.coordination.topics import Look
from jobs_lib.coordination.world import Entry, Holding
from jobs_lib.errors import ConfigurationError, UnavailableError
from jobs_lib.settings import load_settings
from tests.support.clock import Clock

if TYPE_CHECKING:
    from jobs_lib.coordination.writer import Sent, Writer

ORDERS = Shared("shop.mailer", "orders", 0)
OTHER = Sender("shop.mailer", "b", "its run")
LATE = UnavailableError("Kafka has not acknowledged it in time")


class Stepped(Member):
    """A member whose log has one partition, and goes on when a test says so."""

    def __init__(self) -> None:
        super().__init__(
            load_settings(),
            log="log",
            group="shop.mailer",
            client_id="a",
            topics=["orders"],
            listener=Mock(),
        )
        self.place = Place(0, 0, 0, read_clock())
        self.now_ms = 1
        self.sent: list[Sent] = []
        self.log._places, self.log.partitions = [self.place], 1
        self.log._writer = cast("Writer", self)
        self.log.is_known = True

    def stand_still(self) -> None:
        """Let the thread that reads stand still for longer than an interval."""
        self.log._standstill._noted_at -= self.interval
        self.log._standstill.note()

    def send(self, sent: Sent, *_: object) -> None:
        """Take a record as the writer does."""
        self.sent.append(sent)

    def claim(self) -> Sent:
        """Claim the partition; return the record that says so."""
        assert self._try_to_claim(ORDERS)
        return self.sent[-1]

    def read(self, said: Message) -> int:
        """Read a record as the next one of the log, and return its offset."""
        offset = self.place.world.next_offset
        outcome = self.place.fold(offset, self.now_ms, 1, said, self.sender)
        self.applied(0, said, outcome)
        return offset

    def read_back(self, sent: Sent) -> None:
        """Read an own record, which was acknowledged."""
        self.log._acknowledge(sent, 0, self.place.world.next_offset)
        self.read(sent.message)

    def hold(self, sent: Sent) -> None:
        """Read a claim back, and the heartbeat that follows it."""
        self.read_back(sent)
        self.read_back(self.sent[-1])
        assert self.is_held(ORDERS)


@pytest.fixture
def member():
    """A member that does nothing by itself, with the log's lock held."""
    stepped = Stepped()
    with stepped.log.lock:
        yield stepped


def lose_to_other(member: Stepped, first: Message) -> int:
    """Let another member claim and release the partition; an own record is between."""
    claim = member.read(ClaimingPartition(OTHER, ORDERS, 10_000))
    offset = member.read(first)
    member.read(ReleasingPartition(OTHER, ORDERS, claim, None))
    return offset


def test_an_earlier_claim_that_is_acknowledged_late_says_nothing_of_a_later_one(member):
    first = member.claim()
    offset = lose_to_other(member, first.message)
    second = member.claim()
    # It was refused. That of the second one is on its way.
    member.log._acknowledge(first, 0, offset)
    claim = member.place.world.next_offset
    member.read_back(second)
    assert member._kept[ORDERS].hold == Hold(Phase.CONFIRMING, claim)


def test_a_release_that_fails_late_says_nothing_of_a_later_claim(member):
    member.hold(member.claim())
    member._leave([ORDERS])
    member.release(ORDERS)
    release = member.sent[-1]
    member.read(release.message)
    claim = member.read(ClaimingPartition(OTHER, ORDERS, 10_000))
    member.read(ReleasingPartition(OTHER, ORDERS, claim, None))
    second = member.claim()
    # It is in the log, and was never acknowledged.
    member.log._give_up(release, 0, LATE)
    member.hold(second)


def test_what_was_taken_from_a_silent_holder_may_be_so_after_the_log_is_read_anew(
    member,
):
    member.read(ClaimingPartition(OTHER, ORDERS, 100))
    member.now_ms += 1_000
    member.read(ReleasingPartition(OTHER, ORDERS, 77, None))
    member.hold(member.claim())
    assert member.has_ousted(ORDERS)
    member.lost("it must be read anew")
    assert not member.has_ousted(ORDERS)
    member.known()
    assert member.has_ousted(ORDERS)


def test_a_claim_that_cannot_be_sent_is_sent_again_by_the_next_tick_only(member):
    member.send = lambda sent, place, *_: member.log._give_up(sent, place, LATE)
    member._news.clear()
    assert member._try_to_claim(ORDERS)
    assert not member._kept
    # Else it would try again without a pause, as long as the right to write is missing.
    assert not member._news.is_set()


@pytest.mark.guarantee("M11")
def test_a_member_that_stood_still_reads_to_the_end_before_it_claims(member):
    member.stand_still()
    assert member._try_to_claim(ORDERS)
    assert member._try_to_claim(ORDERS)
    (asked,) = member.sent
    # What came meanwhile stands before its probe: the partition is not free any more.
    claim = member.read(ClaimingPartition(OTHER, ORDERS, 10_000))
    assert not member._try_to_claim(ORDERS)
    member.read(ReleasingPartition(OTHER, ORDERS, claim, None))
    member._news.clear()
    member.read_back(asked)
    assert member._news.is_set()
    assert isinstance(member.claim().message, ClaimingPartition)


def test_a_member_that_stood_still_reads_first_whether_its_restart_goes_on(member):
    member.stand_still()
    member.place.current_at = read_clock()
    home = Place(1, 0, 0, 0.0)
    member.log._places.append(home)
    member._find_home = lambda: 1
    assert member._try_to_claim(ORDERS)
    (asked,) = member.sent
    assert isinstance(asked.message, Probe)
    assert home.catching_up is asked


def test_a_probe_for_the_end_that_failed_is_sent_by_the_next_tick_only(member):
    member.stand_still()
    member._news.clear()
    assert member._try_to_claim(ORDERS)
    member.log._give_up(member.sent[-1], 0, LATE)
    # Else it would ask without a pause, as long as the right to write is missing.
    assert not member._news.is_set()
    assert member._try_to_claim(ORDERS)
    assert [type(one.message) for one in member.sent] == [Probe] * 2


def test_a_release_of_what_was_lost_lets_go_nothing_that_is_held_anew(member):
    member.hold(member.claim())
    member._leave([ORDERS])
    member.lost("it must be read anew")
    member.known()
    member._beat(math.inf)
    member.read_back(member.sent[-1])
    sent = len(member.sent)
    # Whoever was to leave it has handed it over by now.
    member.release(ORDERS)
    assert len(member.sent) == sent
    assert member.is_held(ORDERS)


class Counted(dict[Shared, Kept]):
    """What is kept, with a count of how often all of it was looked at."""

    looks = 0

    def values(self) -> Any:
        self.looks += 1
        return super().values()


def test_an_own_record_that_is_read_costs_no_look_at_all_that_is_held(member):
    member.hold(member.claim())
    member._kept = kept = Counted(member._kept)
    member._beat(math.inf)
    # There may be thousands, with three heartbeats an interval each.
    member.read_back(member.sent[-1])
    member.read(Probe(member.sender))
    member.read(ClaimingPartition(member.sender, ORDERS, 10_000))
    assert member.is_held(ORDERS)
    assert kept.looks == 0


@pytest.mark.guarantee("M11")
@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize("client", ["a", "b"])
def test_who_woke_ends_if_its_restart_holds_by_a_snapshot_what_it_has_held(
    member, client
):
    member.read(Probe(member.sender, interval_ms=10_000))
    member.hold(member.claim())
    member.lost("it must be read anew")
    # A snapshot says so. The claim and all before it are read no more.
    later = Holding(client, "a later run", 60, 10_000, 90_000, True)
    member.place.world.entries[ORDERS] = Entry(5, later)
    member.known()
    if client == "b":
        assert member.error is None
    else:
        assert "has taken its partitions over" in str(member.error)


def test_what_was_lost_is_claimed_again_once_the_listener_has_noted_it(
    member, gate, wait_for
):
    member._listener.lost = lambda shared: gate.wait(30)
    member._notices.start()
    member.hold(member.claim())
    member.now_ms += 60_000
    # Another member has taken it, and released it.
    claim = member.read(ClaimingPartition(OTHER, ORDERS, 10_000))
    member.read(ReleasingPartition(OTHER, ORDERS, claim, None))
    assert not member._kept
    # Part of it may still be processed here.
    assert not member._try_to_claim(ORDERS)
    assert len(member.sent) == 2
    gate.set()
    # The listener's thread takes the lock to note that.
    wait_for(lambda: member.log.lock.wait(0.1) or not member._losing)
    member.hold(member.claim())
    member._notices.stop(30)


def test_nothing_is_claimed_until_a_log_that_was_cut_is_read_anew(member):
    member._topics.last = Look([(ORDERS.topic, ORDERS.partition)], frozenset())
    member._is_seen = True
    member.lost("it must be read anew")
    member.log.is_known = False
    ticks = member._tick_on()
    next(ticks)
    # Another member may hold it: what is left of the log does not say so yet.
    assert not member.sent
    member.log.is_known = True
    member._news.set()
    next(ticks)
    assert [type(one.message) for one in member.sent] == [Probe, ClaimingPartition]


@pytest.fixture
def clock(monkeypatch):
    """The clock of the member's machine."""
    clock = Clock(1_000.0)
    for module in ("holdings", "member", "writer"):
        name = f"jobs_lib.coordination.{module}.read_clock"
        monkeypatch.setattr(name, clock.monotonic)
    return clock


@pytest.mark.guarantee("M18")
@pytest.mark.parametrize("kind", [Heartbeat, ClaimingMessages])
def test_a_member_is_sure_for_an_interval_after_it_has_sent_what_it_reads_back(
    clock, member, kind
):
    member.hold(member.claim())
    clock.now += member.interval / 2
    if kind is Heartbeat:
        member._beat(clock.now)
    else:
        member.claim_messages(ORDERS, None, 5)
    sent_at, sent = clock.now, member.sent[-1]
    assert isinstance(sent.message, kind)
    clock.now = sent_at + 0.9 * member.interval
    # Nothing else was read back for longer than an interval.
    assert not member.is_sure(ORDERS)
    member.read_back(sent)
    assert member.is_sure(ORDERS)
    # The log counts from when it was appended, which may be right after it was sent.
    clock.now = sent_at + 1.1 * member.interval
    assert not member.is_sure(ORDERS)
    assert member.is_held(ORDERS)


@pytest.mark.parametrize("odd", [2**63, -1, 1.0, True, "5"])
def test_a_position_that_readers_pass_over_is_refused(member, odd):
    member.hold(member.claim())
    told = f"^{odd!r} cannot be a position: give the offset of the next record"
    with pytest.raises(ConfigurationError, match=told):
        member.set_position(ORDERS, odd, at_once=True)
    for first, end in [(odd, 5), (None, odd)]:
        with pytest.raises(ConfigurationError, match=told):
            member.claim_messages(ORDERS, first, end)
    assert len(member.sent) == 2
    member.set_position(ORDERS, 2**63 - 1, at_once=True)
    member.read_back(member.sent[-1])
    assert member.log.find(ORDERS).position == 2**63 - 1
