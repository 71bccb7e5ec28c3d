"""The consumer without a database: deliveries, errors, positions, and bad input."""

from __future__ import annotations

import copy
import math
import pickle
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Message, Producer, TopicPartition

from jobs_lib import telemetry
from jobs_lib.backoff import Retry
from jobs_lib.coordination import Consumer, patience
from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    ReleaseGroup,
    ReleasingPartition,
    Shared,
)
from jobs_lib.coordination.world import Entry, Outcome, World
from jobs_lib.coordination.writer import Sent
from jobs_lib.errors import ConfigurationError, UnavailableError
from jobs_lib.kafka import places
from tests.support.topics import create_topic, delete_topics
from tests.support.waiting import linger

INTERVAL = 0.5
WAIT = 30.0
GROUP = "shop.mailer"
MOVED = "offset.moved"
STARTED = "consumer.started"


@pytest.fixture
def publish(bootstrap_servers):
    """A function that writes so many records: `publish(topic, 10, partition=0)`."""

    def send(topic: str, count: int, partition: int = 0) -> None:
        producer = Producer({"bootstrap.servers": bootstrap_servers})
        for number in range(count):
            producer.produce(
                topic,
                f"value {number}",
                f"key {number}",
                partition=partition,
                headers=[("kind", b"test")],
            )
        producer.flush(WAIT)

    return send


@pytest.fixture
def heard():
    """The events about records, with their fields."""
    found: list[tuple[str, dict[str, Any]]] = []
    remove = telemetry.listen(
        lambda event, fields: found.append((event, fields)),
        only={"record.failed", "record.skipped", "offset.lost", MOVED, STARTED},
    )
    yield found
    remove()


