"""A reader that assigns parts of partitions to itself, and ends where they end."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from jobs_lib.errors import OffsetError, TopicError, UnavailableError
from jobs_lib.kafka.places import read_ends
from jobs_lib.kafka.reader import PartsReader, Span
from jobs_lib.settings import load_settings
from tests.support.records import make_producer
from tests.support.returning import Returning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from jobs_lib.kafka.member import Partition
    from jobs_lib.settings import Settings

PATIENCE = 60.0
"""Seconds: longer than a busy machine needs, so that no part ends by it."""
IMPATIENCE = 0.5


def get_offset(message: Message) -> int:
    return message.offset() or 0


@pytest.fixture
def settings(bootstrap_servers) -> Settings:
    """The settings of a reader."""
    return load_settings(kafka_bootstrap_servers=bootstrap_servers)


@pytest.fixture
def read(settings) -> Callable[..., dict[Partition, list[int]]]:
    """A function that reads parts, and returns the offsets by partition."""

    def read(
        spans: Mapping[Partition, Span],
        *,
        patience: float = PATIENCE,
        most: int = 1_000,
    ) -> dict[Partition, list[int]]:
        found: dict[Partition, list[int]] = {}
        with PartsReader(
            settings, spans, "reader", patience=patience, most=most
        ) as reader:
            for partition, messages in reader:
                assert 0 < len(messages) <= most
                found.setdefault(partition, []).extend(map(get_offset, messages))
            assert all(reader.positions[p] >= span.end for p, span in spans.items())
        return found

    return read


@contextmanager
def reading_three(
    settings: Settings, name: str
) -> Iterator[tuple[PartsReader, Iterator[object]]]:
    """Read three records of a part that ends later, and wait no longer for more."""
    with PartsReader(
        settings, {(name, 0): Span(None, 5)}, "reader", patience=PATIENCE
    ) as reader:
        items = iter(reader)
        while reader.positions[name, 0] < 3:
            next(items)
        reader.patience = IMPATIENCE
        yield reader, items


@pytest.fixture
def find_end(settings) -> Callable[[str], int]:
    """A function that finds where the first partition of a topic ends."""
    return lambda name: read_ends(settings, [f"{name}/0"])[f"{name}/0"]


@pytest.fixture
def cleaning(kafka_admin) -> Iterator[None]:
    """Let the broker compact at once, and not each 15 seconds."""

    def set_backoff(how: AlterConfigOpType) -> None:
        name = "log.cleaner.backoff.ms"
        change = ConfigEntry(name, "100", incremental_operation=how)
        broker = ConfigResource("broker", "1", incremental_configs=[change])
        for changed in kafka_admin.incremental_alter_configs([broker]).values():
            changed.result()

    set_backoff(AlterConfigOpType.SET)
    yield
    set_backoff(AlterConfigOpType.DELETE)


@pytest.fixture
def fill(bootstrap_servers) -> Callable[..., None]:
    """A function that produces this many records to a partition."""

    def fill(name: str, count: int, partition: int = 0) -> None:
        producer = make_producer(bootstrap_servers)
        for n in range(count):
            producer.produce(name, b"v", key=f"k{n}", partition=partition)
        assert producer.flush(30) == 0

    return fill


@pytest.fixture
def transact(bootstrap_servers) -> Callable[..., Producer]:
    """A function that produces transactions, and commits, aborts or keeps each open."""
    opened: list[Producer] = []

    def transact(name: str, ends: Iterable[str], count: int = 3) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "transactional.id": f"reader-{uuid4().hex[:8]}",
            }
        )
        opened.append(producer)
        producer.init_transactions(60)
        for end in ends:
            producer.begin_transaction()
            for _ in range(count):
                producer.produce(name, b"v", key="k", partition=0)
            assert producer.flush(30) == 0
            if end == "commit":
                producer.commit_transaction(60)
            elif end == "abort":
                producer.abort_transaction(60)
        return producer

    return transact


def test_a_part_has_exactly_its_records(topic, fill, read):
    name = topic(1)
    fill(name, 20)
    assert read({(name, 0): Span(5, 12)}) == {(name, 0): [*range(5, 12)]}
    assert read({(name, 0): Span(None, 20)}, most=3) == {(name, 0): [*range(20)]}


def test_a_partition_that_is_left_is_read_no_further(settings, topic, fill):
    name = topic(2)
    for number in (0, 1):
        fill(name, 5, number)
    spans = {(name, number): Span(0, 5) for number in (0, 1)}
    found = []
    with PartsReader(settings, spans, "reader", most=1, patience=PATIENCE) as reader:
        for partition, messages in reader:
            found += [(partition, get_offset(message)) for message in messages]
            reader.leave(partition)
    assert sorted(found) == [((name, 0), 0), ((name, 1), 0)]


def test_many_partitions_end_each_where_it_ends(topic, fill, read):
    name, other = topic(30), topic(2)
    for number in range(0, 30, 3):
        fill(name, number + 1, number)
    fill(other, 5, 1)
    spans = {(name, number): Span(None, number + 1) for number in range(0, 30, 3)}
    spans |= {(name, number): Span(None, 0) for number in range(1, 30, 3)}
    found = read({**spans, (other, 1): Span(2, 4), (other, 0): Span(0, 0)})
    assert found == {
        **{(name, number): [*range(number + 1)] for number in range(0, 30, 3)},
        (other, 1): [2, 3],
    }


def test_a_reader_of_nothing_ends_at_once(read):
    assert read({}) == {}


@pytest.mark.parametrize("last", ["commit", "abort"])
def test_the_marker_of_the_last_transaction_has_no_record_and_holds_up_nothing(
    topic, transact, read, find_end, wait_for, last
):
    name = topic(1)
    transact(name, ["commit", "abort", "commit", last])
    end = 16
    # The last marker may be on its way, though the producer has returned.
    wait_for(lambda: find_end(name) == end, timeout=60, what="the marker is written")
    expected = [0, 1, 2, 8, 9, 10] + ([12, 13, 14] if last == "commit" else [])
    assert read({(name, 0): Span(None, end)}) == {(name, 0): expected}
    # An end amid aborted records, and a part that has no others.
    assert read({(name, 0): Span(4, 6)}) == {}
    assert read({(name, 0): Span(7, 8)}) == {}


def test_records_that_compaction_took_from_the_end_hold_up_nothing(
    topic, bootstrap_servers, cleaning, read, find_end, wait_for
):
    name = topic(
        1,
        config={
            "cleanup.policy": "compact",
            "segment.ms": "100",
            "min.cleanable.dirty.ratio": "0.001",
            "delete.retention.ms": "0",
            "min.compaction.lag.ms": "0",
        },
    )
    producer = make_producer(bootstrap_servers)

    def send(*records: tuple[str, bytes | None]) -> None:
        for key, value in records:
            producer.produce(name, value, key=key, partition=0)
        assert producer.flush(30) == 0

    send(("a", b"v"))
    send(*[(f"k{n}", b"v") for n in range(10)])
    # One batch, of which nothing is left once the tombstones are gone.
    send(*[(f"k{n}", None) for n in range(10)])
    end = find_end(name)
    assert end == 21

    def compacted() -> bool:
        # Only what lies before the newest segment is compacted.
        send(("later", b"v"))
        return read({(name, 0): Span(None, end)}) == {(name, 0): [0]}

    wait_for(compacted, timeout=120, what="only the first record is left")
    assert read({(name, 0): Span(11, end)}) == {}


def test_a_start_below_the_oldest_record_is_refused_with_both_offsets(
    topic, fill, read, kafka_admin
):
    name = topic(2)
    fill(name, 10)
    for deleted in kafka_admin.delete_records([TopicPartition(name, 0, 6)]).values():
        deleted.result()
    text = f"{name}/0 has no record at offset 2, only from 6 to before 10: 4 offsets"
    with pytest.raises(OffsetError, match=text) as refused:
        read({(name, 0): Span(2, 10), (name, 1): Span(None, 0)})
    error = refused.value
    assert (error.partition, error.position) == ((name, 0), 2)
    assert (error.start, error.end) == (6, 10)
    assert read({(name, 0): Span(None, 10)}) == {(name, 0): [6, 7, 8, 9]}
    assert read({(name, 0): Span(None, 3)}) == {}


def test_a_partition_whose_records_were_all_deleted_holds_up_nothing(
    topic, fill, read, kafka_admin
):
    name = topic(1)
    fill(name, 10)
    for deleted in kafka_admin.delete_records([TopicPartition(name, 0, 10)]).values():
        deleted.result()
    assert read({(name, 0): Span(None, 10)}) == {}


def test_a_start_above_the_end_is_refused_with_both_offsets(topic, fill, read):
    name = topic(1)
    fill(name, 3)
    with pytest.raises(OffsetError, match="from 0 to before 3: the topic was") as error:
        read({(name, 0): Span(7, 9)})
    assert (error.value.position, error.value.end) == (7, 3)


def test_records_that_go_while_they_are_read_are_told(
    topic, fill, settings, kafka_admin
):
    name = topic(1)
    fill(name, 10)
    with PartsReader(
        settings, {(name, 0): Span(None, 40)}, "reader", patience=PATIENCE
    ) as reader:
        items = iter(reader)
        while reader.positions[name, 0] < 10:
            next(items)
        fill(name, 20)
        at = [TopicPartition(name, 0, 25)]
        for deleted in kafka_admin.delete_records(at).values():
            deleted.result()
        fill(name, 10)
        # It may have fetched some, or all, of the records that have gone.
        seen: list[int] = []
        refused = None
        try:
            seen += [get_offset(one) for _, messages in items for one in messages]
        except OffsetError as error:
            refused = error
    told = refused and (refused.position, refused.start)
    assert told == (reader.positions[name, 0], 25) or seen == [*range(10, 40)]


@pytest.mark.parametrize("kind", ["beyond the end", "open transaction"])
def test_without_progress_it_ends_with_an_error(topic, fill, transact, settings, kind):
    name = topic(1)
    fill(name, 3)
    if kind == "open transaction":
        transact(name, ["keep open"])
    with (
        reading_three(settings, name) as (_, items),
        pytest.raises(OffsetError, match=r"up to offset 3, and for 0\.5 s") as error,
    ):
        next(items)
    assert (error.value.partition, error.value.position) == ((name, 0), 3)


def test_a_transaction_that_is_committed_meanwhile_goes_on(
    topic, fill, transact, settings
):
    name = topic(1)
    fill(name, 3)
    producer = transact(name, ["keep open"])
    with PartsReader(
        settings, {(name, 0): Span(None, 7)}, "reader", patience=PATIENCE
    ) as reader:
        items = iter(reader)
        seen = [get_offset(one) for one in next(items)[1]]
        producer.commit_transaction(60)
        seen += [get_offset(one) for _, messages in items for one in messages]
    assert seen == [*range(6)]


@pytest.mark.parametrize(
    ("number", "span", "text"),
    [
        (2, Span(None, 5), "/2 does not exist: .* has the partitions 0 to 1"),
        (-1, Span(None, 5), "does not exist"),
        (0, Span(-3, 5), "from -3 to 5: offsets begin with 0"),
        (0, Span(None, -1), "from None to -1"),
    ],
    ids=["partition", "negative partition", "start", "end"],
)
def test_impossible_parts_are_refused_before_anything_is_read(
    topic, read, number, span, text
):
    name = topic(2)
    with pytest.raises(OffsetError, match=text):
        read({(name, 1): Span(None, 0), (name, number): span})


def test_a_missing_topic_is_refused(read):
    with pytest.raises(TopicError, match="'no-such-topic'"):
        read({("no-such-topic", 0): Span(None, 5)})


@pytest.mark.parametrize("code", ["_UNKNOWN_PARTITION", "_TRANSPORT"])
def test_it_reads_on_when_its_client_hears_of_a_partition_anew(
    topic, fill, settings, monkeypatch, code
):
    name = topic(1)
    fill(name, 3)
    with PartsReader(
        settings, {(name, 0): Span(None, 3)}, "reader", patience=PATIENCE
    ) as reader:
        poll, errors = reader._consumer.poll, [KafkaError(getattr(KafkaError, code))]

        def tell_first(seconds: float) -> Message | None:
            if errors:
                return Message(topic=name, partition=0, error=errors.pop())
            return poll(seconds)

        client = Returning(reader._consumer, 0, 0)
        monkeypatch.setattr(client, "poll", tell_first, raising=False)
        monkeypatch.setattr(reader, "_consumer", client)
        read = [get_offset(one) for _, messages in reader for one in messages]
    assert (read, errors) == ([0, 1, 2], [])


@pytest.mark.parametrize(
    "code",
    [
        "_UNKNOWN_PARTITION",
        "_UNKNOWN_TOPIC",
        "LEADER_NOT_AVAILABLE",
        "_DESTROY_BROKER",
        "_TRANSPORT",
    ],
)
@pytest.mark.parametrize("errors", [2, 1_000_000])
def test_it_waits_for_the_leader_of_a_broker_that_comes_back(
    topic, fill, settings, monkeypatch, code, errors
):
    name = topic(1)
    fill(name, 3)
    if errors > 2:
        monkeypatch.setattr("jobs_lib.kafka.reader._ANSWER_SECONDS", 0.5)
    raised = OffsetError if errors == 2 else UnavailableError
    told = "is read up to offset 3" if errors == 2 else "no Kafka broker"
    with reading_three(settings, name) as (reader, items):
        client = Returning(reader._consumer, getattr(KafkaError, code), errors)
        monkeypatch.setattr(reader, "_consumer", client)
        with pytest.raises(raised, match=told):
            next(items)


@pytest.mark.slow
def test_a_broker_that_goes_away_ends_it_with_an_error(own_broker):
    name = own_broker.create(1)
    producer = make_producer(own_broker.bootstrap_servers)
    producer.produce(name, b"v", partition=0)
    assert producer.flush(30) == 0
    settings = load_settings(kafka_bootstrap_servers=own_broker.bootstrap_servers)
    with PartsReader(
        settings, {(name, 0): Span(None, 2)}, "reader", patience=PATIENCE
    ) as reader:
        items = iter(reader)
        assert next(items)[0] == (name, 0)
        reader.patience = IMPATIENCE
        with own_broker.down(), pytest.raises(UnavailableError, match="no Kafka"):
            next(items)
