"""Whether this process reaches Kafka, judged by the results of its clients."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from jobs_lib.errors import UnavailableError
from jobs_lib.kafka.client import read_topics
from jobs_lib.kafka.refusal import SILENT

if TYPE_CHECKING:
    from jobs_lib.settings import Settings

_ASK_SECONDS = 1.0


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
