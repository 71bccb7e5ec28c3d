"""Commit offsets for a group that has no members."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from jobs_lib.kafka.client import make_consumer, poll_events
from jobs_lib.kafka.refusal import SOON, explain, no_answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs_lib.errors import AccessError
    from jobs_lib.kafka.member import Partition
    from jobs_lib.settings import Settings


class OutsideCommitter:
    """Commits offsets by a client that never joins; used by one thread.

    Kafka takes them as long as nobody else is a member of the group.
    """

    def __init__(self, settings: Settings, group: str, mark: str = "") -> None:
        """Prepare; no connection is made before the first commit.

        Args:
            settings: where the brokers are.
            group: by its name in Kafka.
            mark: the metadata of all offsets that it commits.
        """
        self.group = group
        self._mark = mark
        self._settings = settings
        self._client: Consumer | None = None
        self._refusals: deque[AccessError] = deque(maxlen=1)

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Commit offsets, and wait until Kafka has acknowledged all of them.

        Raises:
            AccessError: Kafka does not let this client in, or denies the right to it.
            KafkaException: it refuses them for another reason.
            UnavailableError: no broker answers.
        """
        if self._client is None:
            self._client = make_consumer(
                self._settings, self.group, self._refusals.append, joins=False
            )
        places = [TopicPartition(*one, at, self._mark) for one, at in offsets.items()]
        try:
            answered: Any = self._client.commit(offsets=places, asynchronous=False)
        except KafkaException as failure:
            raise self._explain(failure.args[0], self.group) from None
        for at in answered:
            if at.error is not None:
                raise self._explain(at.error, at.topic)

    def close(self) -> None:
        """Close the client; the next commit makes another one."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _explain(self, error: KafkaError, name: str) -> Exception:
        assert self._client is not None
        poll_events(self._client)
        # Negative codes are the client's own: no broker has answered.
        if error.code() < 0 and self._refusals:
            return self._refusals.popleft()
        explained = explain(error, self._settings, name, "READ")
        if isinstance(explained, KafkaException) and (
            error.code() < 0 or error.code() in SOON
        ):
            return no_answer(self._settings, f"{error.str()} ({error.name()})")
        return explained
