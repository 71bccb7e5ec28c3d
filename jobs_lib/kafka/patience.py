"""Ask Kafka again while a broker or a leader is only coming."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from confluent_kafka import KafkaError, KafkaException

from jobs_lib.errors import TopicError
from jobs_lib.kafka.refusal import no_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.settings import Settings

T = TypeVar("T")
_PAUSE = 0.1
"""Seconds until Kafka is asked again."""


def ask_again(
    settings: Settings,
    question: Callable[[], T],
    explain: Callable[[KafkaError], Exception],
    seconds: float,
) -> T:
    """Ask until there is an answer, or an error that does not pass.

    The client has many errors for what passes, of which it calls few passing ones: all
    do of which nothing is known, and those about the topic.

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
        if not isinstance(explained, KafkaException | TopicError):
            raise explained
        if time.monotonic() >= until:
            is_known = isinstance(explained, TopicError)
            raise explained if is_known else no_answer(settings, error.str())
        time.sleep(_PAUSE)
