"""Questions about places in topics, while Kafka is not ready to answer."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from jobs_lib.errors import UnavailableError
from jobs_lib.kafka import places
from tests.support.apps import make_app


@pytest.fixture
def refuse(monkeypatch):
    """A function that lets brokers refuse to tell offsets, some times or always."""

    def refuse(code: int, times: int | None = None) -> None:
        make = places.make_consumer

        def make_consumer(settings, group):
            consumer = make(settings, group)
            errors = iter([KafkaException(KafkaError(code))] * (times or 1_000))
            committed = Mock(
                side_effect=lambda *given: refused(errors) or consumer.committed(*given)
            )
            return Mock(committed=committed, close=consumer.close)

        monkeypatch.setattr(places, "make_consumer", make_consumer)

    def refused(errors) -> None:
        if (error := next(errors, None)) is not None:
            raise error

    return refuse


@pytest.fixture
def settings(database_url, bootstrap_servers):
    """Settings with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers).settings


def test_a_group_whose_coordinator_is_on_its_way_is_asked_again(
    settings, topic, refuse
):
    name = topic(2)
    consumer = places.make_consumer(settings, name)
    offsets = [TopicPartition(name, 1, 7)]
    consumer.commit(offsets=offsets, asynchronous=False)
    consumer.close()
    refuse(KafkaError.NOT_COORDINATOR, 3)
    assert places.read_committed(settings, name, name) == {1: 7}


@pytest.mark.parametrize(
    "code", [KafkaError.NOT_COORDINATOR, KafkaError.GROUP_AUTHORIZATION_FAILED]
)
def test_a_group_that_kafka_does_not_tell_is_named(settings, topic, refuse, code):
    name = topic(1)
    refuse(code)
    with pytest.raises(UnavailableError, match=f"offsets of the group '{name}'"):
        places.read_committed(settings, name, name, timeout=0.5)
