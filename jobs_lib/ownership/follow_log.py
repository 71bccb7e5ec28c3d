"""For sidecars: own the partitions that the service holds in a coordination log.

A sidecar claims nothing there: it would hold partitions that the service never reads.
It only reads the log, and finds the service's holdings by the name of the pod.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from jobs_lib.coordination import Log
from jobs_lib.coordination.messages import Sender
from jobs_lib.coordination.patience import read_clock
from jobs_lib.ownership.source import WatchingSource

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from jobs_lib.settings import Settings

_INTERVALS = 2
"""After so many without a sign of life of its holder, others may have a partition."""


class FollowLogSource(WatchingSource):
    """Wants what the log gives to the pod's member in each group.

    A holding counts while its holder's records go on to come, by this process's clock:
    so it ends when the service has died, and when this process has lost Kafka. This
    source takes nothing from a living owner, which reads the same log and releases.
    """

    def __init__(self, settings: Settings, groups: Collection[str]) -> None:
        """Prepare.

        Args:
            settings: where Kafka is, and the log.
            groups: those of the service's consumers, by their names in the log.
        """
        super().__init__("follow")
        self._settings = settings
        self._groups = frozenset(groups)
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}
        """Of each origin its claim and last time in the log, and since when."""

    def _watch(self) -> Iterator[None]:
        settings = self._settings
        sender = Sender("jobs_lib.follow", settings.pod, uuid.uuid4().hex)
        interval = settings.coordination_interval
        log = Log(
            settings,
            settings.coordination_topic,
            sender,
            interval=interval,
            only_reads=True,
        )
        log.start()
        try:
            while not self._loop.stopping.is_set():
                self._choose(log)
                yield
                self._loop.stopping.wait(settings.follow_interval)
        finally:
            log.stop()
            self._seen.clear()

    def _fail(self) -> None:
        self.replace(())

    def _choose(self, log: Log) -> None:
        now = read_clock()
        held = self._read(log)
        self._seen = {
            origin: (mark, seen[1] if seen[0] == mark else now)
            for origin, mark in held.items()
            for seen in (self._seen.get(origin, (mark, now)),)
        }
        latest = now - _INTERVALS * self._settings.coordination_interval
        self.replace(one for one, (_, since) in self._seen.items() if since >= latest)

    def _read(self, log: Log) -> dict[str, tuple[int, int]]:
        """Read what the service holds; nothing while the log must be read anew."""
        with log.lock:
            return {
                shared.origin: (holding.claim, holding.last_ms)
                for world in (log.get_worlds() if log.is_known else ())
                for shared, (_, holding) in world.entries.items()
                if shared.group_id in self._groups
                and holding is not None
                and holding.client_id == self._settings.pod
                and holding.confirmed
            }
