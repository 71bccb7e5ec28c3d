"""Members share partitions, keep them, and hand them over."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from jobs_lib import telemetry
from jobs_lib.coordination.member import Member
from jobs_lib.coordination.messages import (
    ClaimingPartition,
    Heartbeat,
    Probe,
    ReleaseGroup,
    ReleasingPartition,
    Sender,
    Shared,
)
from jobs_lib.coordination.place import Place
from jobs_lib.coordination.topics import Look
from jobs_lib.coordination.world import Entry, Holding, Outcome
from jobs_lib.errors import ConfigurationError, FencedError, TopicError
from tests.support.topics import grow_topic
from tests.support.waiting import linger

if TYPE_CHECKING:
    from jobs_lib.coordination.messages import Message
    from jobs_lib.coordination.writer import Sent

INTERVAL = 0.5
WAIT = 30.0


class Holder:
    """Releases at once what a member should leave, and notes what it is told."""

    def __init__(self) -> None:
        self.member: Member
        self.told: list[tuple[object, ...]] = []
        self.holds_on = False

    def taken(self, shared, position) -> None:
        self.told.append(("taken", shared.partition, position))

    def leave(self, shared) -> None:
        self.told.append(("leave", shared.partition))
        if not self.holds_on:
            self.member.release(shared)

    def lost(self, shared) -> None:
        self.told.append(("lost", shared.partition))

    def ended(self, error) -> None:
        self.told.append(("ended", str(error)))


@pytest.fixture
def join(settings):
    """A function that starts a member: `join(log, "a", topics)`."""
    members: list[Member] = []

    def start(log, client_id, topics, group="shop.mailer", **more) -> Member:
        holder = Holder()
        member = Member(
            settings,
            log=log,
            group=group,
            client_id=client_id,
            topics=topics,
            listener=holder,
            **({"interval": INTERVAL} | more),
        )
        holder.member = member
        members.append(member)
        member.start()
        return member

    yield start
    for member in members:
        member.stop(0 if member._ticking.stopping.is_set() else 5)


def held(member) -> set[int]:
    """The numbers of the partitions that a member holds."""
    return {shared.partition for shared in member.list_held()}


def is_told(member, partitions) -> bool:
    """Whether the listener, in its thread, was told of all that the member holds."""
    told = {one[1] for one in member._listener.told if one[0] == "taken"}
    return held(member) == partitions <= told


def die(member) -> None:
    """End a member as if its process had been killed."""
    member._ticking.stop()
    member._topics.stop(WAIT)
    member.log.stop()


@pytest.mark.guarantee("M13")
def test_members_share_evenly_and_hand_over_without_waiting(
    log_topic, topic, join, open_log, wait_for
):
    log, data = log_topic(), topic(7)
    waits = note_hand_overs(open_log(log, "watch", only_reads=True))
    # Nobody looks by itself for ten minutes: what is claimed is claimed by the news.
    calm = {"interval": 3_600.0, "topics_every": 3_600.0}
    first = join(log, "a", [data], **calm)
    wait_for(lambda: len(held(first)) == 7, what="the first one holds all")
    second = join(log, "b", [data], **calm)
    wait_for(lambda: list_members(first) == ["a", "b"], what="the first one sees it")
    first._news.set()
    wait_for(
        lambda: (len(held(first)), len(held(second))) == (4, 3),
        what=lambda: f"both share: {held(first)} {held(second)}",
    )
    assert not held(first) & held(second)
    for shared in first.list_held():
        first.set_position(shared, 40 + shared.partition)
    first.stop()
    wait_for(lambda: len(held(second)) == 7, what="the second one holds all")
    positions = {one.partition: at for one, at in second.list_held().items()}
    assert sum(at == 40 + number for number, at in positions.items()) == 4
    wait_for(lambda: len(waits) == 7, what="the log tells of all hand-overs")
    assert max(waits) < 3_000


def list_members(member) -> list[str]:
    """The clients of which a member has seen something lately."""
    with member.log.lock:
        return member._attendance.list_members()


def note_hand_overs(log) -> list[int]:
    """The milliseconds of the log from each release to the claim that follows it."""
    waits: list[int] = []
    released: dict[Shared, int] = {}

    def wrap(real):
        def fold(offset, time_ms, partitions, said, own):
            outcome = real(offset, time_ms, partitions, said, own)
            if outcome is Outcome.VALID and isinstance(said, ReleasingPartition):
                released[said.shared] = time_ms
            elif (
                outcome is Outcome.VALID
                and isinstance(said, ClaimingPartition)
                and said.shared in released
            ):
                waits.append(time_ms - released.pop(said.shared))
            return outcome

        return fold

    for place in log._places:
        place.fold = wrap(place.fold)
    return waits


@pytest.mark.guarantee("M13")
def test_a_member_that_stops_says_nothing_once_it_has_released_all(
    log_topic, topic, join, open_log, wait_for
):
    log, data = log_topic(1), topic(2)
    said: list[Message] = []
    watching = open_log(log, "watch", only_reads=True)
    real = watching._places[0].fold

    def fold(offset, time_ms, partitions, message, own):
        said.append(message)
        return real(offset, time_ms, partitions, message, own)

    watching._places[0].fold = fold
    member = join(log, "a", [data])
    wait_for(lambda: len(held(member)) == 2, what="it holds all")
    member.ask_to_stop()
    wait_for(lambda: not held(member), what="it has released all")
    # Others would believe for two intervals that it wants a share.
    linger(2 * INTERVAL)
    member.stop()
    watching.read_to_end()
    assert isinstance(said[-1], ReleasingPartition)


@pytest.mark.guarantee("M17")
def test_the_partitions_of_a_dead_member_are_taken_between_two_and_three_intervals(
    log_topic, topic, join, open_log, wait_for
):
    log, data = log_topic(1), topic(4)
    times: dict[int, list[tuple[ClaimingPartition | Heartbeat, int]]] = {}
    watching = open_log(log, "watch", only_reads=True)
    real = watching._places[0].fold

    def fold(offset, time_ms, partitions, said, own):
        if isinstance(said, (ClaimingPartition, Heartbeat)):
            times.setdefault(said.shared.partition, []).append((said, time_ms))
        return real(offset, time_ms, partitions, said, own)

    watching._places[0].fold = fold
    first = join(log, "a", [data], interval=2.0)
    second = join(log, "b", [data], interval=2.0)
    wait_for(lambda: len(held(first)) == len(held(second)) == 2)
    gone = held(first)
    die(first)
    wait_for(lambda: len(held(second)) == 4, what="the second one holds all")
    watching.read_to_end()
    for number in gone:
        last = max(ms for said, ms in times[number] if said.sender == first.sender)
        claim = max(
            ms
            for said, ms in times[number]
            if isinstance(said, ClaimingPartition) and said.sender == second.sender
        )
        assert 4_000 < claim - last < 6_000


@pytest.mark.guarantee("M10")
def test_a_restarted_member_resumes_its_partitions_with_their_positions(
    log_topic, topic, join, wait_for
):
    log, data = log_topic(), topic(4)
    # So long that no member counts as dead since the machine is busy.
    first = join(log, "a", [data], interval=4.0)
    other = join(log, "b", [data], interval=4.0)
    wait_for(lambda: len(held(first)) == len(held(other)) == 2)
    former = held(first)
    for shared in first.list_held():
        first.set_position(shared, 70 + shared.partition)
    wait_for(
        lambda: all(first.log.find(one).position for one in first.list_held()),
        what="the positions are told",
    )
    die(first)
    again = join(log, "a", [data], interval=4.0)
    wait_for(lambda: held(again) == former, what=lambda: f"{held(again)} of {former}")
    assert {one.partition: at for one, at in again.list_held().items()} == {
        number: 70 + number for number in former
    }
    assert held(other).isdisjoint(former)


class Counted(str):
    """A topic's name that counts how often it is compared."""

    __hash__ = str.__hash__
    compared = 0

    def __eq__(self, other) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)


