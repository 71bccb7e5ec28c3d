"""Share a consumer's partitions over a coordination log instead of by Kafka's group.

The poll thread, its commands and its listeners are those of a group's member. Only how
partitions come and go differs: they are assigned by hand as the log says.
"""

from __future__ import annotations

from collections import deque
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition

from jobs_lib.coordination.member import Member
from jobs_lib.coordination.messages import Shared
from jobs_lib.coordination.names import name_setting
from jobs_lib.errors import FencedError, JobsError
from jobs_lib.kafka.client import make_consumer
from jobs_lib.kafka.member import GroupMember, Partition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from confluent_kafka import Consumer

    from jobs_lib.settings import Settings

_LEAVE_SECONDS = 5.0
"""For the log to say that all is released."""


class HeldMember(GroupMember):
    """A consumer's member that reads what it holds in the coordination log.

    It joins no group of Kafka, and commits the group's offsets there all the same: lag
    tools and gates read them.
    """

    def __init__(
        self,
        settings: Settings,
        group: str,
        topics: Iterable[str],
        *,
        log_group: str,
        client_id: str,
        may_join: Callable[[], bool] = lambda: True,
        fenced: Callable[[FencedError], None] = lambda error: None,
        mark: str = "",
    ) -> None:
        """Prepare to share.

        Args:
            settings: where the brokers are, and the log.
            group: the consumer group, whose offsets are committed.
            topics: all topics that are shared.
            log_group: the group's name in the log.
            client_id: this process's name, the same after a restart.
            may_join: see :class:`jobs_lib.kafka.member.GroupMember`.
            fenced: called when another process has this client's name. The member
                then ends for good.
            mark: the metadata of all offsets that it commits.
        """
        super().__init__(
            settings, group, topics, may_join=may_join, fenced=fenced, mark=mark
        )
        self._assigns_one = True
        self._log_group = log_group
        self._client_id = client_id
        self._holder: Member | None = None
        self._leaving: deque[Partition] = deque()
        """What the last commands hand over together."""
        self._is_ending = False

    def stop(self, timeout: float | None = None) -> None:
        """Hand all partitions over, and end; wait for so many seconds at most."""
        self._stopping.set()
        if (holder := self._holder) is not None:
            holder.ask_to_stop()
        super().stop(timeout)

    def may_oust(self, partition: Partition) -> bool:
        """Whether a partition was taken from a holder that had become stale."""
        holder = self._holder
        return holder is not None and holder.has_ousted(self._share(partition))

    # What the log says: called by the thread of the holder's notices

    def taken(self, shared: Shared, position: int | None) -> None:
        """Assign a partition soon. Where to begin, the database says."""
        place = TopicPartition(shared.topic, shared.partition)

        def assign(consumer: Consumer) -> bool:
            self._on_assign(consumer, [place])
            return True

        self._command(assign)

    def leave(self, shared: Shared) -> None:
        """Hand a partition over soon."""
        partition = (shared.topic, shared.partition)
        self._leaving.append(partition)
        self._commands.append(partial(self._leave, self._leaving))
        # Looked at last: the poll thread, when it ends, may have read the list already.
        if self._is_ending and partition not in self._assigned:
            self._release(partition)

    def lost(self, shared: Shared) -> None:
        """Give a partition up soon that another process may have.

        It may be held anew before nothing of it is processed here any more: the poll
        thread takes it behind this, and the epoch in the database guards the rest.
        """
        place = TopicPartition(shared.topic, shared.partition)

        def lose(consumer: Consumer) -> bool:
            if (shared.topic, shared.partition) in self._assigned:
                self._on_lost(consumer, [place])
            return True

        self._command(lose)

    def ended(self, error: Exception) -> None:
        """Do nothing: the poll thread sees it."""

    def _command(self, command: Callable[[Consumer], bool]) -> None:
        # What is to be left later is handed over later: it may be the same partition.
        self._leaving = deque()
        self._commands.append(command)

    # The poll thread

    def _be_member(self) -> Iterator[None]:
        """Poll what the log gives, until this member should leave."""
        settings = self._settings
        self._is_ending = False
        # First: what is held then has somebody who reads it.
        consumer = make_consumer(
            settings, self.group, self._report_sometimes, self._on_commit, joins=False
        )
        with closing(consumer):
            holder = Member(
                settings,
                log=settings.coordination_topic,
                group=self._log_group,
                client_id=self._client_id,
                topics=self.topics,
                listener=self,
                interval=settings.coordination_interval,
                awaits_topics=True,
            )
            if not self._begin_to_hold(holder):
                return
            try:
                while self._goes_on(holder):
                    self._poll_once(consumer)
                    yield
                # Without the database no hand-over is possible: do not wait for one.
                self._leaves_at_once = not self._stopping.is_set()
            finally:
                self._end(holder, consumer)
        if holder.error is not None:
            raise name_setting(holder.error)

    def _begin_to_hold(self, holder: Member) -> bool:
        """Start a member of the log; return False if this one was stopped meanwhile."""
        self._holder = holder
        # Who stops this member asks the holder that it finds: perhaps not yet this one.
        if self._stopping.is_set():
            return False
        try:
            with self.pulse.elsewhere():
                holder.start()
        except FencedError as error:
            raise name_setting(error) from None
        except JobsError:
            if self._stopping.is_set():
                return False
            raise
        return True

    def _goes_on(self, holder: Member) -> bool:
        return not self._stopping.is_set() and holder.error is None and self._may_join()

    def _end(self, holder: Member, consumer: Consumer) -> None:
        """Hand everything over, then leave the log."""
        self._is_ending = True
        holder.ask_to_stop()
        try:
            self._hand_over(holder, consumer)
        finally:
            self._leaves_at_once = False
            self._leaving = deque()
            self._commands.clear()
            self._commits.clear()
            self._forget(self._assigned)

    def _hand_over(self, holder: Member, consumer: Consumer) -> None:
        held = list(self._assigned)
        try:
            if held:
                self._on_revoke(consumer, [TopicPartition(*one) for one in held])
        finally:
            # Also if the client fails: the next holder would take one that lives on for
            # another process of this name, and end for good.
            for shared in holder.list_held():
                holder.release(shared)
            with self.pulse.elsewhere():
                holder.stop(_LEAVE_SECONDS)

    def _leave(self, together: deque[Partition], consumer: Consumer) -> bool:
        """Hand all partitions over at once that should be left together."""
        leaving = [together.popleft() for _ in range(len(together))]
        held = [TopicPartition(*one) for one in leaving if one in self._assigned]
        if held:
            self._on_revoke(consumer, held)
        for one in leaving:
            self._release(one)
        return True

    def _release(self, partition: Partition) -> None:
        if (holder := self._holder) is not None:
            holder.release(self._share(partition))

    def _share(self, partition: Partition) -> Shared:
        return Shared(self._log_group, *partition)
