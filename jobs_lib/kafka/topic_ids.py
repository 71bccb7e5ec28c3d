"""The ids of topics: a topic that is deleted and made anew has another one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import KafkaException, TopicCollection

from jobs_lib.errors import AccessError
from jobs_lib.kafka.client import as_uuid, make_admin, poll_events, read_topic_ids
from jobs_lib.kafka.places import read_policy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future
    from uuid import UUID

    from confluent_kafka.admin import AdminClient

    from jobs_lib.settings import Settings

_INTERVAL = 10.0
_TIMEOUT = 5.0


class TopicIds:
    """The ids of topics that a consumer reads.

    A client that goes on reading does not notice by itself that a topic was made anew,
    if the new one has a record at the offset that comes next.

    Args:
        settings: where Kafka is.
        topics: by their names in Kafka.
        interval: seconds between two questions of :meth:`poll`.
    """

    def __init__(
        self, settings: Settings, topics: Iterable[str], interval: float = _INTERVAL
    ) -> None:
        self._settings = settings
        self._topics = sorted(topics)
        self._interval = interval
        self._admin: AdminClient | None = None
        self._asked: dict[str, Future[Any]] = {}
        self._asked_at = time.monotonic()

    def read(self, topics: Iterable[str]) -> dict[str, UUID]:
        """Ask for the ids of some topics, and wait for the answer.

        Topics that are missing or not visible are left out, and all topics of a broker
        that knows no ids.

        Raises:
            UnavailableError: no broker answers.
        """
        return read_topic_ids(self._settings, topics)

    def read_policy(self, topic: str) -> str | None:
        """Ask how a topic is cleaned up, and wait; None if Kafka denies the right.

        Raises:
            UnavailableError: no broker answers.
        """
        try:
            return read_policy(self._settings, topic)
        except AccessError:
            return None

    def poll(self) -> dict[str, UUID]:
        """Ask for the ids now and then, and never wait.

        Returns what Kafka has answered since the last call; mostly nothing.
        """
        if self._admin is not None:
            poll_events(self._admin)
        if self._asked and all(one.done() for one in self._asked.values()):
            answers, self._asked = self._asked, {}
            return self._take(answers)
        if time.monotonic() > self._asked_at + self._interval:
            self._ask()
        return {}

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        if self._admin is None:
            self._admin = make_admin(self._settings)
        self._asked = cast("Any", self._admin).describe_topics(
            TopicCollection(self._topics), request_timeout=_TIMEOUT
        )

    def _take(self, answers: dict[str, Future[Any]]) -> dict[str, UUID]:
        ids = {}
        for topic, answer in answers.items():
            try:
                found = as_uuid(answer.result().topic_id)
            except KafkaException:
                # Whoever reads the topic tells why. Another client is asked next.
                self._admin = None
                continue
            if found is not None:
                ids[topic] = found
        return ids
