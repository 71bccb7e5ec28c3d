"""Questions about places in topics, while Kafka is not ready to answer."""

from __future__ import annotations

from datetime import UTC, datetime
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException

from jobs_lib.errors import UnavailableError
from jobs_lib.kafka import places
from jobs_lib.kafka.client import make_consumer
from jobs_lib.kafka.places import (
    find_committed_ends,
    find_left,
    find_places,
    find_settled_ends,
    read_committed,
)
from jobs_lib.kafka.reader import Span
from tests.support.apps import make_app
from tests.support.groups import Group
from tests.support.records import make_producer, produce
from tests.support.transactions import abort_when_waited_for, open_transaction


@pytest.fixture
def refuse(monkeypatch):
    """A function that lets brokers refuse to tell offsets, a number of times."""

    def refuse(code: int, times: int) -> None:
        errors = iter([KafkaException(KafkaError(code))] * times)

        def make(settings, group):
            consumer = make_consumer(settings, group)

            def committed(*given):
                if (error := next(errors, None)) is not None:
                    raise error
                return consumer.committed(*given)

            return Mock(committed=committed, close=consumer.close)

        monkeypatch.setattr("jobs_lib.kafka.places.make_consumer", make)

    return refuse


@pytest.fixture
def settings(database_url, bootstrap_servers):
    """Settings with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers).settings


def test_a_group_whose_coordinator_is_on_its_way_is_asked_again(
    settings, topic, refuse
):
    name = topic(2)
    other = Group(settings.kafka_bootstrap_servers, name)
    other.commit_soon(name, {1: 7})
    other.close()
    refuse(KafkaError.NOT_COORDINATOR, 3)
    assert read_committed(settings, name, name) == {1: 7}


@pytest.mark.parametrize(
    "code", [KafkaError.NOT_COORDINATOR, KafkaError.GROUP_AUTHORIZATION_FAILED]
)
def test_a_group_that_kafka_does_not_tell_is_named(settings, topic, refuse, code):
    name = topic(1)
    refuse(code, 1_000)
    with pytest.raises(UnavailableError, match=f"offsets of the group '{name}'"):
        read_committed(settings, name, name, timeout=0.5)


ASK = {
    "start": lambda settings, name: find_places(settings, name, "start"),
    "end": lambda settings, name: find_places(settings, name, "end"),
    "committed": find_committed_ends,
}


@pytest.fixture
def silence(monkeypatch):
    """A function that keeps the last partition from an answer, a number of times."""

    def silence(times: int) -> None:
        ask, answers = places._list_offsets, iter(range(times))

        def list_some(*given, **others):
            found = ask(*given, **others)
            if next(answers, None) is not None:
                found.pop(max(found, key=lambda one: one.partition))
            return found

        monkeypatch.setattr(places, "_list_offsets", list_some)

    return silence


@pytest.mark.parametrize("what", ASK)
def test_a_partition_without_a_leader_is_asked_again(settings, topic, silence, what):
    name = topic(3)
    silence(3)
    assert ASK[what](settings, name) == {0: 0, 1: 0, 2: 0}


@pytest.mark.parametrize("what", ASK)
def test_a_partition_that_never_answers_is_named(
    settings, topic, silence, what, monkeypatch
):
    name = topic(3)
    silence(1_000)
    monkeypatch.setattr(places, "_PATIENCE", 0.3)
    with pytest.raises(UnavailableError, match=f"{name}/2"):
        ASK[what](settings, name)


@pytest.mark.parametrize("year", [1, 1900, 1969])
def test_a_time_before_all_records_is_that_of_the_first_one(settings, topic, year):
    name = topic(1)
    producer = make_producer(settings.kafka_bootstrap_servers)
    producer.produce(name, b"value")
    producer.flush(30)
    assert find_places(settings, name, datetime(year, 1, 1, tzinfo=UTC)) == {0: 0}


def test_committed_records_behind_an_open_transaction_are_waited_for(
    settings, topic, monkeypatch
):
    name = topic(2)
    producer = open_transaction(settings.kafka_bootstrap_servers, name, 2)
    records: list[tuple[str, object]] = [(str(n), {}) for n in range(10)]
    produce(settings.kafka_bootstrap_servers, name, records)
    with pytest.raises(UnavailableError, match=rf"{name}/0 .* from offset 0 on .* 0 s"):
        find_settled_ends(settings, name, within=0)
    abort_when_waited_for(monkeypatch, producer)
    ends = find_settled_ends(settings, name)
    # The records of the transaction, the others, and a marker for each partition.
    assert sum(ends.values()) >= 12


@pytest.fixture
def with_markers(settings, topic):
    """A topic of three partitions, each with two offsets.

    They have a record and a marker, nothing but an aborted record and its marker, and
    two records.
    """
    name = topic(3)
    for number, end in ((0, "commit_transaction"), (1, "abort_transaction")):
        producer = open_transaction(settings.kafka_bootstrap_servers, name, 1, number)
        getattr(producer, end)(60)
    producer = make_producer(settings.kafka_bootstrap_servers)
    for _ in range(2):
        producer.produce(name, b"{}", "k", partition=2)
    assert producer.flush(30) == 0
    return name


PLACES: list[tuple[dict[int, int | None] | None, dict[int, int], dict[int, int]]] = [
    # Only markers are left, and Kafka was told so.
    ({0: 1, 1: 0, 2: 2}, {0: 2, 1: 2, 2: 2}, {}),
    ({0: 1, 1: 0, 2: 2}, {0: 2, 1: 2}, {}),
    # Kafka was not, or this database knows nothing of the partition.
    ({0: 1, 1: 0, 2: 2}, {0: 1, 1: 2}, {0: 1}),
    ({0: 1, 2: 2}, {0: 2, 1: 2}, {1: 0}),
    # The database has gone back before records, or stores nothing yet.
    ({0: 0, 1: 0, 2: 2}, {0: 2, 1: 2, 2: 2}, {0: 0}),
    ({0: 0, 1: 0, 2: 1}, {0: 2, 1: 2, 2: 2}, {0: 0, 2: 1}),
    ({0: None, 1: None, 2: None}, {0: 2, 1: 2, 2: 2}, {0: 0, 2: 0}),
    # Only Kafka has offsets.
    (None, {0: 1, 2: 2}, {}),
    (None, {0: 1, 2: 1}, {2: 1}),
    (None, {}, {0: 0, 2: 0}),
]
"""What is stored, what Kafka was told, and the starts of what is left."""


def test_what_kafka_was_told_counts_only_where_no_record_is_left(
    settings, with_markers
):
    ends = dict.fromkeys(range(3), 2)
    for stored, told, starts in PLACES:
        found = find_left(settings, "group", with_markers, stored, ends, told)
        left = {number: Span(start, 2) for number, start in starts.items()}
        assert found == left, (stored, told)


def test_a_transaction_that_is_open_may_have_records(settings, topic, monkeypatch):
    monkeypatch.setattr(places, "_LOOK_SECONDS", 0.5)
    name = topic(1)
    producer = open_transaction(settings.kafka_bootstrap_servers, name, 1)
    found = find_left(settings, "group", name, {0: 0}, {0: 1}, {0: 1})
    assert found == {0: Span(0, 1)}
    producer.abort_transaction(60)
