"""The partitions of the topics that a group shares: some may be added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.kafka.client import list_partitions
from jobs_lib.kafka.refusal import missing_topics
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from jobs_lib.coordination.shares import Part
    from jobs_lib.settings import Settings


class Topics:
    """Looks now and then how many partitions topics have.

    Args:
        settings: where Kafka is.
        group: names the thread.
        names: of the topics, in Kafka.
        every: seconds between two looks.
        looked: called after each look.
    """

    def __init__(
        self,
        settings: Settings,
        group: str,
        names: Collection[str],
        every: float,
        looked: Callable[[], object],
    ) -> None:
        self.parts: list[Part] = []
        """All partitions, sorted."""
        self._settings = settings
        self._names = sorted(set(names))
        self._every = every
        self._looked = looked
        self._loop = Loop(f"topics {group}", self._look_on)

    def start(self) -> None:
        """Look once, and go on in a thread.

        Raises:
            AccessError: Kafka does not let this client in.
            TopicError: a topic does not exist.
            UnavailableError: no broker answers.
        """
        self._look()
        self._loop.start()

    def stop(self) -> None:
        """End the thread."""
        self._loop.stop()

    def _look_on(self) -> Iterator[None]:
        while not self._loop.stopping.wait(self._every):
            self._look()
            yield

    def _look(self) -> None:
        counts = list_partitions(self._settings, self._names)
        if missing := [one for one in self._names if not counts[one]]:
            raise missing_topics(self._settings, missing)
        self.parts = [(one, part) for one in self._names for part in range(counts[one])]
        self._looked()
