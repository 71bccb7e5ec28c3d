"""Own what this process holds in a coordination log.

The log shares the origins among the processes, and the epochs in the database guard
them, as with every other source. See docs/ownership.md.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from jobs_lib.coordination import Member, Shared
from jobs_lib.coordination.names import check_group, name_setting
from jobs_lib.errors import FencedError, JobsError
from jobs_lib.ownership.source import WatchingSource
from jobs_lib.partitioner import split_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from uuid import UUID

    from jobs_lib.settings import Settings

_LOOK = 0.2
"""Seconds between two looks whether the member should end."""
_NOT_IN_NAMES = re.compile(r"[%.\s]")


def name_group(installation: UUID, role: str) -> str:
    """Name the group whose members share the origins of a role of one database.

    Raises:
        ConfigurationError: the role's name is too long for it.
    """
    # A name of an app may have characters that a group's may not.
    spelt = _NOT_IN_NAMES.sub(lambda found: f"%{ord(found[0]):02X}", role)
    group = f"jobs_lib-{installation}.{spelt}"
    check_group(group)
    return group


class CoordinationSource(WatchingSource):
    """Wants the origins that a member of a coordination log holds.

    An origin that the log took from a silent holder may be taken from an owner that
    lives: that one has lost Kafka alone, or its heartbeats there. An origin that nobody
    held, or that its holder released, is taken only when it is free in the database. So
    the first process that shares over a log takes nothing from those that do not.

    While no process reaches Kafka, nobody can claim anything, and all go on.
    """

    def __init__(
        self,
        settings: Settings,
        group: str,
        client_id: str,
        find: Callable[[], Iterable[str]],
        *,
        is_cut_off: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare; nothing connects yet.

        Args:
            settings: where Kafka is, and the log.
            group: see :func:`name_group`.
            client_id: this process's name, the same after a restart.
            find: finds all origins that the group shares; called now and then.
            is_cut_off: whether this process cannot reach the database any more. It
                then leaves all origins to others, and waits for no hand-over.
        """
        super().__init__(f"coordinate {group}")
        self._settings = settings
        self._group = group
        self._client_id = client_id
        self._find = find
        self._is_cut_off = is_cut_off
        self._patience = 2 * settings.handover_timeout
        self._member: Member | None = None
        self._leaving: set[str] = set()
        """Revoked, and perhaps not handed over yet."""
        self._leaves_at_once = False
        self._guard = threading.Lock()

    def stop(self) -> None:
        """Hand everything over, and leave the group."""
        self._loop.stopping.set()
        if (member := self._member) is not None:
            member.ask_to_stop()
        # The ownership still works: it hands over what the member is to leave.
        self._loop.stop(2 * self._patience)
        self.replace(())

    def note_owned(self, owned: frozenset[str]) -> None:
        """Release in the log what was handed over in the database."""
        with self._guard:
            free = self._leaving - owned
            self._leaving -= free
        for origin in free:
            self._release(origin)

    # What the member tells

    def taken(self, shared: Shared, position: int | None) -> None:
        """Want an origin."""
        origin = shared.origin
        with self._guard:
            self._leaving.discard(origin)
        if self._member is not None and self._member.has_ousted(shared):
            self.assign([origin])
        else:
            self.want([origin])

    def leave(self, shared: Shared) -> None:
        """Give an origin up; the ownership tells when it is handed over."""
        origin = shared.origin
        with self._guard:
            self._leaving.add(origin)
        self.revoke([origin])
        if self._leaves_at_once:
            self.note_owned(frozenset())

    def lost(self, shared: Shared) -> None:
        """Give an origin up that another process may have.

        It may be held anew before nothing of it is processed here any more: the epoch
        in the database guards that.
        """
        origin = shared.origin
        with self._guard:
            self._leaving.discard(origin)
        self.revoke([origin])

    def ended(self, error: Exception) -> None:
        """Do nothing: the thread that watches sees it."""

    # The thread that watches

    def _watch(self) -> Iterator[None]:
        while not self._loop.stopping.is_set():
            if not self._is_cut_off():
                yield from self._be_member()
            yield
            self._loop.stopping.wait(_LOOK)

    def _be_member(self) -> Iterator[None]:
        """Share until the process stops or is cut off."""
        settings = self._settings
        self._leaves_at_once = False
        self._member = member = Member(
            settings,
            log=settings.coordination_topic,
            group=self._group,
            client_id=self._client_id,
            parts=lambda: map(split_origin, self._find()),
            listener=self,
            interval=settings.coordination_interval,
            topics_every=settings.coordination_interval,
        )
        # Who stops this source asks the member that it finds: perhaps not yet this one.
        if self._loop.stopping.is_set():
            return
        try:
            member.start()
        except FencedError as error:
            raise name_setting(error) from None
        except JobsError:
            if self._loop.stopping.is_set():
                return
            raise
        try:
            while not self._loop.stopping.is_set() and member.error is None:
                if self._is_cut_off():
                    # The ownership cannot hand anything over.
                    self._leaves_at_once = True
                    self.note_owned(frozenset())
                    break
                yield
                self._loop.stopping.wait(_LOOK)
        finally:
            member.stop(self._patience)
            with self._guard:
                self._leaving.clear()
            self.replace(())
        if member.error is not None:
            raise name_setting(member.error)

    def _release(self, origin: str) -> None:
        if (member := self._member) is not None:
            member.release(Shared(self._group, *split_origin(origin)))
