"""Kafka's client refuses records at once, even thousands in one block."""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import KafkaError, KafkaException

from jobs_lib.kafka.reach import Reach
from jobs_lib.outbox.block import LIVE, OutboxRecord, PlainRows, Refusal, others
from jobs_lib.outbox.producers import ShardProducers
from jobs_lib.settings import load_settings

TOO_LARGE, MISSING = b"too large", "missing"


class Client:
    """A producer without a broker that refuses values and topics as librdkafka does."""

    def __init__(self) -> None:
        self.committed: list[tuple[str, bytes | None, str | None]] = []
        self.produced = 0
        self.asked = 0
        self._open: list[tuple[str, bytes | None, str | None]] = []

    def begin_transaction(self) -> None:
        assert not self._open

    def commit_transaction(self, timeout: float) -> None:
        self.committed += self._open
        self._open = []

    def abort_transaction(self, timeout: float) -> None:
        self._open = []

    def produce(self, topic: str, value: bytes, key: str | None, *more: Any) -> None:
        self.produced += 1
        if value == TOO_LARGE:
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
        if topic.startswith(MISSING):
            raise KafkaException(KafkaError(KafkaError._UNKNOWN_TOPIC))
        self._open.append((topic, value, key))

    def purge(self, **how: bool) -> None:
        self._open = []

    def list_topics(self, topic: str, timeout: float) -> Any:
        self.asked += 1
        return type("Metadata", (), {"topics": {topic: type("T", (), {"error": None})}})


@pytest.fixture
def client():
    """The client of shard 0."""
    return Client()


@pytest.fixture
def producers(client):
    """The producers of a relay, with only this client."""
    settings = load_settings(kafka_bootstrap_servers="127.0.0.1:1")
    made = ShardProducers(
        settings, UUID(int=1), threading.Event(), Reach(settings, 2.0)
    )
    made._made[0] = client
    return made


def record(
    number: int, value: bytes = b"v", key: str | None = None, topic: str = "states"
) -> OutboxRecord:
    return OutboxRecord(topic, key, value, LIVE, number, b"", [], "noon")


def confirm() -> None:
    """Confirm that no other relay has the shard."""


@pytest.mark.guarantee("FK10")
def test_a_block_of_which_2000_records_are_refused_leaves_in_one_go(producers, client):
    records = [
        record(n, TOO_LARGE if n % 2 else b"v", f"k{n % 1999}") for n in range(4_000)
    ]
    sent, refusals = producers.send(0, records, confirm)
    refused: set[str | None] = set()
    expected = []
    for one in records:
        if one.value == TOO_LARGE:
            refused.add(one.key)
        elif one.key not in refused:
            expected.append(one)
    assert sent == expected
    assert [value for _, value, _ in client.committed] == [b"v"] * len(expected)
    assert {one.record.key for one in refusals} == refused
    # There is one refusal for each key: the later records of a key are not tried.
    assert len(refusals) == len(refused)
    assert client.produced <= len(records) + 1


@pytest.mark.guarantee("FK10")
def test_records_without_a_key_are_refused_one_by_one(producers, client):
    records = [record(n, TOO_LARGE if n % 2 else b"v") for n in range(4_000)]
    sent, refusals = producers.send(0, records, confirm)
    assert sent == records[::2]
    assert [one.record for one in refusals] == records[1::2]
    assert client.produced == len(records) + 1


def test_a_block_for_thousands_of_missing_topics_asks_for_each_once(producers, client):
    records = [record(n, topic=f"{MISSING}{n}") for n in range(2_000)]
    records += [record(2_000, TOO_LARGE, "a"), record(2_001, key="b")]
    sent, refusals = producers.send(0, records, confirm)
    assert sent == records[-1:]
    assert [one.record for one in refusals] == records[:-1]
    assert [one.whole_topic for one in refusals] == [*[True] * 2_000, False]
    assert client.asked == 2_001
    assert client.produced <= 3 * len(records)


def test_records_before_a_refused_one_of_their_key_are_sent(producers, client):
    records = [
        record(1, key="a"),
        record(2, TOO_LARGE, "a"),
        record(3, key="a"),
        record(4, key="a", topic="others"),
    ]
    sent, (refusal,) = producers.send(0, records, confirm)
    assert sent == [records[0], records[3]]
    assert refusal.record is records[1]
    assert client.committed == [("states", b"v", "a"), ("others", b"v", "a")]


def test_plain_rows_are_refused_as_records_are(producers):
    rows = [
        (n, b"", "states", f"k{n}", value, None, None, None, '"noon"', False, None)
        for n, value in enumerate([b"v", TOO_LARGE, b"v"])
    ]
    plain = PlainRows(rows, {"states": []})
    sent, (refusal,) = producers.send(0, plain, confirm)
    assert sent == [plain.records[0], plain.records[2]]
    assert refusal.record is plain.records[1]


def test_a_topic_keeps_back_its_records_and_one_without_a_key_itself_alone():
    records = [record(1), record(2), record(3, topic=MISSING, key="k")]
    records += [record(4, topic=MISSING, key="l"), record(5, key="k")]
    refusals = [Refusal(records[0], "large"), Refusal(records[2], "missing", True)]
    assert others(records, refusals) == [records[1], records[4]]


def test_a_client_that_cannot_abort_is_replaced_and_the_rest_is_sent(
    producers, client, monkeypatch
):
    """librdkafka breaks where Kafka has refused all else of the transaction."""
    other, confirmed = Client(), []
    error = KafkaError(KafkaError.INVALID_TXN_STATE, "no transaction", fatal=True)

    def refuse(timeout: float) -> None:
        raise KafkaException(error)

    monkeypatch.setattr(client, "abort_transaction", refuse)
    monkeypatch.setattr(producers, "_make", lambda shard: other)
    records = [record(1, key="a"), record(2, key="a", topic=MISSING)]
    sent, (refusal,) = producers.send(0, records, lambda: confirmed.append(0))
    assert (sent, refusal.record) == (records[:1], records[1])
    assert other.committed == [("states", b"v", "a")]
    assert client.committed == []
    # The new client has fenced off the shard's owner, and that may be another process.
    assert confirmed == [0]