def test_a_restart_compares_each_partition_a_few_times(settings, monkeypatch):
    count = 1_000
    member = Member(
        settings,
        log="log",
        group="shop.mailer",
        client_id="a",
        topics=["orders"],
        listener=Holder(),
    )
    place = Place(0, 0, 0)
    for number in range(count):
        shared = Shared("shop.mailer", "orders", number)
        place.world.entries[shared] = Entry(
            5, Holding("a", "old", number, 500, 0, True)
        )
    log = member.log
    log._places, log.partitions = [place], 1
    # What the former process holds is fresh: nothing can be claimed yet.
    monkeypatch.setattr(log, "probe", lambda *_: None)
    parts = [(Counted("orders"), one) for one in range(count)]
    member._topics.last = Look(parts, frozenset())
    member._resuming = set(place.world.entries)
    monkeypatch.setattr(Counted, "compared", 0)
    with log.lock:
        member._resume()
    assert len(member._resuming) == count
    assert Counted.compared <= 10 * count


@pytest.mark.guarantee("M11")
@pytest.mark.expects("loop.failed")
def test_a_second_process_of_a_client_is_refused_and_the_first_goes_on(
    log_topic, topic, join, wait_for
):
    log, data = log_topic(), topic(2)
    first = join(log, "a", [data])
    wait_for(lambda: len(held(first)) == 2)
    with pytest.raises(FencedError, match="client id 'a' is at work in the group"):
        join(log, "a", [data])
    assert first.error is None
    assert len(held(first)) == 2


