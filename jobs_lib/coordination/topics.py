"""What a group shares: the partitions of topics, of which some may be added."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from jobs_lib import telemetry
from jobs_lib.coordination.names import check_part
from jobs_lib.kafka.client import list_partitions
from jobs_lib.kafka.refusal import missing_topics
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from jobs_lib.kafka.poller import Partition
    from jobs_lib.settings import Settings


class Look(NamedTuple):
    """What a look has found."""

    parts: Sequence[Partition]
    """All partitions, sorted."""
    missing: frozenset[str]
    """Topics of which Kafka showed none: what is held of them is kept meanwhile."""


def find_partitions(settings: Settings, topics: Collection[str]) -> list[Partition]:
    """Find all partitions of topics; those that are missing have none.

    Raises:
        AccessError: Kafka does not let this client in.
        UnavailableError: no broker answers.
    """
    counts = list_partitions(settings, set(topics))
    return [(one, part) for one in counts for part in range(counts[one])]


class Topics:
    """Looks now and then which partitions a group shares.

    Args:
        settings: where Kafka is.
        group: names the thread.
        names: of the topics; none, if ``find`` is given.
        every: seconds between two looks.
        looked: called after each look.
        find: finds what is shared instead of topics.
        awaits_topics: whether a topic may be missing at the first look.
    """

    def __init__(
        self,
        settings: Settings,
        group: str,
        names: Collection[str],
        every: float,
        looked: Callable[[], object],
        find: Callable[[], Iterable[Partition]] | None = None,
        *,
        awaits_topics: bool = False,
    ) -> None:
        self.last = Look([], frozenset())
        """What the last look has found."""
        self._settings = settings
        self._names = frozenset(() if find else names)
        self._every = every
        self._looked = looked
        self._find = find or partial(find_partitions, settings, names)
        self._awaits_topics = awaits_topics
        self._loop = Loop(f"topics {group}", self._look_on)

    def start(self) -> None:
        """Look once, and go on in a thread. What the look raises is raised."""
        self._look(may_miss=self._awaits_topics)
        self._loop.start()

    def stop(self, timeout: float) -> None:
        """End the thread; wait so many seconds at most for a look that hangs."""
        self._loop.stop(timeout)

    def _look_on(self) -> Iterator[None]:
        while not self._loop.stopping.wait(self._every):
            self._look()
            yield

    def _look(self, *, may_miss: bool = True) -> None:
        parts = sorted({check_part(one) for one in self._find()})
        missing = self._names - {topic for topic, _ in parts}
        if missing:
            error = missing_topics(self._settings, sorted(missing))
            if not may_miss:
                raise error
            # The others go on, and what is added to them is found.
            telemetry.emit("loop.failed", loop=self._loop.name, error=error)
        self.last = Look(parts, missing)
        self._looked()