class Handler:
    """Keeps what it gets, and fails or waits where it is told to."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, int]] = []
        self.records: list[Any] = []
        self.fails = 0
        self.may_go = threading.Event()
        self.may_go.set()

    def __call__(self, records) -> None:
        first, last = records[0], records[-1]
        self.batches.append((first.partition, first.offset, last.offset + 1))
        self.may_go.wait(WAIT)
        if self.fails:
            self.fails -= 1
            raise ValueError("the mail server is away")
        self.records += records

    def offsets(self) -> list[int]:
        """The offsets that were handled."""
        return [record.offset for record in self.records]


@pytest.fixture
def consume(settings):
    """A function that starts a consumer: `consume(log, topics, handler)`."""
    started: list[Consumer] = []

    def start(log, topics, handler, **more) -> Consumer:
        given: dict[str, Any] = {"group": GROUP, "client_id": "a", "interval": INTERVAL}
        given |= more
        consumer = Consumer(settings, log=log, topics=topics, handle=handler, **given)
        started.append(consumer)
        consumer.start()
        return consumer

    yield start
    for consumer in started:
        consumer.stop()


def give(records):
    yield from records


class Sender:
    async def __call__(self, records) -> None:
        """Send them."""


LAZY = (give, Sender())


def set_position(log, shared, position, wait_for) -> None:
    """Pause a group, set a position, and end the pause."""
    until = max(world.now_ms for world in log.get_worlds()) + 60_000
    place = log.find_place(shared)
    log.send(ReleaseGroup(log.sender, until), place=place).wait(WAIT)
    wait_for(lambda: log.find(shared).holding is None, what="it is released")
    claim = log.send(ClaimingPartition(log.sender, shared, 500))
    assert claim.wait(WAIT) is Outcome.VALID
    told = ReleasingPartition(log.sender, shared, claim.offset, position)
    assert log.send(told).wait(WAIT) is Outcome.VALID
    log.send(ReleaseGroup(log.sender, 0), place=place).wait(WAIT)


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_each_record_is_handled_and_a_later_run_goes_on_behind_it(
    log_topic, topic, publish, consume, wait_for, delivery, heard
):
    log, data = log_topic(), topic(3)
    for number in range(3):
        publish(data, 25, number)
    handler = Handler()
    consumer = consume(log, [data], handler, delivery=delivery, batch=10)
    wait_for(lambda: len(handler.records) == 75, what="all are handled")
    assert sorted({one.partition for one in handler.records}) == [0, 1, 2]
    assert max(end - first for _, first, end in handler.batches) <= 10
    first = next(one for one in handler.records if one.offset == 0)
    assert (first.key, first.value) == (b"key 0", b"value 0")
    assert first.headers == (("kind", b"test"),)
    assert first.timestamp.year > 2000
    assert "value 0" not in repr(first)
    assert "key 0" not in repr(first)
    copied = pickle.loads(pickle.dumps(first))
    assert copied == copy.copy(first) == first
    assert hash(copied) == hash(first)
    assert (copied.key, copied.timestamp) == (first.key, first.timestamp)
    assert handler.records[1] != first
    consumer.stop()
    publish(data, 5, 1)
    again = Handler()
    consume(log, [data], again, delivery=delivery)
    wait_for(lambda: len(again.records) == 5, what="the new ones are handled")
    assert again.offsets() == [25, 26, 27, 28, 29]
    cost = dict(heard)[STARTED]
    assert cost["per_record"] == (0.01 if delivery == "at_most_once" else 0)
    assert cost["per_second"] == 6


def test_at_least_once_a_failed_batch_is_tried_again_and_others_go_on(
    log_topic, topic, publish, consume, wait_for, heard
):
    log, data = log_topic(), topic(2)
    publish(data, 5, 0)
    handler = Handler()
    handler.fails = 3
    consumer = consume(log, [data], handler, retry=Retry(first=0.01, cap=0.01))
    wait_for(lambda: len(handler.records) == 5, what="it is handled at last")
    assert handler.batches == [(0, 0, 5)] * 4
    failed = [fields for event, fields in heard if event == "record.failed"]
    assert len(failed) == 3
    assert failed[0]["origin"] == f"{data}/0"
    assert "the mail server is away" in failed[0]["error"]
    # One that fails for long holds up no other partition.
    handler.fails = 1
    consumer._retry = Retry(first=1_000, cap=1_000)
    publish(data, 1, 0)
    wait_for(lambda: not handler.fails, what="it has failed")
    publish(data, 1, 1)
    wait_for(lambda: len(handler.records) == 6, what="the other one is handled")
    assert handler.records[-1].partition == 1


def test_at_most_once_a_failed_batch_is_lost_and_named(
    log_topic, topic, publish, consume, wait_for, heard
):
    log, data = log_topic(), topic(1)
    publish(data, 25)
    handler = Handler()
    handler.fails = 1
    consume(log, [data], handler, delivery="at_most_once", batch=10)
    wait_for(lambda: len(handler.records) == 15, what="the others are handled")
    assert handler.offsets() == list(range(10, 25))
    (skipped,) = [fields for event, fields in heard if event == "record.skipped"]
    assert (skipped["offset"], skipped["count"]) == (0, 10)


def test_at_most_once_a_batch_is_claimed_before_it_is_handled(
    log_topic, topic, publish, consume, wait_for
):
    log, data = log_topic(1), topic(1)
    publish(data, 5)
    shared = Shared(GROUP, data, 0)
    seen: list[int | None] = []

    def handle(records) -> None:
        seen.append(consumer.member.log.find(shared).position)

    consumer = consume(log, [data], handle, delivery="at_most_once", batch=2)
    wait_for(lambda: len(seen) == 3, what="all are handled")
    assert seen == [2, 4, 5]


@pytest.mark.guarantee("M14")
def test_at_most_once_a_batch_whose_claim_is_not_valid_is_not_handled(
    log_topic, topic, publish, consume, open_log, wait_for
):
    log, data = log_topic(1), topic(1)
    publish(data, 1)
    handler = Handler()
    consumer = consume(log, [data], handler, delivery="at_most_once")
    wait_for(lambda: len(handler.records) == 1)
    shared = Shared(GROUP, data, 0)
    holding = consumer.member.log.find(shared).holding
    # A claim of this member that came late, and nobody has waited for.
    late = ClaimingMessages(consumer.member.sender, shared, holding.claim, 1, 4)
    assert consumer.member.log.send(late).wait(WAIT) is Outcome.VALID
    publish(data, 6)
    wait_for(lambda: len(handler.records) == 4, what="those behind it are handled")
    assert handler.offsets() == [0, 4, 5, 6]


@pytest.mark.guarantee("M14", "M15")
def test_at_most_once_a_batch_whose_claim_was_not_acknowledged_is_handled(
    log_topic, topic, publish, consume, wait_for, heard
):
    log, data = log_topic(1), topic(1)
    handler = Handler()
    consumer = consume(log, [data], handler, delivery="at_most_once", batch=2)
    read = consumer.member.log
    given_up: list[int] = []

    def acknowledge(sent, place, offset) -> None:
        if isinstance(sent.message, ClaimingMessages) and len(given_up) < 3:
            # The client has given it up, as after a stop of the process.
            given_up.append(offset)
            read._give_up(sent, place, UnavailableError("it took too long"))
        else:
            read._acknowledge(sent, place, offset)

    read._writer._acknowledged = acknowledge
    publish(data, 9)
    wait_for(lambda: len(handler.records) == 9, what="all are handled")
    assert (handler.offsets(), len(given_up), heard[1:]) == ([*range(9)], 3, [])


@pytest.mark.expects("loop.failed")  # a busy broker says late where it ends
@pytest.mark.guarantee("M3")
@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_new_group_may_begin_at_the_end_and_its_successor_begins_there(
    log_topic, topic, publish, consume, wait_for, delivery
):
    log, data = log_topic(), topic(1)
    publish(data, 3)
    options = {"start": "latest", "delivery": delivery}
    consumer = consume(log, [data], Handler(), **options)
    shared = Shared(GROUP, data, 0)
    wait_for(lambda: consumer.member.log.find(shared).position == 3)
    consumer.stop()
    publish(data, 2)
    handler = Handler()
    consume(log, [data], handler, **options)
    wait_for(lambda: len(handler.records) == 2)
    assert handler.offsets() == [3, 4]


@pytest.mark.expects("loop.failed")  # a busy broker says late where it ends
@pytest.mark.guarantee("M3", "M6")
def test_a_new_group_that_begins_at_the_end_claims_its_first_batch_at_once(
    log_topic, topic, publish, consume, open_log, wait_for
):
    log, data = log_topic(1), topic(1)
    publish(data, 3)
    claims: list[Outcome] = []
    watching = open_log(log, "watch", only_reads=True)
    real = watching._places[0].fold

    def fold(offset, time_ms, partitions, said, own):
        outcome = real(offset, time_ms, partitions, said, own)
        if isinstance(said, ClaimingMessages):
            claims.append(outcome)
        return outcome

    watching._places[0].fold = fold
    handler = Handler()
    # The next heartbeat comes in twenty seconds.
    consumer = consume(
        log, [data], handler, start="latest", delivery="at_most_once", interval=60.0
    )
    parts, shared = consumer._intake.parts, Shared(GROUP, data, 0)
    wait_for(lambda: shared in parts and parts[shared].is_read, what="it has begun")
    publish(data, 2)
    wait_for(lambda: len(handler.records) == 2, timeout=10)
    assert handler.offsets() == [3, 4]
    watching.read_to_end()
    assert set(claims) == {Outcome.VALID}


@pytest.mark.guarantee("M6")
def test_a_refused_claim_of_a_batch_puts_no_heartbeat_off(
    log_topic, topic, consume, wait_for
):
    log, data = log_topic(1), topic(1)
    consumer = consume(log, [data], Handler(), delivery="at_most_once")
    member, shared = consumer.member, Shared(GROUP, data, 0)
    wait_for(lambda: member.is_held(shared))
    kept = member._kept[shared]
    with member.log.lock:
        before = kept.sent_at
        refused = member.claim_messages(shared, 5, 6)
        assert kept.sent_at == before
    assert refused.wait(WAIT) is Outcome.NOT_NEXT
    with member.log.lock:
        valid = member.claim_messages(shared, None, 1)
    assert valid.wait(WAIT) is Outcome.VALID
    assert kept.sent_at >= valid.sent_at > refused.sent_at


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_handler_that_stops_its_consumer_ends_it_in_order(
    log_topic, topic, publish, consume, open_log, wait_for, heard, delivery
):
    log, data = log_topic(1), topic(1)
    publish(data, 5)
    watching = open_log(log, "watch", only_reads=True)
    shared = Shared(GROUP, data, 0)

    def handle(records) -> None:
        consumer.stop()

    consumer = consume(log, [data], handle, delivery=delivery, batch=2)
    wait_for(lambda: watching.find(shared) == Entry(2), what="it is released")
    wait_for(lambda: not consumer._reader.pulse.is_alive(), what="its thread ends")
    assert [event for event, _ in heard] == [STARTED]


@pytest.mark.guarantee("M20", "M3")
def test_a_partition_whose_records_are_gone_waits_until_its_position_is_set(
    log_topic, topic, publish, consume, open_log, wait_for, kafka_admin, heard
):
    log, data = log_topic(1), topic(1)
    publish(data, 10)
    shared = Shared(GROUP, data, 0)
    first = consume(log, [data], handler := Handler())
    wait_for(lambda: first.member.log.find(shared).position == 10)
    first.stop()
    publish(data, 10)
    at = TopicPartition(data, 0, 15)
    kafka_admin.delete_records([at])[at].result()
    second = Handler()
    consume(log, [data], second)
    wait_for(lambda: [one for one, _ in heard if one == "offset.lost"])
    (_, fields) = next(one for one in heard if one[0] == "offset.lost")
    assert (fields["next_offset"], fields["start"], fields["end"]) == (10, 15, 20)
    assert not second.records
    set_position(open_log(log, "operator"), shared, 17, wait_for)
    wait_for(lambda: second.offsets() == [17, 18, 19], what=lambda: str(second.batches))
    assert len(handler.records) == 10


@pytest.mark.guarantee("M20")
def test_a_position_may_be_set_back(
    log_topic, topic, publish, consume, open_log, wait_for
):
    log, data = log_topic(1), topic(1)
    publish(data, 10)
    shared = Shared(GROUP, data, 0)
    consumer = consume(log, [data], handler := Handler())
    wait_for(lambda: consumer.member.log.find(shared).position == 10)
    set_position(open_log(log, "operator"), shared, 8, wait_for)
    wait_for(lambda: len(handler.records) == 12, what=lambda: str(handler.batches))
    assert handler.offsets()[10:] == [8, 9]


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_partition_whose_position_was_lost_with_the_log_is_not_read_at_most_once(
    log_topic, topic, publish, consume, open_log, wait_for, kafka_admin, heard, delivery
):
    log, data = log_topic(1), topic(1)
    publish(data, 4)
    before = open_log(log, "a")
    claim = ClaimingPartition(before.sender, Shared("x.y", "gone", 0), 500)
    before.send(claim).wait(WAIT)
    before.stop()
    at = TopicPartition(log, 0, 1)
    kafka_admin.delete_records([at])[at].result()
    handler = Handler()
    consume(log, [data], handler, delivery=delivery)
    if delivery == "at_least_once":
        wait_for(lambda: len(handler.records) == 4)
        moved = [(one["origin"], one["before"]) for name, one in heard if name == MOVED]
        assert moved == [(f"{data}/0", None)]
        return
    wait_for(lambda: [one for one, _ in heard if one == "offset.lost"])
    # One that starts later reads the snapshot of the first, and knows it by that.
    consume(log, [data], later := Handler(), group="shop.later", delivery=delivery)
    wait_for(lambda: [one for one, _ in heard if one == "offset.lost"][1:])
    assert not handler.records + later.records
    set_position(open_log(log, "operator"), Shared(GROUP, data, 0), 2, wait_for)
    wait_for(lambda: handler.offsets() == [2, 3], what=lambda: str(handler.batches))


@pytest.mark.guarantee("M14", "M22")
@pytest.mark.expects("loop.failed")
def test_a_log_that_is_made_anew_lets_nothing_be_handled_again_at_most_once(
    log_topic, topic, publish, consume, open_log, wait_for, kafka_admin, heard
):
    log, data = log_topic(1), topic(1)
    publish(data, 4)
    handler = Handler()
    consumer = consume(log, [data], handler, delivery="at_most_once")
    wait_for(lambda: len(handler.records) == 4, what="all are handled")
    delete_topics(kafka_admin, [log])
    create_topic(kafka_admin, log, 1, WANTED)
    wait_for(
        lambda: [one for one, _ in heard if one == "offset.lost"],
        timeout=60,
        what="it says that its position is lost",
    )
    assert consumer.member.log.lost_places == {0}
    # One that starts later reads it in the new log.
    watching = open_log(log, "watch", only_reads=True)
    wait_for(lambda: watching.lost_places == {0}, what="the log says so")
    later = Handler()
    consume(log, [data], later, client_id="b", delivery="at_most_once", group="s.other")
    wait_for(lambda: [one for one, _ in heard if one == "offset.lost"][1:])
    set_position(open_log(log, "operator"), Shared(GROUP, data, 0), 3, wait_for)
    wait_for(lambda: len(handler.records) == 5, what="it goes on where it was set")
    assert handler.offsets() == [0, 1, 2, 3, 3]
    assert not later.records


@pytest.mark.parametrize("name", ["log", "notices", "member", "poll"])
def test_a_consumer_that_gets_no_thread_leaves_nothing_behind_that_goes_on(
    log_topic, topic, settings, monkeypatch, wait_for, name
):
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(f"jobs_lib {name} "):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    log, group = log_topic(1), f"shop.{name}"
    given: dict[str, Any] = {"group": group, "client_id": "a", "interval": INTERVAL}
    consumer = Consumer(settings, log=log, topics=[topic(1)], handle=print, **given)
    with pytest.raises(RuntimeError, match="new thread"):
        consumer.start()

    def find_left() -> list[str]:
        names = [one.name for one in threading.enumerate()]
        return [one for one in names if one.endswith((group, log))]

    wait_for(lambda: not find_left(), what=lambda: f"all end: {find_left()}", timeout=5)


@pytest.mark.guarantee("M12")
def test_two_groups_read_the_same_topic_independently(
    log_topic, topic, publish, consume, wait_for
):
    log, data = log_topic(), topic(2)
    publish(data, 5, 0)
    publish(data, 5, 1)
    handlers = [Handler(), Handler()]
    for number, handler in enumerate(handlers):
        consume(log, [data], handler, group=f"shop.g{number}")
    for handler in handlers:
        wait_for(lambda one=handler: len(one.records) == 10)


def test_a_release_waits_for_the_running_batch_and_hands_its_position_over(
    log_topic, topic, publish, consume, wait_for
):
    log, data = log_topic(1), topic(2)
    publish(data, 4, 0)
    publish(data, 4, 1)
    first, second = Handler(), Handler()
    first.may_go.clear()
    one = consume(log, [data], first)
    wait_for(lambda: first.batches, what="a batch runs")
    busy = first.batches[0][0]
    consume(log, [data], second, client_id="b")
    wait_for(
        lambda: (
            len(one.member.list_held()) == 1
            or busy in {number for number, _, _ in second.batches}
        ),
        what="one is handed over",
    )
    assert busy not in {number for number, _, _ in second.batches}
    first.may_go.set()
    wait_for(lambda: len(first.records) + len(second.records) == 8)


def make_small(settings, log, topic, handle, **more) -> Consumer:
    """Make a consumer that takes a mebibyte into memory, and soon tries again."""
    return Consumer(
        settings.model_copy(update={"consumer_prefetch_bytes": 1_048_576}),
        log=log,
        group=GROUP,
        client_id="a",
        topics=[topic],
        handle=handle,
        interval=INTERVAL,
        retry=Retry(first=0.01, cap=0.05),
        **more,
    )


def test_a_partition_that_cannot_go_on_has_bounded_records_and_others_go_on(
    log_topic, topic, publish, settings, wait_for, heard
):
    log, data = log_topic(), topic(2)
    for number in range(2):
        publish(data, 6_000, number)
    handled: dict[int, list[int]] = {0: [], 1: []}
    may_go = threading.Event()

    def handle(records) -> None:
        if records[0].partition == 0 and not may_go.is_set():
            raise ValueError("the mail server is away")
        handled[records[0].partition] += [one.offset for one in records]

    consumer = make_small(settings, log, data, handle, batch=500)
    with consumer:
        parts = consumer._intake.parts
        wait_for(
            lambda: any(part.is_paused for part in list(parts.values())),
            what="a partition is paused",
        )
        wait_for(lambda: len(handled[1]) == 6_000, what="the other one goes on")
        assert sum(part.waiting_bytes for part in parts.values()) < 2_000_000
        may_go.set()
        wait_for(lambda: len(handled[0]) == 6_000, timeout=60)
    assert handled == {0: [*range(6_000)], 1: [*range(6_000)]}


def test_records_in_memory_are_handled_though_the_topic_has_lost_them(
    log_topic, topic, publish, settings, wait_for, kafka_admin, heard, monkeypatch
):
    log, data = log_topic(1), topic(1)
    # More than may wait in memory.
    publish(data, 6_000)
    handled: list[int] = []
    is_cut, is_told = threading.Event(), threading.Event()

    def handle(records) -> None:
        # Once few are left it is read on. The broker's answer comes before they end.
        waits = is_cut.is_set() and not parts[shared].is_paused
        if not is_cut.is_set() or (waits and not is_told.is_set()):
            raise ValueError("the mail server is away")
        handled.extend(one.offset for one in records)

    def note_range(*given) -> None:
        out_of_range(*given)
        is_told.set()

    def find_lost() -> list[dict[str, Any]]:
        return [fields for event, fields in heard if event == "offset.lost"]

    consumer = make_small(settings, log, data, handle)
    parts, shared = consumer._intake.parts, Shared(GROUP, data, 0)
    out_of_range = consumer._intake.out_of_range
    monkeypatch.setattr(consumer._intake, "out_of_range", note_range)
    with consumer:
        wait_for(lambda: shared in parts and parts[shared].is_paused, what="it is full")
        with consumer._intake.lock:
            in_memory = parts[shared].next_fetch
        assert in_memory is not None
        at = TopicPartition(data, 0, 5_995)
        kafka_admin.delete_records([at])[at].result()
        is_cut.set()
        wait_for(find_lost, what="what has gone is told")
        assert handled == [*range(in_memory)]
        (fields,) = find_lost()
        told = (fields["next_offset"], fields["start"], fields["end"])
        assert told == (in_memory, 5_995, 6_000)
        wait_for(lambda: consumer.member.log.find(shared).position == in_memory)


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_what_has_gone_is_told_behind_the_last_batch_in_memory(
    stand_alone, heard, delivery
):
    handled: list[int] = []
    told: list[list[int]] = []
    consumer = stand_alone(
        lambda records: handled.extend(one.offset for one in records),
        batch=4,
        delivery=delivery,
    )
    consumer.member.set_position = lambda *_: None
    consumer.member.claim_messages = lambda *_: SimpleNamespace(
        sent_at=0.0, wait=lambda timeout: Outcome.VALID
    )
    consumer._intake.out_of_range(("orders", 0), 50, 60)
    remove = telemetry.listen(lambda *_: told.append([*handled]), only={"offset.lost"})
    while consumer._work() < math.inf:
        pass
    remove()
    assert told == [[*range(10)]]
    ((event, fields),) = heard
    assert (event, fields["next_offset"], fields["start"]) == ("offset.lost", 10, 50)


@pytest.mark.slow
def test_a_handler_may_take_longer_than_a_groups_member_may_not_poll(
    log_topic, topic, publish, settings, wait_for
):
    data = topic(2)
    limits = {"max.poll.interval.ms": "6000"}
    patient = settings.model_copy(
        update={"kafka": settings.kafka | limits, "session_timeout": 6.0}
    )
    handled: list[tuple[int, int]] = []

    def handle(records) -> None:
        if not handled:
            linger(8)  # The thread that polls waits, too, and leaves no group by that.
        handled.extend((one.partition, one.offset) for one in records)

    publish(data, 3)
    with Consumer(
        patient,
        log=log_topic(),
        group=GROUP,
        client_id="a",
        topics=[data],
        handle=handle,
        interval=INTERVAL,
    ) as consumer:
        wait_for(lambda: len(handled) == 3, what="the long batch ends")
        publish(data, 3, 1)
        wait_for(lambda: len(handled) == 6, what="the others are read")
        assert consumer.member.error is None
    assert sorted(handled) == [(part, one) for part in (0, 1) for one in range(3)]


@pytest.fixture
def stand_alone(settings, monkeypatch):
    """A function that makes a consumer that holds partitions, without Kafka."""

    def make(handle, partitions=1, records=10, **more) -> Consumer:
        consumer = Consumer(
            settings,
            log="log",
            group=GROUP,
            client_id="a",
            topics=["orders"],
            handle=handle,
            **more,
        )
        consumer.member.log.partitions = 1
        monkeypatch.setattr(consumer.member, "is_sure", lambda shared: True)
        for number in range(partitions):
            consumer.taken(Shared(GROUP, "orders", number), 0)
        consumer._work()
        for number in range(partitions):
            consumer._intake.begun(("orders", number))
        consumer._intake.received(
            [
                Message(topic="orders", partition=number, offset=one, value=b"1")
                for number in range(partitions)
                for one in range(records)
            ]
        )
        return consumer

    return make


def test_partitions_have_their_turns_and_records_arrive_between(
    stand_alone, monkeypatch
):
    now = 0.0
    batches = []

    def handle(records) -> None:
        nonlocal now
        now += 0.004
        batches.append((records[0].partition, len(records)))

    clock = SimpleNamespace(monotonic=lambda: now)
    for module in ("consumer", "intake"):
        monkeypatch.setattr(f"jobs_lib.coordination.{module}.time", clock)
    consumer = stand_alone(handle, partitions=2, batch=2)
    # Batches of a turn take ten milliseconds; then the thread reads again.
    assert consumer._work() == 0.0
    assert batches == [(0, 2)] * 3
    assert consumer._work() == 0.0
    assert batches == [(0, 2)] * 3 + [(1, 2)] * 3
    consumer._work()
    assert consumer._work() == math.inf
    assert sorted(batches) == [(0, 2)] * 5 + [(1, 2)] * 5


@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize("fault", [UnavailableError("it has no leader"), None])
def test_a_partition_without_an_end_holds_no_other_one_up(
    stand_alone, monkeypatch, fault
):
    ends = {1: 5}

    def find(settings, asked, spec, timeout=5.0, *, committed) -> dict[Any, int]:
        assert committed
        if fault is not None and any(one.partition not in ends for one in asked):
            raise fault
        return {one: ends[one.partition] for one in asked if one.partition in ends}

    monkeypatch.setattr(places, "_list_offsets", find)
    monkeypatch.setattr(places, "list_partitions", lambda *_: {"orders": 2})
    monkeypatch.setattr(places, "_PATIENCE", 0.0)
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    for module in ("consumer", "intake"):
        monkeypatch.setattr(f"jobs_lib.coordination.{module}.time", clock)
    told: list[tuple[int, int]] = []
    consumer = stand_alone(print, partitions=0, start="latest")
    consumer.member.set_position = lambda shared, position, **_: told.append(
        (shared.partition, position)
    )
    consumer.member.log.lost_places = set()
    for number in range(2):
        consumer.taken(Shared(GROUP, "orders", number), None)
    while 0 < (rest := consumer._work()) < math.inf and not told:
        now += rest
    assert told == [(1, 5)]
    # It is asked for again, ever more rarely.
    ends[0] = 7
    while len(told) < 2:
        now += consumer._work()
    assert told == [(1, 5), (0, 7)]


def work_through(consumer, told, end) -> None:
    """Let it take turns until a position was told."""
    consumer.member.set_position = lambda shared, position: told.append(position)
    for _ in range(1_000):
        if told and told[-1] >= end:
            break
        consumer._work()


@pytest.mark.parametrize(
    "spoil", [list.clear, list.reverse], ids=["it empties it", "it reverses it"]
)
def test_what_a_handler_does_to_its_list_moves_no_position(stand_alone, spoil):
    offsets: list[int] = []
    told: list[int] = []

    def handle(records) -> None:
        offsets.extend(record.offset for record in records)
        spoil(records)

    work_through(stand_alone(handle, batch=5), told, 10)
    assert offsets == list(range(10))
    assert told == [5, 10]


def test_a_handler_that_empties_its_list_and_fails_is_named(stand_alone, heard):
    def handle(records) -> None:
        records.clear()
        raise ValueError("the mail server is away")

    stand_alone(handle)._work()
    ((event, fields),) = heard
    assert (event, fields["offset"]) == ("record.failed", 0)
    assert "ValueError" in fields["error"]


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
@pytest.mark.guarantee("FJ4")
def test_a_handler_that_returns_work_has_failed(stand_alone, heard, delivery):
    async def send(records) -> None:
        raise AssertionError("nobody awaits it")

    told: list[int] = []
    consumer = stand_alone(lambda records: send(records), delivery=delivery)
    consumer.member.set_position = lambda shared, position: told.append(position)
    consumer.member.claim_messages = lambda *_: SimpleNamespace(
        sent_at=0.0, wait=lambda timeout: Outcome.VALID
    )
    consumer._work()
    assert told == []
    ((event, fields),) = heard
    once = delivery == "at_least_once"
    assert event == ("record.failed" if once else "record.skipped")
    assert "returned a coroutine, which was never awaited" in fields["error"]


def test_a_partition_that_was_lost_has_lost_no_records(stand_alone, heard, monkeypatch):
    batches: list[Any] = []
    consumer = stand_alone(batches.append, delivery="at_most_once")
    # This process stood still, and a successor has gone on. The notice is on its way.
    monkeypatch.setattr(consumer.member, "claim_messages", lambda *_: None)
    monkeypatch.setattr(consumer.member.log, "find", lambda shared: Entry(9))
    consumer._work()
    assert (heard, batches) == ([], [])


def test_a_batch_is_not_claimed_again_before_it_is_known_how_that_went(
    stand_alone, monkeypatch
):
    handled: list[Any] = []
    claims: list[Sent] = []

    def claim(shared, first, end):
        sent = Sent(ClaimingMessages(consumer.member.sender, shared, 0, first, end))
        claims.append(sent)
        return sent

    consumer = stand_alone(handled.extend, delivery="at_most_once")
    monkeypatch.setattr(consumer.member, "claim_messages", claim)
    monkeypatch.setattr(consumer, "_wait_for", lambda _, sent: sent.outcome)
    consumer._work()
    linger(0.1)
    consumer._work()
    assert (len(claims), handled) == (1, [])
    claims[0].end(Outcome.VALID)
    linger(0.1)
    consumer._work()
    assert (len(claims), len(handled)) == (1, 10)


@pytest.fixture
def claim_in_doubt(stand_alone, monkeypatch):
    """A function that makes a consumer whose claim of a batch has no answer yet."""

    def make() -> tuple[Consumer, Sent, list[Any]]:
        handled: list[Any] = []
        consumer = stand_alone(handled.extend, delivery="at_most_once")
        shared = Shared(GROUP, "orders", 0)
        sent = Sent(ClaimingMessages(consumer.member.sender, shared, 0, 0, 10))
        monkeypatch.setattr(consumer.member, "claim_messages", lambda *_: sent)
        monkeypatch.setattr(consumer, "_wait_for", lambda _, sent: sent.outcome)
        consumer._work()
        assert consumer._intake.parts[shared].claim is not None
        return consumer, sent, handled

    return make


@pytest.mark.guarantee("M15")
@pytest.mark.parametrize("during_turn", [False, True])
@pytest.mark.parametrize("how", ["lost", "leave"])
def test_a_claimed_batch_of_a_partition_that_is_gone_is_processed(
    claim_in_doubt, heard, monkeypatch, how, during_turn
):
    consumer, sent, handled = claim_in_doubt()
    shared = Shared(GROUP, "orders", 0)
    steps: list[Any] = []

    def wait(_, sent) -> Outcome | None:
        if not steps:
            steps.append(how)
            getattr(consumer, how)(shared)
        return sent.outcome

    monkeypatch.setattr(consumer.member, "release", lambda _: steps.append(handled[:]))
    if during_turn:
        monkeypatch.setattr(consumer, "_wait_for", wait)
        linger(0.05)
    else:
        wait(None, sent)
    consumer._work()
    assert shared not in consumer._intake.parts
    assert (steps, handled, consumer._is_busy(shared)) == ([how], [], True)
    sent.end(Outcome.VALID)
    consumer._work()
    consumer._work()
    # Only then may others have it, or this process again.
    assert steps == [how, handled][: 1 + (how == "leave")]
    assert (len(handled), heard, consumer._is_busy(shared)) == (10, [], False)


@pytest.mark.guarantee("M15")
@pytest.mark.parametrize("how", ["lost", "leave"])
def test_no_batch_is_claimed_beside_one_of_a_partition_that_is_gone(
    stand_alone, monkeypatch, how
):
    claims: list[tuple[Shared, Sent]] = []

    def claim(shared, first, end):
        if claims:
            # It is so old now that it is hardly in the log.
            until = claims[0][1].sent_at + consumer.member.interval
            assert patience.read_clock() >= until
        sent = Sent(ClaimingMessages(consumer.member.sender, shared, 0, first, end))
        claims.append((shared, sent))
        return sent

    def wait(part, sent) -> None:
        if sent is claims[0][1]:
            getattr(consumer, how)(part.shared)

    consumer = stand_alone(lambda _: None, partitions=2, delivery="at_most_once")
    monkeypatch.setattr(consumer.member, "interval", 0.3)
    monkeypatch.setattr(consumer.member, "claim_messages", claim)
    monkeypatch.setattr(consumer, "_wait_for", wait)
    # A process that is killed loses each batch that it has claimed.
    rests = []
    while len(claims) < 2:
        rests.append(consumer._work())
        linger(rests[-1])
    assert rests[0] > 0
    assert claims[0][0] != claims[1][0]


@pytest.mark.guarantee("M15")
@pytest.mark.parametrize("outcome", [Outcome.NOT_HELD, None])
def test_a_partition_is_left_once_its_claim_has_failed(
    claim_in_doubt, heard, monkeypatch, outcome
):
    consumer, sent, handled = claim_in_doubt()
    shared = Shared(GROUP, "orders", 0)
    released: list[Shared] = []
    monkeypatch.setattr(consumer.member, "release", released.append)
    consumer.leave(shared)
    consumer._work()
    assert released == []
    sent.is_absent = outcome is None
    sent.end(outcome, None if outcome else UnavailableError("it is not in the log"))
    consumer._work()
    assert (released, handled, heard) == ([shared], [], [])


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_what_was_lost_is_not_claimed_while_its_batch_is_processed(
    stand_alone, monkeypatch, delivery
):
    shared = Shared(GROUP, "orders", 0)
    tried: list[bool] = []

    def handle(records) -> None:
        # The member's thread tells of the loss, and goes on.
        consumer.lost(shared)
        tried.append(member._try_to_claim(shared))

    consumer = stand_alone(handle, delivery=delivery)
    member = consumer.member
    valid = Sent(ClaimingMessages(member.sender, shared, 0, 0, 10))
    valid.end(Outcome.VALID)
    monkeypatch.setattr(member, "claim_messages", lambda *_: valid)
    monkeypatch.setattr(member.log, "get_world", lambda place: World(0))
    monkeypatch.setattr(member.log, "is_current", lambda place: True)
    monkeypatch.setattr(member.log, "send", lambda message, **_: None)
    probed: list[Any] = []
    monkeypatch.setattr(member.log, "probe", lambda *given: probed.append(given))
    consumer._work()
    # A claim of a batch without an answer is decided by what is sent later.
    assert (tried, len(probed)) == ([False], 1)
    # Now nothing of it is processed here any more.
    assert member._try_to_claim(shared)


@pytest.mark.parametrize("end", ["refused", "absent", "not claimed"])
def test_a_batch_that_others_process_is_not_named(
    claim_in_doubt, heard, monkeypatch, end
):
    consumer, sent, _ = claim_in_doubt()
    consumer.lost(Shared(GROUP, "orders", 0))
    consumer.member.log.is_known = True
    # The log says that nobody has claimed it.
    monkeypatch.setattr(consumer.member.log, "find", lambda shared: Entry(0))
    sent.is_absent = end == "absent"
    if end == "refused":
        sent.end(Outcome.NOT_HELD)
    else:
        sent.end(None, UnavailableError("the log must be read anew"))
    consumer._work()
    assert (heard, consumer._doubtful) == ([], ())


def test_a_batch_of_which_the_log_does_not_tell_is_named_once_it_was_read_anew(
    claim_in_doubt, heard, monkeypatch
):
    consumer, sent, _ = claim_in_doubt()
    consumer.lost(Shared(GROUP, "orders", 0))
    sent.end(None, UnavailableError("the log must be read anew"))
    monkeypatch.setattr(consumer.member.log, "find", lambda shared: Entry(30))
    consumer._work()
    assert not heard
    consumer.member.log.is_known = True
    consumer._work()
    assert "nobody knows whether its claim is in the log" in heard[0][1]["error"]


def test_a_claimed_batch_is_named_when_the_process_ends_without_an_answer(
    claim_in_doubt, heard, monkeypatch
):
    consumer, _, _ = claim_in_doubt()
    shared = Shared(GROUP, "orders", 0)
    monkeypatch.setattr(consumer.member, "stop", lambda timeout: consumer.lost(shared))
    # So far nobody had claimed it, and nobody reads the log any more.
    monkeypatch.setattr(consumer.member.log, "find", lambda shared: Entry(0))
    consumer.stop()
    ((event, fields),) = heard
    assert (event, fields["offset"], fields["count"]) == ("record.skipped", 0, 10)


def test_a_claim_that_would_only_wait_holds_no_other_partition_up(
    stand_alone, monkeypatch
):
    handled: list[Any] = []
    asked: list[int] = []
    consumer = stand_alone(handled.extend, partitions=2, delivery="at_most_once")

    def claim(shared, first, end):
        asked.append(shared.partition)
        return SimpleNamespace(sent_at=0.0, wait=lambda timeout: Outcome.VALID)

    monkeypatch.setattr(consumer.member, "claim_messages", claim)
    # The log's partition for one of them has no leader: nothing is read back.
    monkeypatch.setattr(consumer.member, "is_sure", lambda shared: shared.partition)
    consumer._work()
    consumer._work()
    assert {record.partition for record in handled} == set(asked) == {1}


@pytest.mark.guarantee("M15")
@pytest.mark.expects("loop.failed")
def test_a_claim_without_an_answer_holds_no_other_partition_up(
    stand_alone, monkeypatch
):
    handled: list[Any] = []
    reported: list[str] = []
    claims: dict[int, Sent] = {}
    now = 0.0

    def claim(shared, first, end) -> Sent:
        sent = Sent(ClaimingMessages(consumer.member.sender, shared, 0, first, end))
        claims[shared.partition] = sent
        if shared.partition:
            sent.end(Outcome.VALID)
        return sent

    consumer = stand_alone(
        handled.extend, partitions=2, delivery="at_most_once", interval=0.5
    )
    monkeypatch.setattr(consumer.member, "claim_messages", claim)
    real = patience.read_clock
    monkeypatch.setattr(patience, "read_clock", lambda: real() + now)
    remove = telemetry.listen(
        lambda _, fields: reported.append(str(fields["error"])), only={"loop.failed"}
    )
    began = time.monotonic()
    while {record.partition for record in handled} != {1}:
        assert time.monotonic() < began + 5, "the other one waits, too"
        consumer._work()
    # A process that dies may lose each batch of which it does not know that.
    assert time.monotonic() >= began + 0.5
    assert reported == []
    # It is named after a long time, and nothing else is claimed meanwhile.
    while not reported:
        now += 0.5
        linger(0.02)
        consumer._work()
    assert now > 10
    assert "a claim of a batch of orders/0 was not read back within 11 s" in reported[0]
    claims[0].end(Outcome.VALID)
    # It is this process's for sure, also if it is not sure of the partition just now.
    monkeypatch.setattr(consumer.member, "is_sure", lambda shared: False)
    linger(0.02)
    consumer._work()
    remove()
    assert [record.partition for record in handled] == [1] * 10 + [0] * 10


def test_a_signal_ends_a_consumer_that_still_starts(settings, monkeypatch):
    consumer = Consumer(
        settings, log="log", group=GROUP, client_id="a", topics=["t"], handle=print
    )
    member = consumer.member
    monkeypatch.setattr(member._topics, "start", lambda: None)
    monkeypatch.setattr(member.log, "start", lambda: None)
    monkeypatch.setattr("jobs_lib.coordination.member._START_SECONDS", 5.0)
    wait = member._wait_until_begun

    def wait_for_another_run() -> None:
        signal.raise_signal(signal.SIGTERM)
        wait()

    monkeypatch.setattr(member, "_wait_until_begun", wait_for_another_run)
    # It would raise that nothing was read back, once it has waited for all that time.
    consumer.run()
    assert not member.log.is_known


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"handle": 1}, "handle=1 must be a function"),
        ({"handle": LAZY[0]}, "must be a function, .* no coroutine function or gener"),
        ({"handle": LAZY[1]}, "no coroutine function or generator"),
        ({"retry": 5.0}, "retry=5.0 must be a Retry"),
        ({"retry": None}, "retry=None must be a Retry"),
        ({"retry": Retry(max_attempts=3)}, "without max_attempts"),
        ({"delivery": "exactly_once"}, "'exactly_once' must be one of at_least_once, "),
        ({"batch": 0}, "batch=0 must be a number of records from 1 to 10000"),
        ({"batch": 10_001}, "batch=10001"),
        ({"batch": True}, "batch=True"),
        ({"start": "now"}, "start='now' must be one of earliest, latest"),
        ({"group": "mailer"}, "group='mailer' needs a namespace"),
        ({"group": None}, "group=None needs a namespace"),
        ({"topics": None}, "topics=None must be a list"),
        ({"topics": 5}, "topics=5 must be a list"),
        ({"log": 5}, "log=5 must be the name of a topic"),
        ({"delivery": []}, r"delivery=\[\] must be one of"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else given,
)
def test_bad_input_is_refused(settings, given, told):
    good = {
        "log": "log",
        "group": "a.b",
        "client_id": "c",
        "topics": ["t"],
        "handle": print,
    }
    with pytest.raises(ConfigurationError, match=told):
        Consumer(settings, **(good | given))


def test_a_coroutine_function_is_refused(settings):
    async def handle(records) -> None:
        """Never called."""

    with pytest.raises(ConfigurationError, match="no coroutine function"):
        Consumer(
            settings, log="log", group="a.b", client_id="c", topics=["t"], handle=handle
        )
