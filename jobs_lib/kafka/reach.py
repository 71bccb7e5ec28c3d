"""Whether this process reaches Kafka, by its clients' results or by asking."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from jobs_lib.errors import UnavailableError
from jobs_lib.kafka.client import make_admin, poll_events, read_topics
from jobs_lib.kafka.refusal import SILENT
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka.admin import AdminClient

    from jobs_lib.errors import AccessError
    from jobs_lib.settings import Settings

_ASK_SECONDS = 1.0
_LOOK_SECONDS = 1.0
_SILENT_SECONDS = 4.0


class Reach:
    """Notes the results of Kafka's clients; asks Kafka itself only if it seems lost.

    Args:
        settings: where Kafka is.
        patience: seconds with nothing but failures after which Kafka is lost.
    """

    def __init__(self, settings: Settings, patience: float) -> None:
        self._settings = settings
        self._patience = patience
        self._lock = threading.Lock()
        self._failing_since: float | None = None

    def answered(self) -> None:
        """Note that a request to Kafka succeeded."""
        with self._lock:
            self._failing_since = None

    def failed(self, error: Exception) -> None:
        """Note an error; an error that Kafka itself sent still counts as an answer."""
        silent = isinstance(error, KafkaException) and error.args[0].code() in SILENT
        with self._lock:
            if not silent:
                self._failing_since = None
            elif self._failing_since is None:
                self._failing_since = time.monotonic()

    def is_lost(self) -> bool:
        """Whether other processes should do this one's part. May wait for a second.

        It asks Kafka itself, because a process with nothing to send would never learn
        that Kafka is back.
        """
        with self._lock:
            since = self._failing_since
        if since is None or time.monotonic() - since <= self._patience:
            return False
        try:
            read_topics(self._settings, _ASK_SECONDS)
        except UnavailableError:
            return True
        self.answered()
        return False


class KafkaWatch:
    """Asks Kafka about once a second, in a thread of its own, whether it answers.

    The question is small, and needs no right. Whoever wants to know waits for nothing.

    Args:
        settings: where Kafka is.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._admin: AdminClient | None = None
        self._answered_at = 0.0
        self._loop = Loop("kafka watch", self._look)

    def start(self) -> None:
        """Start the thread; until its first answers, Kafka counts as there."""
        self._answered_at = time.monotonic()
        self._loop.start()

    def stop(self) -> None:
        """Stop the thread."""
        # It may wait for an answer, and holds nothing that somebody waits for.
        self._loop.stop(_ASK_SECONDS)

    def is_unanswered(self) -> bool:
        """Whether Kafka has left the last questions without an answer."""
        return time.monotonic() - self._answered_at > _SILENT_SECONDS

    def _look(self) -> Iterator[None]:
        while not self._loop.stopping.wait(_LOOK_SECONDS):
            if self._answers():
                self._answered_at = time.monotonic()
            yield

    def _answers(self) -> bool:
        if self._admin is None:
            self._admin = make_admin(self._settings, _say_nothing)
        poll_events(self._admin)
        answer = self._admin.describe_cluster(request_timeout=_ASK_SECONDS)
        try:
            answer.result()
        except KafkaException as failure:
            if failure.args[0].code() not in SILENT:
                return True  # a broker has refused it
            # Do not wait as long as this one would with its next try.
            self._admin = None
            return False
        return True


def _say_nothing(_: AccessError) -> None:
    """Leave it to the clients that do the work to say why they are refused."""
