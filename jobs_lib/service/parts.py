"""The parts of a service, made from what its app declares.

A part that owns origins or shards has a worker, the ownership that gives them to it,
and, if Kafka assigns them, a member of a consumer group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

from jobs_lib.consuming.circles import Circles
from jobs_lib.consuming.consumer import Consumer
from jobs_lib.consuming.transactor import Transactor
from jobs_lib.coordination.held_member import HeldMember
from jobs_lib.executor import Executor
from jobs_lib.kafka.member import GroupMember
from jobs_lib.kafka.outside import OutsideCommitter
from jobs_lib.kafka.shared_groups import mark_commits
from jobs_lib.kafka.topic_ids import TopicIds
from jobs_lib.outbox.relay import Relay
from jobs_lib.ownership import DatabaseSource, Ownership
from jobs_lib.ownership.coordinated import CoordinationSource, name_group
from jobs_lib.ownership.filled import FilledOrigins
from jobs_lib.ownership.follow import FollowSource
from jobs_lib.ownership.follow_log import FollowLogSource
from jobs_lib.ownership.member import MemberSource
from jobs_lib.ownership.orphans import OrphanSource
from jobs_lib.ownership.source import CombinedSource, WatchingSource
from jobs_lib.ownership.static import StaticSource
from jobs_lib.service.preparation import (
    ALL_ORIGINS,
    all_origins,
    find_placed,
    job_consumers,
)
from jobs_lib.service.supervisor import read_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from uuid import UUID

    import psycopg

    from jobs_lib.app import App
    from jobs_lib.consuming.measures import Measures
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.errors import JobsError
    from jobs_lib.kafka.positions import Positions
    from jobs_lib.ownership import Holder, Process, Source
    from jobs_lib.ownership.ownership import JobHolder
    from jobs_lib.postgres.database import Database
    from jobs_lib.telemetry.liveness import Pulse


class Part(Protocol):
    """Anything that a service starts and stops."""

    def start(self) -> None:
        """Start it, without waiting."""

    def stop(self) -> object:
        """Stop it, and wait until it has ended."""


class Together:
    """Parts of one kind: they start one after the other, and stop at the same time.

    So a service with many groups leaves them within the time of the slowest one.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = list(parts)
        self._started: list[Part] = []

    def start(self) -> None:
        """Start all; after an error none runs any more."""
        try:
            for part in self._parts:
                part.start()
                self._started.append(part)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all, and wait; the first error is raised once all have ended."""
        errors: list[BaseException] = []

        def stop(part: Part) -> None:
            try:
                part.stop()
            except BaseException as error:
                errors.append(error)

        threads = []
        while self._started:
            part = self._started.pop()
            thread = Thread(target=stop, args=[part], name="jobs_lib stop", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                stop(part)  # The interpreter is at its end, and starts none.
            else:
                threads.append(thread)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class Worker(Part, Protocol):
    """A part that has threads of its own: an executor, a relay, a consumer."""

    @property
    def pulses(self) -> list[Pulse]:
        """The signs of life of its threads."""


@dataclass(frozen=True)
class Owner:
    """A worker, and the source of its origins or shards."""

    worker: Worker
    ownership: Ownership
    member: GroupMember | None = None
    measures: Measures | None = None
    """Of a consumer."""


@dataclass(frozen=True)
class PartMaker:
    """Makes the parts of one process.

    Attributes:
        app: the app to run.
        database: of the service.
        process: this process, as the owner of origins.
        installation: the database's identity.
        fail: stops the service for good, with the reason.
        dependencies: says how far the groups are that consumers and job types wait for;
            None if they wait for none.
    """

    app: App
    database: Database
    process: Process
    installation: UUID
    fail: Callable[[JobsError], None]
    dependencies: Positions | None = None

    def make_consumer(self, group: str, declared: Sequence[Subscription]) -> Owner:
        """Make the consumer of one group."""
        settings = self.app.settings
        member = self._make_member(group, {one.topic for one in declared})
        source = MemberSource([member], settings.handover_timeout)
        tells = next((one for one in declared if one.done), None)
        consumer = Consumer(
            self.database,
            member,
            declared,
            self.process.id,
            block=settings.consumer_block,
            block_seconds=settings.consumer_block_seconds,
            prefetch_bytes=settings.consumer_prefetch_bytes,
            heartbeat=settings.heartbeat_interval,
            topic_ids=TopicIds(settings, member.topics),
            dependencies=self.dependencies,
            refresh=settings.gate_refresh,
            placed=find_placed(self.app),
            committer=None
            if tells is None
            else OutsideCommitter(settings, tells.done_group, self._mark),
        )
        ownership = self._own(f"consume:{group}", source, consumer)
        source.serve(ownership)
        return Owner(consumer, ownership, member, consumer.measures)

    def _make_member(self, group: str, topics: set[str]) -> GroupMember:
        """Make the member that is assigned a share of the topics' partitions."""
        process = self.process
        if not self._coordinates:
            return GroupMember(
                self.app.settings,
                group,
                topics,
                may_join=lambda: not process.is_cut_off(),
                fenced=self.fail,
                mark=self._mark,
            )
        return HeldMember(
            self.app.settings,
            group,
            topics,
            log_group=self._name_group(f"consume:{group}"),
            client_id=self._name_process(),
            may_join=lambda: not process.is_cut_off(),
            fenced=self.fail,
            mark=self._mark,
        )

    def make_transactors(self) -> list[Transactor]:
        """Make what runs the app's functions in transactions of Kafka."""
        largest = max((one.largest for one in self.app.streams.values()), default=0)
        return [
            Transactor(
                self.app.settings,
                one,
                self.installation,
                self._name_process(),
                largest=largest,
            )
            for one in self.app.transactionals
        ]

    def make_executor(self, *, is_measured: bool) -> Executor:
        """Make the executor; :meth:`own_jobs` says where its origins come from."""
        process = self.process
        return Executor(
            self.database,
            self.app.jobs,
            process.id,
            self.installation,
            self.app.settings,
            self.app.middleware,
            lambda: process.lease,
            lambda: process.sees_others,
            role=process.role,
            foreign=lambda: process.foreign,
            is_measured=is_measured,
            dependencies=self.dependencies,
            explain_circle=Circles(self.app.consumers, self.app.jobs).explain,
        )

    def own_jobs(
        self,
        executor: Executor,
        chosen: frozenset[str],
        members: Iterable[GroupMember],
        *,
        sidecar: bool,
    ) -> Owner:
        """Give the executor its origins.

        Args:
            executor: runs the jobs.
            chosen: the origins that the settings name.
            members: of the consumer groups in this process.
            sidecar: whether the consumers run in another process of this pod.
        """
        source, assigned = self._choose_source(chosen, members, sidecar=sidecar)
        ownership = self._own(self.process.role, source, executor, executor)
        if assigned is not None:
            assigned.serve(ownership)
        return Owner(executor, ownership)

    def _choose_source(
        self,
        chosen: frozenset[str],
        members: Iterable[GroupMember],
        *,
        sidecar: bool,
    ) -> tuple[Source, MemberSource | None]:
        """Choose where the executor's origins come from.

        The settings name them; or, without a consumer in the app, the executor gets a
        share of all, by heartbeats or over the coordination log; or it follows the
        consumers to which Kafka assigned them, in another process or in this one. The
        second value is the source that follows this process's members.
        """
        consumers = job_consumers(self.app)
        if self.app.settings.origins:
            is_all = self.app.settings.origins == ALL_ORIGINS
            static = (
                StaticSource(chosen, partial(all_origins, self.database))
                if is_all
                else StaticSource(chosen)
            )
            if share := read_share():
                static.share(*share)
            return static, None
        if not consumers:
            return self._share_jobs(), None
        if sidecar:
            return self._with_orphans(self._follow(consumers), consumers), None
        named = {one.group for one in consumers}
        assigned = MemberSource(
            [member for member in members if member.group in named],
            self.app.settings.handover_timeout,
        )
        return self._with_orphans(assigned, consumers), assigned

    def make_relay(self, shards: int) -> Owner:
        """Make the relay, with its share of the outbox's shards."""
        relay = Relay(
            self.database,
            self.app.settings,
            self.process.id,
            self.installation,
            entities=self.app.entities,
            topics={topic.name: topic for topic in self.app.topics.values()},
            source=self.app.name,
            refused=self.fail,
        )
        every = [f"shard/{n}" for n in range(shards)]
        source: Source
        if self._coordinates:
            source = self._coordinate("relay", lambda: every)
        else:
            source = self._share("relay", lambda _: every, is_cut_off=relay.is_cut_off)
        return Owner(relay, self._own("relay", source, relay))

    def _share_jobs(self) -> Source:
        """The process's share of all origins, which no consumer has."""
        filled = FilledOrigins(self.database)
        lasting = partial(all_origins, self.database)
        role = self.process.role
        if not self._coordinates:
            return self._share(role, lasting, filled.find)

        def find() -> list[str]:
            with self.database.connect("origins", impatient=True) as connection:
                return lasting(connection)

        def find_passing(connection: psycopg.Connection[Any]) -> set[str]:
            return {*filled.find(connection)} - {*lasting(connection)}

        # The log would never forget origins that come and go with their jobs.
        passing = self._share(role, lambda _: (), find_passing)
        return CombinedSource(self._coordinate(role, find), passing)

    @property
    def _coordinates(self) -> bool:
        return self.app.settings.ownership == "coordination"

    def _coordinate(
        self, role: str, find: Callable[[], Iterable[str]]
    ) -> CoordinationSource:
        """Share origins over the coordination log."""
        source = CoordinationSource(
            self.app.settings,
            self._name_group(role),
            self._name_process(),
            find,
            is_cut_off=self.process.is_cut_off,
        )
        source.refused = self.fail
        return source

    def _name_group(self, role: str) -> str:
        return name_group(self.installation, role)

    @property
    def _mark(self) -> str:
        return mark_commits(self.installation)

    def _name_process(self) -> str:
        """A name of this process's own, which is the same after a restart."""
        share, count = read_share() or (1, 1)
        pod = self.app.settings.pod
        return pod if count == 1 else f"{pod}-{share}"

    def _follow(self, consumers: Iterable[Subscription]) -> WatchingSource:
        """This process's share of the origins that are assigned to its pod."""
        topics: dict[str, frozenset[str]] = {}
        for one in consumers:
            topics[one.group] = topics.get(one.group, frozenset()) | {one.topic}
        source: WatchingSource
        if self._coordinates:
            groups = [self._name_group(f"consume:{group}") for group in topics]
            source = FollowLogSource(self.app.settings, groups)
        else:
            source = FollowSource(self.app.settings, topics)
        source.refused = self.fail
        if share := read_share():
            source.share(*share)
        return source

    def _with_orphans(
        self, source: Source, consumers: Iterable[Subscription]
    ) -> CombinedSource:
        """The source's origins, and a share of those that no consumer has."""
        consumed = {one.topic for one in consumers}
        orphans = OrphanSource(self.database, self.process, self.app.settings, consumed)
        return CombinedSource(source, orphans)

    def _own(
        self, role: str, source: Source, holder: Holder, jobs: JobHolder | None = None
    ) -> Ownership:
        settings = self.app.settings
        return Ownership(
            self.database,
            self.process,
            role,
            source,
            holder,
            interval=settings.heartbeat_interval,
            stale_after=settings.stale_after,
            handover_timeout=settings.handover_timeout,
            jobs=jobs,
        )

    def _share(
        self,
        role: str,
        *origins: Callable[[psycopg.Connection[Any]], Iterable[str]],
        is_cut_off: Callable[[], bool] = lambda: False,
    ) -> DatabaseSource:
        """Share permanent origins, and those that come and go, in this order."""
        settings = self.app.settings
        return DatabaseSource(
            self.database,
            self.process,
            role,
            *origins,
            interval=settings.heartbeat_interval,
            stale_after=settings.stale_after,
            is_cut_off=is_cut_off,
        )
