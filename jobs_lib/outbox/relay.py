"""The relay: threads that share the shards, and a producer for each shard."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from jobs_lib.kafka.reach import Reach
from jobs_lib.outbox.listener import Listener
from jobs_lib.outbox.producers import ShardProducers
from jobs_lib.outbox.reader import Reader
from jobs_lib.outbox.relay_thread import RelayThread
from jobs_lib.partitioner import split_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from uuid import UUID

    from jobs_lib.errors import AccessError
    from jobs_lib.outbox.topic import Entity, Topic
    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings
    from jobs_lib.telemetry.liveness import Pulse

SENDERS = 4
"""Relay threads: while some wait for the database or the broker, another works."""


class Relay:
    """Sends the shards that it is given; a Holder of the role ``relay``."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        owner: UUID,
        installation: UUID,
        *,
        entities: Mapping[str, Entity],
        topics: Mapping[str, Topic[Any]],
        source: str,
        refused: Callable[[AccessError], None] = lambda error: None,
    ) -> None:
        self._stopping = threading.Event()
        # What a thread asks Kafka is over by then, even if there is no answer.
        self._patience = 2 * settings.session_timeout
        # A producer reports a failure after half of the session timeout.
        self._reach = Reach(settings, settings.session_timeout / 2)
        self._reader = Reader(
            database,
            owner,
            settings.relay_block,
            entities=entities,
            topics=topics,
            source=source,
        )
        largest = max((topic.largest for topic in topics.values()), default=0)

        def make_producers() -> ShardProducers:
            return ShardProducers(
                settings,
                installation,
                self._stopping,
                self._reach,
                refused,
                largest=largest,
            )

        self._senders = [
            RelayThread(
                database,
                self._reader,
                make_producers(),
                settings.relay_poll_interval,
                self._receives_hints,
                self._stopping,
            )
            for _ in range(SENDERS)
        ]
        self._listener = Listener(
            database, self._wake, settings.relay_poll_interval, self._stopping
        )

    @property
    def pulses(self) -> list[Pulse]:
        """The pulses of its threads."""
        senders = [sender.pulse for sender in self._senders]
        return senders + self._listener.pulses

    def start(self) -> None:
        """Start the threads; they send nothing until they are given shards.

        After an error none runs any more.
        """
        try:
            for sender in self._senders:
                sender.start()
            self._listener.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the threads. Call after the shards have been released."""
        self._stopping.set()
        self._listener.stop()
        deadline = time.monotonic() + self._patience
        for sender in self._senders:
            # A loader that hangs is fenced: its shard has been released.
            sender.stop(max(0.0, deadline - time.monotonic()))

    def is_cut_off(self) -> bool:
        """Whether this process cannot reach Kafka, so that another relay should send.

        It may wait for a second, so a relay thread must not call it.
        """
        return self._reach.is_lost()

    def take(self, origins: Mapping[str, int]) -> None:
        """Start to send shards at these epochs."""
        for sender, shards in self._share(origins):
            sender.take({n: origins[f"shard/{n}"] for n in shards})

    def release(self, origins: frozenset[str], timeout: float) -> None:
        """Stop sending these shards; wait for the blocks that are being sent."""
        deadline = time.monotonic() + timeout
        for sender, shards in self._share(origins):
            sender.release(shards, deadline)

    def _wake(self, shards: frozenset[int] | None) -> None:
        """Let the threads of these shards look for rows; None for all threads."""
        if shards is None:
            senders = self._senders
        else:
            senders = [self._get_sender(shard) for shard in shards]
        for sender in senders:
            sender.wake()

    def _get_sender(self, shard: int) -> RelayThread:
        return self._senders[shard % len(self._senders)]

    def _receives_hints(self) -> bool:
        return self._listener.receives_hints

    def _share(self, origins: Iterable[str]) -> list[tuple[RelayThread, set[int]]]:
        shares: dict[RelayThread, set[int]] = {}
        for origin in origins:
            shard = split_origin(origin)[1]
            shares.setdefault(self._get_sender(shard), set()).add(shard)
        return [*shares.items()]
