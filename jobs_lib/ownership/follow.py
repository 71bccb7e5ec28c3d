"""For sidecars: own the partitions that the service's group assigned to this pod.

A sidecar never joins the group: as a member it would be assigned partitions that the
service then never reads. It asks the group's coordinator instead. It finds the pod's
member by its group.instance.id, else by its client id; both are the pod's name. Among
several members it chooses the one with the address of this host.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from jobs_lib.errors import ConfigurationError, JobsError
from jobs_lib.kafka.members import MembersClient
from jobs_lib.kafka.refusal import find_refusal
from jobs_lib.ownership.source import WatchingSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobs_lib.kafka.members import GroupMember
    from jobs_lib.settings import Settings


class FollowSource(WatchingSource):
    """Wants what the coordinator of each group has assigned to the pod's member.

    An answer counts only in state Stable, and only when it was read twice in a row: it
    carries no generation, and is old or empty while the group rebalances. After the
    session timeout without a stable answer, the source wants nothing. It takes nothing
    from a living owner, which reads the same answer and releases by itself.
    """

    def __init__(
        self, settings: Settings, topics_by_group: dict[str, frozenset[str]]
    ) -> None:
        super().__init__("follow")
        self._settings = settings
        self._topics_by_group = topics_by_group
        self._read: dict[str, frozenset[str]] = {}
        self._agreed: dict[str, frozenset[str]] = {}
        self._stable_at: dict[str, float] = {}
        self._unclear_since: dict[str, float] = {}
        self._members = MembersClient()

    def stop(self) -> None:
        """Stop the thread, and want nothing more."""
        self._loop.stopping.set()
        # It does not wait for an answer any longer.
        self._members.close()
        super().stop()

    def _watch(self) -> Iterator[None]:
        while not self._loop.stopping.is_set():
            try:
                self._ask()
            except JobsError:
                if self._loop.stopping.is_set():
                    return  # Its question ended with its client.
                raise
            yield
            self._loop.stopping.wait(self._settings.follow_interval)

    def _fail(self) -> None:
        self._expire()

    def _ask(self) -> None:
        described = self._members.describe(
            self._settings, self._topics_by_group, self._settings.session_timeout
        )
        for group, found in described.items():
            if isinstance(found, KafkaError):
                refusal = find_refusal(found, self._settings, group, "DESCRIBE")
                raise refusal or KafkaException(found)
            if found.state == "STABLE":
                self._note(group, found.members)
        self._expire()

    def _note(self, group: str, members: Sequence[GroupMember]) -> None:
        ours = self._find(members)
        if len(ours) > 1:
            # A killed process stays a member until its session ends.
            self._doubt(group, ours)
            return
        self._unclear_since.pop(group, None)
        read = frozenset(
            f"{topic}/{number}"
            for member in ours
            for topic, number in member.partitions
            if topic in self._topics_by_group[group]
        )
        self._stable_at[group] = time.monotonic()
        if self._read.get(group) == read:
            self._agreed[group] = read
        self._read[group] = read

    def _find(self, members: Sequence[GroupMember]) -> list[GroupMember]:
        pod = self._settings.pod
        named = [m for m in members if m.instance == pod]
        ours = named or [m for m in members if m.client_id == pod]
        if len(ours) > 1:
            here = find_address(self._settings.kafka_bootstrap_servers)
            ours = [m for m in ours if m.host.lstrip("/") == here] or ours
        return ours

    def _doubt(self, group: str, ours: Sequence[GroupMember]) -> None:
        since = self._unclear_since.setdefault(group, time.monotonic())
        if time.monotonic() - since > 2 * self._settings.session_timeout:
            hosts = ", ".join(sorted(m.host for m in ours))
            raise ConfigurationError(
                f"{len(ours)} members of the group {group!r} call themselves "
                f"{self._settings.pod!r} (at {hosts}), so this sidecar cannot tell "
                "which one it serves: give each pod a name of its own by JOBS_LIB_POD"
            )

    def _expire(self) -> None:
        oldest = time.monotonic() - self._settings.session_timeout
        wanted = frozenset().union(
            *(
                agreed
                for group, agreed in self._agreed.items()
                if self._stable_at[group] > oldest
            )
        )
        self.replace(wanted)


def find_address(bootstrap_servers: str) -> str:
    """Find the address by which a broker sees this host; empty if there is no route."""
    host, _, port = bootstrap_servers.split(",")[0].strip().rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # This sends nothing: it only chooses the route.
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return ""
