"""The answers and failures of Kafka's clients show whether Kafka is reached."""

from __future__ import annotations

import threading
from uuid import UUID

import pytest
from confluent_kafka import KafkaError, KafkaException

from jobs_lib.errors import AccessError
from jobs_lib.kafka.reach import Reach
from jobs_lib.outbox.producers import ShardProducers
from jobs_lib.settings import load_settings

SILENCE = KafkaException(KafkaError(KafkaError._TIMED_OUT))
REFUSAL = KafkaException(KafkaError(KafkaError.INVALID_PRODUCER_EPOCH))


@pytest.fixture
def make_reach():
    """A function that makes a reach to a broker that does not answer."""
    settings = load_settings(kafka_bootstrap_servers="127.0.0.1:1")
    return lambda patience: Reach(settings, patience)


def test_kafka_counts_as_lost_after_a_long_silence(make_reach):
    reach = make_reach(0.0)
    assert not reach.is_lost()
    reach.failed(SILENCE)
    assert reach.is_lost()
    patient = make_reach(60.0)
    patient.failed(SILENCE)
    assert not patient.is_lost()


@pytest.mark.parametrize(
    "answer",
    [
        Reach.answered,
        lambda reach: reach.failed(REFUSAL),
        lambda reach: reach.failed(AccessError("no WRITE")),
    ],
    ids=["taken", "refused", "denied"],
)
def test_any_answer_shows_that_kafka_is_reached(make_reach, answer):
    reach = make_reach(0.0)
    reach.failed(SILENCE)
    answer(reach)
    assert not reach.is_lost()


def test_sending_nothing_counts_as_no_answer(make_reach):
    settings = load_settings(kafka_bootstrap_servers="127.0.0.1:1")
    reach = make_reach(0.0)
    producers = ShardProducers(settings, UUID(int=1), threading.Event(), reach)
    reach.failed(SILENCE)
    assert producers.send(0, [], lambda: None) == ([], [])
    assert reach.is_lost()