@pytest.mark.expects("loop.failed")
def test_a_second_process_is_refused_where_the_first_holds_nothing(
    log_topic, topic, join, wait_for
):
    log, data = log_topic(), topic(1)
    join(log, "0", [data])
    idle = join(log, "a", [data])
    wait_for(lambda: idle._attendance.list_members() == ["0", "a"])
    # The first one probes now and then: at its start, or a moment later.
    try:
        second = join(log, "a", [data])
    except FencedError as error:
        told = str(error)
    else:
        wait_for(lambda: second.error is not None, what="the second one has ended")
        told = str(second.error)
    assert "is at work" in told
    assert idle.error is None


@pytest.mark.expects("loop.failed")
def test_a_process_whose_restart_has_its_partitions_ends_and_says_so(
    log_topic, topic, join, wait_for
):
    failed: list[dict[str, object]] = []
    log, data = log_topic(1), topic(1)
    first = join(log, "a", [data])
    wait_for(lambda: len(held(first)) == 1)
    # It ticks no more, and its log goes on: as if it stood still.
    first._ticking.stop()
    end = telemetry.listen(lambda _, fields: failed.append(fields), {"loop.failed"})
    again = join(log, "a", [data])
    wait_for(lambda: first.error is not None, what="the first one has ended")
    wait_for(lambda: held(again) == {0})
    end()
    assert any(str(first.error) in str(one["error"]) for one in failed)
    assert "has taken its partitions over" in str(first.error)
    wait_for(lambda: ("lost", 0) in first._listener.told, what="it was told of it")


@pytest.mark.guarantee("M6")
def test_heartbeats_come_within_the_interval_while_a_listener_hangs(
    log_topic, topic, join, open_log, wait_for, gate
):
    log, data = log_topic(1), topic(1)
    # A busy machine may delay a heartbeat by more than half a second.
    member = join(log, "a", [data], interval=1.0)
    member._listener.leave = lambda shared: gate.wait(WAIT)
    wait_for(lambda: held(member) == {0})
    times: list[float] = []
    watching = open_log(log, "watch", only_reads=True)
    real = watching._places[0].fold

    def fold(offset, time_ms, partitions, said, own):
        if isinstance(said, Heartbeat):
            times.append(time_ms)
        return real(offset, time_ms, partitions, said, own)

    watching._places[0].fold = fold
    pauser = open_log(log, "pauser")
    now_ms = pauser.get_world(0).now_ms
    pauser.send(ReleaseGroup(pauser.sender, now_ms + 60_000), place=0).wait(WAIT)
    wait_for(lambda: len(times) > 15, what="heartbeats go on")
    assert max(b - a for a, b in itertools.pairwise(times)) < 1_000
    assert member.is_sure(Shared("shop.mailer", data, 0))
    gate.set()


