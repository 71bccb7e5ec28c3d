"""Send records to the log, and learn where they stand there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from jobs_lib import telemetry
from jobs_lib.coordination.messages import encode
from jobs_lib.coordination.patience import PIECE, Patience, read_clock
from jobs_lib.errors import UnavailableError
from jobs_lib.kafka.access import Needs, check_access
from jobs_lib.kafka.client import find_broker, make_publisher
from jobs_lib.kafka.refusal import explain
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from confluent_kafka import KafkaError, Producer
    from confluent_kafka import Message as KafkaMessage

    from jobs_lib.coordination.messages import Message
    from jobs_lib.coordination.world import Outcome
    from jobs_lib.settings import Settings

_POLL_SECONDS = 0.1


class Sent:
    """A record that was sent; it is read back once the log has been read up to it."""

    __slots__ = (
        "_done",
        "_then",
        "error",
        "is_absent",
        "message",
        "offset",
        "outcome",
        "sent_at",
    )

    def __init__(
        self, message: Message, then: Callable[[Sent], None] | None = None
    ) -> None:
        self.message = message
        self.sent_at = read_clock()
        """By this machine's clock, before it was sent."""
        self.offset: int | None = None
        """Its offset in the log, once Kafka has acknowledged it."""
        self.outcome: Outcome | None = None
        """What it did there, once it was read back."""
        self.error: Exception | None = None
        """Why nobody knows whether it is in the log."""
        self.is_absent = False
        """Whether it is sure that it is not in the log, and will never be."""
        self._then = then
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether it was read back, or nobody will ever know."""
        return self._done.is_set()

    def end(self, outcome: Outcome | None, error: Exception | None = None) -> None:
        """Note how it went; only the first call counts. The log's lock is held."""
        if self._done.is_set():
            return
        self.outcome, self.error = outcome, error
        self._done.set()
        if self._then is not None:
            self._then(self)

    def wait(self, timeout: float) -> Outcome:
        """Wait until it was read back, and return what it did.

        Time in which this process stands still counts little: it has not read then.

        Raises:
            JobsError: nobody knows whether it is in the log, and why.
            UnavailableError: it was not read back in time.
        """
        left = Patience(timeout, stop=PIECE)
        while not self._done.wait(min(timeout, PIECE)):
            if left.is_over:
                raise UnavailableError(
                    f"a {type(self.message).__name__} was not read back from the "
                    f"coordination log within {timeout:g} s: nobody knows whether it "
                    "is in"
                )
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        return self.outcome


class Writer:
    """Sends records, and has a thread that takes their acknowledgements.

    Args:
        settings: where Kafka is.
        topic: the log's name in Kafka.
        timeout: seconds until a record without an acknowledgement is given up.
        acknowledged: called with a record, its place and its offset.
        failed: called with a record, its place and the error.
    """

    def __init__(
        self,
        settings: Settings,
        topic: str,
        timeout: float,
        acknowledged: Callable[[Sent, int, int], None],
        failed: Callable[[Sent, int, Exception], None],
    ) -> None:
        self._settings = settings
        self._topic = topic
        self._timeout = timeout
        self._acknowledged = acknowledged
        self._failed = failed
        self._producer = self._make()
        self._broken: list[Producer] = []
        """Producers that send nothing more, and have not told all of it yet."""
        self._loop = Loop(f"send {topic}", self._serve)

    def start(self) -> None:
        """Start the thread.

        Raises:
            AccessError: Kafka denies the right to write, or does not let it in.
            UnavailableError: no broker answers.
        """
        # A producer would only say that it is broken for good.
        check_access(self._settings, Needs(writes={self._topic}))
        find_broker(self._producer, self._timeout)
        self._loop.start()

    def stop(self, timeout: float) -> None:
        """Wait for acknowledgements of what was sent, and end the thread."""
        try:
            self._producer.flush(timeout)
        except KafkaException as failure:
            # The producer is broken. The thread makes no other one any more.
            self._tell(explain(failure.args[0], self._settings, self._topic, "WRITE"))
        finally:
            self._loop.stop(timeout)

    def send(self, sent: Sent, place: int, partitions: int, key: str | None) -> None:
        """Send a record without waiting. A failure ends it, and is not raised."""

        def delivered(error: KafkaError | None, message: KafkaMessage) -> None:
            if error is None:
                self._acknowledged(sent, place, message.offset() or 0)
            else:
                self._fail(sent, place, error)

        try:
            self._producer.produce(
                self._topic,
                encode(sent.message, partitions),
                key,
                partition=place,
                on_delivery=delivered,
            )
        except BufferError as error:
            # Nobody has answered for a long time. The next heartbeat tries again.
            self._failed(sent, place, UnavailableError(str(error)))
        except KafkaException as failure:
            self._fail(sent, place, failure.args[0])

    def _serve(self) -> Iterator[None]:
        while not self._loop.stopping.is_set():
            for producer in self._broken:
                producer.poll(0)
            self._broken = [one for one in self._broken if len(one)]
            try:
                self._producer.poll(_POLL_SECONDS)
            except KafkaException as failure:
                if not failure.args[0].fatal():
                    raise
                self._replace(failure.args[0])
            yield

    def _replace(self, error: KafkaError) -> None:
        """Send by a new producer: an idempotent one never works again after that.

        Only a poll tells it. What fails because of it has other errors.
        """
        self._tell(explain(error, self._settings, self._topic, "WRITE"))
        self._broken.append(self._producer)
        self._producer = self._make()
        find_broker(self._producer, self._timeout)

    def _fail(self, sent: Sent, place: int, error: KafkaError) -> None:
        explained = explain(error, self._settings, self._topic, "WRITE")
        self._tell(explained)
        self._failed(sent, place, explained)

    def _tell(self, error: Exception) -> None:
        telemetry.emit("loop.failed", loop=self._loop.name, error=error)

    def _make(self) -> Producer:
        return make_publisher(self._settings, "all", self._timeout)
