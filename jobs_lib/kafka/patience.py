"""Ask Kafka again while a broker or a leader is only coming."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from jobs_lib.errors import TopicError, UnavailableError
from jobs_lib.kafka.client import list_partitions
from jobs_lib.kafka.refusal import DESTROY_BROKER, missing_topics, no_answer
from jobs_lib.kafka.refusal import explain as explain_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Consumer

    from jobs_lib.kafka.member import Partition
    from jobs_lib.settings import Settings

T = TypeVar("T")
_PAUSE = 0.1
"""Seconds until Kafka is asked again."""
_LOST = {KafkaError._TRANSPORT, DESTROY_BROKER}
"""What a question gets whose connection ends: the client makes another connection."""


def ask_again(
    settings: Settings,
    question: Callable[[], T],
    explain: Callable[[KafkaError], Exception],
    seconds: float,
) -> T:
    """Ask until there is an answer, or an error that does not pass.

    The client has many errors for what passes, of which it calls few passing ones: all
    do of which nothing is known, and those about the topic or a lost connection.

    Args:
        settings: where Kafka is.
        question: asks once.
        explain: turns the client's error into one of ours, if it knows one.
        seconds: how long errors may pass.

    Raises:
        JobsError: what ``explain`` has made of the error.
        UnavailableError: nothing is known of the last one.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return question()
        except KafkaException as failure:
            error: KafkaError = failure.args[0]
        explained = explain(error)
        is_lost = error.code() in _LOST and isinstance(explained, UnavailableError)
        if not is_lost and not isinstance(explained, KafkaException | TopicError):
            raise explained
        if time.monotonic() >= until:
            is_unknown = isinstance(explained, KafkaException)
            raise no_answer(settings, error.str()) if is_unknown else explained
        time.sleep(_PAUSE)


def read_range(
    consumer: Consumer, settings: Settings, partition: Partition, seconds: float
) -> tuple[int, int]:
    """Ask for the oldest offset of a partition and its end.

    Args:
        consumer: asks.
        settings: where Kafka is.
        partition: its topic, and its number.
        seconds: how long one answer may take, and how long errors may pass.

    Raises:
        AccessError: the brokers do not let it in, or deny the right to read.
        TopicError: there is no such partition, or it is not visible.
        UnavailableError: no broker answers, or none is the partition's leader.
    """
    topic, number = partition
    place = TopicPartition(topic, number)

    def ask() -> tuple[int, int]:
        start, end = consumer.get_watermark_offsets(place, timeout=seconds)
        return start, end

    def tell(error: KafkaError) -> Exception:
        # Raises the reason if no broker answers, which this client does not know.
        if not 0 <= number < list_partitions(settings, [topic], seconds)[topic]:
            raise missing_topics(settings, [topic])
        explained = explain_error(error, settings, topic, "READ")
        # The topic is there, so its leader is only coming.
        return KafkaException(error) if type(explained) is TopicError else explained

    return ask_again(settings, ask, tell, seconds)