@pytest.mark.guarantee("M8", "FK18")
def test_fifty_racers_for_one_partition_have_one_winner(log_topic, open_log, wait_for):
    name = log_topic(1)
    logs = [open_log(name, f"racer-{number}") for number in range(5)]
    shared = Shared("shop.mailer", "orders", 0)
    senders = [Sender("shop.mailer", f"c-{n}", f"i-{n}") for n in range(50)]
    barrier = threading.Barrier(5)
    sent: list[Sent] = []

    def race(log, own) -> None:
        barrier.wait()
        sent.extend(log.send(ClaimingPartition(one, shared, 500)) for one in own)

    threads = [
        threading.Thread(target=race, args=(log, senders[number::5]))
        for number, log in enumerate(logs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends = [log.send(Probe(log.sender), place=0) for log in logs]
    for end in ends:
        end.wait(WAIT)
    for log in logs:
        log.read_to_end()
    holdings = {log.find(shared).holding for log in logs}
    assert len(holdings) == 1
    (winner,) = holdings
    assert winner.claim == min(one.offset for one in sent if one.offset is not None)


@pytest.mark.guarantee("M8")
def test_members_that_race_for_few_partitions_hold_each_once(
    log_topic, topic, join, wait_for
):
    log, data = log_topic(2), topic(2)
    names = [f"m-{number}" for number in range(10)]
    with ThreadPoolExecutor(len(names)) as pool:
        members = [*pool.map(lambda name: join(log, name, [data]), names)]

    def count() -> list[int]:
        return sorted(number for one in members for number in held(one))

    def find_winner() -> Member | None:
        if count() != [0, 1]:
            return None
        return next((one for one in members if held(one)), None)

    # Those who have lost go on: whoever ends, another one takes its place.
    for _ in range(3):
        winner = wait_for(find_winner, what=lambda: f"each is held once: {count()}")
        members.remove(winner)
        winner.stop()
    shared = [Shared("shop.mailer", data, number) for number in range(2)]

    def says_the_same() -> bool:
        told = [members[0].log.find(one).holding for one in shared]
        holders = [[one.sender for one in members if n in held(one)] for n in range(2)]
        return all(
            one is not None and len(own) == 1 and one.is_of(own[0])
            for one, own in zip(told, holders, strict=True)
        )

    wait_for(says_the_same, what=lambda: f"the log says the same: {count()}")


def note_claims(log) -> list[tuple[str, int]]:
    """The valid claims of the log, each by its client id and its time in ms."""
    claims: list[tuple[str, int]] = []

    def wrap(real):
        def fold(offset, time_ms, partitions, said, own):
            outcome = real(offset, time_ms, partitions, said, own)
            if outcome is Outcome.VALID and isinstance(said, ClaimingPartition):
                claims.append((said.sender.client_id, time_ms))
            return outcome

        return fold

    for place in log._places:
        place.fold = wrap(place.fold)
    return claims


@pytest.mark.guarantee("M19", "M12")
def test_a_paused_group_releases_and_claims_nothing_until_the_pause_is_over(
    log_topic, topic, join, open_log, wait_for
):
    log, data = log_topic(2), topic(4)
    claims = note_claims(open_log(log, "watch", only_reads=True))
    members = [join(log, client_id, [data]) for client_id in "ab"]
    other = join(log, "z", [data], group="shop.other")

    def count_held() -> list[int]:
        return [len(held(member)) for member in members]

    wait_for(lambda: count_held() == [2, 2], what=lambda: f"both share: {count_held()}")
    pauser = open_log(log, "pauser")
    began = max(one.now_ms for one in pauser.get_worlds())
    until = began + 6_000
    for place in range(2):
        pauser.send(ReleaseGroup(pauser.sender, until), place=place).wait(WAIT)
    wait_for(lambda: count_held() == [0, 0], what="all is released")
    # The position of a partition is set while nobody holds it.
    shared = Shared("shop.mailer", data, 0)
    claim = pauser.send(ClaimingPartition(pauser.sender, shared, 500))
    assert claim.wait(WAIT) is Outcome.VALID
    claim_at = claim.offset
    assert claim_at is not None
    told = pauser.send(ReleasingPartition(pauser.sender, shared, claim_at, 123))
    assert told.wait(WAIT) is Outcome.VALID
    assert count_held() == [0, 0]
    wait_for(
        lambda: count_held() == [2, 2],
        what=lambda: f"both claim again: {count_held()}",
    )
    again = [
        (client_id, time_ms)
        for client_id, time_ms in claims
        if client_id in "ab" and time_ms > began
    ]
    assert {client_id for client_id, _ in again} == {"a", "b"}
    assert min(time_ms for _, time_ms in again) >= until
    (position,) = [m.list_held()[shared] for m in members if shared in m.list_held()]
    assert position == 123
    assert len(held(other)) == 4


def test_partitions_that_are_added_to_a_topic_are_claimed(
    log_topic, topic, join, wait_for, kafka_admin
):
    log, data = log_topic(), topic(1)
    member = join(log, "a", [data], topics_every=0.2)
    wait_for(lambda: held(member) == {0})
    grow_topic(kafka_admin, data, 3)
    wait_for(lambda: held(member) == {0, 1, 2}, what="the new ones are held")


def test_a_member_is_not_sure_when_nothing_is_read_back(
    log_topic, topic, join, wait_for
):
    member = join(log_topic(), "a", [data := topic(1)])
    wait_for(lambda: held(member) == {0})
    shared = Shared("shop.mailer", data, 0)
    assert member.is_sure(shared)
    member._ticking.stop()
    wait_for(lambda: not member.is_sure(shared), timeout=5)
    assert member.is_held(shared)


@pytest.mark.guarantee("FK18")
def test_a_member_that_reads_late_is_not_sure_and_loses_nothing(
    log_topic, topic, join, open_log, wait_for, gate
):
    log, data = log_topic(1), topic(2)
    watching = open_log(log, "watch", only_reads=True)
    late, other = (join(log, one, [data], interval=1.0) for one in "ab")
    wait_for(lambda: len(held(late)) == len(held(other)) == 1)
    (shared,) = late.list_held()
    wait_for(lambda: is_told(late, {shared.partition}))
    late._listener.told.clear()
    real = late.log._step

    def step(consumer) -> None:
        gate.wait(WAIT)
        real(consumer)

    late.log._step = step
    wait_for(lambda: not late.is_sure(shared), what="it is not sure any more")
    # Its heartbeats go on. So nobody else may take what it holds.
    until = watching.get_world(0).now_ms + 3_000
    wait_for(lambda: watching.get_world(0).now_ms > until, what="time passes")
    assert watching.find(shared).holding.client_id == "a"
    assert not late.is_sure(shared)
    gate.set()
    wait_for(lambda: late.is_sure(shared), what="it is sure again")
    assert not late._listener.told


@pytest.mark.guarantee("M11")
def test_a_member_that_stood_still_claims_nothing_that_is_held_by_now(
    log_topic, join, wait_for, gate, monkeypatch
):
    log, parts = log_topic(1), [("orders", 0)]
    found: list[tuple[str, int]] = []
    late = join(log, "z", [], parts=lambda: [*found], topics_every=0.05, interval=2)
    read, send = late.log._step, late.log.send
    claims: list[Message] = []

    def step(consumer) -> None:
        gate.wait(WAIT)
        read(consumer)

    def note(said, **more) -> Sent:
        if isinstance(said, ClaimingPartition):
            claims.append(said)
        return send(said, **more)

    monkeypatch.setattr(late.log, "_step", step)
    wait_for(lambda: not late.log.is_current(0), what="it stands still")
    other = join(log, "a", [], parts=lambda: parts, interval=2)
    wait_for(lambda: held(other) == {0})
    monkeypatch.setattr(late.log, "send", note)
    # As far as it has read, nobody else is there.
    found += parts
    wait_for(lambda: late.log._places[0].catching_up, what="it asks for the end")
    gate.set()
    wait_for(lambda: late.log.is_current(0), what="it has read to the end")
    assert not claims
    assert late._attendance.list_members() == ["a", "z"]


def test_a_log_that_was_cut_is_lost_and_what_it_still_says_is_held_again(
    log_topic, topic, join, wait_for
):
    member = join(log_topic(1), "a", [topic(2)])
    wait_for(lambda: is_told(member, {0, 1}))
    member._listener.told.clear()
    with member.log.lock:
        # The next record that comes does not follow the last one.
        member.log.get_world(0).next_offset += 4
    wait_for(
        lambda: len(member._listener.told) == 4 and held(member) == {0, 1},
        what=lambda: f"lost, and taken again: {member._listener.told}",
    )
    assert [told[0] for told in member._listener.told] == ["lost"] * 2 + ["taken"] * 2


def test_a_member_stops_although_what_finds_its_partitions_hangs(settings):
    hangs, may_go, found = threading.Event(), threading.Event(), [("orders", 0)]

    def find() -> list[tuple[str, int]]:
        if found:
            return [found.pop()]
        hangs.set()
        may_go.wait(WAIT)
        return []

    member = Member(
        settings,
        log="log",
        group="shop.mailer",
        client_id="a",
        parts=find,
        listener=Holder(),
        topics_every=0.01,
    )
    member._topics.start()
    assert hangs.wait(WAIT)
    stopping = threading.Thread(target=member.stop, args=[0.1])
    stopping.start()
    stopping.join(5)
    try:
        assert not stopping.is_alive()
    finally:
        may_go.set()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"group": "mailer"}, "group='mailer' needs a namespace"),
        ({"group": ".mailer"}, "namespace"),
        ({"group": "-.-"}, "namespace"),
        ({"group": "a." + "b" * 199}, "200 characters"),
        ({"client_id": ""}, "client_id='' must have 1 to 200"),
        ({"client_id": "x" * 201}, "must have 1 to 200"),
        ({"topics": []}, "must be a list of names"),
        ({"topics": "orders"}, "topics='orders' must be a list"),
        ({"topics": [""]}, "must be a list"),
        ({"log": ""}, "log has no name"),
        ({"log": None}, "log has no name"),
        ({"log": 5}, "log=5 must be the name of a topic"),
        ({"log": "x" * 250}, "1 to 249 characters"),
        ({"group": None}, "group=None needs a namespace"),
        ({"group": "a.\ud800"}, r"group='a.\\ud800' needs .* surrogate"),
        ({"client_id": None}, "client_id=None must have"),
        ({"client_id": "x\udfff"}, r"client_id='x\\udfff' must .* surrogate"),
        ({"topics": None}, "topics=None must be a list"),
        ({"topics": 5}, "topics=5 must be a list"),
        ({"topics": [5]}, r"topics=\[5\] must be a list"),
        ({"topics": b"orders"}, "must be a list"),
        ({"topics": iter(["orders"])}, "must be a list"),
        ({"topics": ["x" * 250]}, "1 to 249 characters"),
        ({"topics": ["\ud800"]}, "must be a list of names"),
        ({"topics_every": 0}, "topics_every=0 must be seconds above 0"),
        ({"topics_every": None}, "topics_every=None"),
        ({"interval": 0.09}, "interval=0.09 must be seconds from 0.1 to 3600"),
        ({"interval": 3600.5}, "from 0.1 to 3600"),
        ({"interval": "10"}, "interval='10'"),
        ({"interval": float("nan")}, "interval=nan"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else given,
)
def test_bad_input_is_refused_before_anything_is_sent(settings, given, told):
    good = {"log": "log", "group": "a.b", "client_id": "c", "topics": ["t"]}
    with pytest.raises(ConfigurationError, match=told):
        Member(settings, listener=Holder(), **(good | given))


def test_a_topic_that_is_missing_is_refused(log_topic, join):
    with pytest.raises(TopicError, match="'no-topic'"):
        join(log_topic(), "a", ["no-topic"])
