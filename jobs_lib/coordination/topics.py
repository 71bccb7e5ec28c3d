"""What a group shares: the partitions of topics, of which some may be added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.kafka.client import list_partitions
from jobs_lib.kafka.refusal import missing_topics
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from jobs_lib.kafka.poller import Partition
    from jobs_lib.settings import Settings


def find_partitions(settings: Settings, topics: Collection[str]) -> list[Partition]:
    """Find all partitions of topics.

    Raises:
        AccessError: Kafka does not let this client in.
        TopicError: a topic does not exist.
        UnavailableError: no broker answers.
    """
    names = sorted(set(topics))
    counts = list_partitions(settings, names)
    if missing := [one for one in names if not counts[one]]:
        raise missing_topics(settings, missing)
    return [(one, part) for one in names for part in range(counts[one])]


class Topics:
    """Looks now and then which partitions a group shares.

    Args:
        group: names the thread.
        find: finds them.
        every: seconds between two looks.
        looked: called after each look.
    """

    def __init__(
        self,
        group: str,
        find: Callable[[], Iterable[Partition]],
        every: float,
        looked: Callable[[], object],
    ) -> None:
        self.parts: list[Partition] = []
        """All partitions, sorted."""
        self._find = find
        self._every = every
        self._looked = looked
        self._loop = Loop(f"topics {group}", self._look_on)

    def start(self) -> None:
        """Look once, and go on in a thread. What the look raises is raised."""
        self._look()
        self._loop.start()

    def stop(self, timeout: float) -> None:
        """End the thread; wait so many seconds at most for a look that hangs."""
        self._loop.stop(timeout)

    def _look_on(self) -> Iterator[None]:
        while not self._loop.stopping.wait(self._every):
            self._look()
            yield

    def _look(self) -> None:
        self.parts = sorted(set(self._find()))
        self._looked()
