"""A running service: its consumers, executor and relay, put together and taken apart.

One process may hold all of them (``jobs-lib run``), or the executor runs beside the
service as a sidecar (``jobs-lib executor``) and follows its partitions.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psycopg

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.consuming.consumer import Consumer
from jobs_lib.errors import AccessError, ConfigurationError, UnavailableError
from jobs_lib.executor import Executor
from jobs_lib.kafka.access import Needs, check_access
from jobs_lib.kafka.client import check_settings, list_partitions
from jobs_lib.kafka.member import GroupMember
from jobs_lib.kafka.refusal import MISSING, missing_topics
from jobs_lib.naming import check_environment
from jobs_lib.operating.home_topic import declare_topic
from jobs_lib.outbox.relay import Relay
from jobs_lib.ownership import DatabaseSource, Ownership, Process
from jobs_lib.ownership.apps import find_role, refuse_rivals, refuse_strangers
from jobs_lib.ownership.filled import FilledOrigins
from jobs_lib.ownership.follow import FollowSource
from jobs_lib.ownership.member import MemberSource
from jobs_lib.ownership.orphans import OrphanSource
from jobs_lib.ownership.source import CombinedSource
from jobs_lib.ownership.static import StaticSource
from jobs_lib.postgres.migrate import latest_version
from jobs_lib.service.limits import ProcessLimits, tune_memory
from jobs_lib.service.maintenance import Maintenance
from jobs_lib.service.parts import PARTS, check_parts
from jobs_lib.service.probes import Probes
from jobs_lib.service.scheduler import Scheduler
from jobs_lib.service.stopping import telling
from jobs_lib.service.supervisor import (
    CUT_OFF,
    FAILED,
    STOPPING,
    read_share,
    stop_with_parent,
)
from jobs_lib.telemetry.liveness import SILENT, Liveness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from jobs_lib.app import App
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.errors import JobsError
    from jobs_lib.jobs.job import Job
    from jobs_lib.ownership import Holder, Source
    from jobs_lib.service.metrics import ServiceMetrics
    from jobs_lib.telemetry.liveness import Pulse

T = TypeVar("T")
_TICK = 0.5
_ABANDON_WITHIN = 1.0
"""Seconds for the last word to the database of a process that ends at once."""


class _AskedToStop(Exception):
    """Somebody asks to stop while the parts are still to be started."""


class Service:
    """The parts of an app that run in this process.

    Args:
        app: what to run.
        parts: some of ``consumers``, ``executor`` and ``relay``.
        sidecar: the executor follows the consumers of another process of this pod,
            instead of those in this one.
    """

    def __init__(
        self, app: App, parts: Iterable[str] = PARTS, *, sidecar: bool = False
    ) -> None:
        self.app = app
        self.settings = app.settings
        self.parts = frozenset(parts)
        self._sidecar = sidecar
        self.database = app.database()
        self.process = Process(
            self.database,
            self.settings.pod,
            (),
            self.settings.heartbeat_interval,
            give_up_after=self.settings.give_up_after,
            stale_after=self.settings.stale_after,
        )
        self.failure: JobsError | None = None
        """Why it has stopped by itself; None if it has not."""
        self._ownerships: list[Ownership] = []
        self._workers: list[Executor | Relay | Consumer] = []
        self._members: list[GroupMember] = []
        self._scheduler: Scheduler | None = None
        self._maintenance = Maintenance(self.database, self._kept_days())
        self._stopping = threading.Event()
        self._probes: Probes | None = None
        self._metrics = self._make_metrics()
        settings = self.settings
        longest = max(settings.poll_interval, settings.relay_poll_interval)
        silent = max(SILENT, 4 * settings.database_timeout, 20 * longest)
        self._liveness = Liveness(self._find_pulses, silent)
        self.is_ready = False
        """Whether all parts have started, and none is asked to stop."""
        self._has_begun = False
        """Whether there is more to stop than the probes."""

    def start(self) -> None:
        """Start every part and return.

        A database, a Kafka or a registry that does not answer is waited for, until
        somebody asks to stop: then nothing more is started.

        Raises:
            AccessError: Kafka does not let this service in, or denies it a right.
            SchemaVersionError: the tables do not fit this release.
            TopicError: the home topic cannot be declared.
            ConfigurationError: no part has anything to do, the port of the probes
                cannot be had, Kafka's client does not know a setting, or a topic's
                schema is not registered.
        """
        if self.settings.probes_port:
            # First: whoever waits for Kafka lives, and is not ready.
            silent = self._liveness.find_silent
            render = self._metrics.render if self._metrics is not None else None
            self._probes = Probes(
                self._probes_port(), lambda: self.is_ready, silent, render
            )
            self._probes.start()
        if self.settings.kafka_bootstrap_servers:
            # A setting that nobody knows is told now, and not by each part for ever.
            check_settings(self.settings)
        with contextlib.suppress(_AskedToStop):
            self._start()

    def _start(self) -> None:
        self._patiently(lambda: self.database.check_version(latest_version()))
        installation, shards, environment = self._patiently(self._read_installation)
        check_environment(self.settings, environment)
        self.app.names_in_kafka()  # a name of another environment is refused now
        has_kafka = bool(self.settings.kafka_bootstrap_servers) and self._check_access()
        self._patiently(self.app.load_schemas)
        self._declare_topics()
        check_parts(self.app, self.parts)
        if has_kafka:
            self._tell_missing()
        consumers = self.app.consumers if "consumers" in self.parts else []
        executes = "executor" in self.parts and bool(self.app.jobs)
        relays = "relay" in self.parts and bool(self.app.topics)
        groups: dict[str, list[Subscription]] = {}
        for declared in consumers:
            groups.setdefault(declared.group, []).append(declared)
        if executes:
            self.process.role = self._patiently(self._find_role)
        self.process.roles = sorted(
            [f"consume:{group}" for group in groups]
            + [self.process.role] * executes
            + ["relay"] * relays
        )
        self.process.types = sorted(self.app.jobs) if executes else []
        self.process.topics = self._followed_topics() if executes else []
        chosen = self._patiently(self._choose_origins)
        self._patiently(self.process.start)
        if executes:
            self._patiently(partial(self._refuse_others, not chosen))
        self._has_begun = True
        self._maintenance.start()
        if self._metrics is not None:
            self._metrics.start()
        for group, of_group in groups.items():
            self._add_consumer(group, of_group)
        if executes:
            self._add_executor(installation, chosen)
        if relays:
            self._add_relay(installation, shards)
        for worker in self._workers:
            worker.start()
        for ownership in self._ownerships:
            ownership.start()
        for member in self._members:
            member.start()
        if executes and self.app.schedules:
            self._scheduler = Scheduler(self.database, self.app.schedules.values())
            self._scheduler.start()
        self.is_ready = True

    def stop(self) -> bool:
        """Give everything back, wait for what is running, and stop.

        Returns whether all running jobs have ended; those that have not are released
        without a burnt attempt, and can commit nothing any more.
        """
        deadline = time.monotonic() + self.settings.shutdown_timeout
        self.is_ready = False
        patience = self.settings.shutdown_timeout
        with telling(self._find_running, patience):
            unfinished = [
                job_id
                for executor in self._executors
                for job_id in executor.quiesce(patience)
            ]
        if unfinished:
            telemetry.emit("jobs.released", ids=unfinished)
        if self._scheduler is not None:
            self._scheduler.stop()
        for member in self._members:
            # Leaving the group hands the partitions over, one after the other.
            member.stop()
        for ownership in self._ownerships:
            ownership.stop()
        for worker in self._workers:
            worker.stop()
        if self._has_begun:
            self._maintenance.stop()
            if self._metrics is not None:
                self._metrics.stop()
            self.process.stop()
        self.app.close_registry()
        if self._probes is not None:
            self._probes.stop()
        if time.monotonic() > deadline:
            telemetry.logger.warning(
                "stopped %.1f s after the shutdown timeout of %g s",
                time.monotonic() - deadline,
                self.settings.shutdown_timeout,
            )
        return not unfinished

    def ask_to_stop(self) -> None:
        """End :meth:`run` in order, from any thread."""
        self._stopping.set()

    def run(self) -> int:
        """Start, wait for SIGTERM or SIGINT, and stop; returns the exit code.

        A process that has used up what the settings allow stops by itself.

        0 when all running jobs have ended, :data:`CUT_OFF` when some had not within the
        shutdown timeout. A second signal ends the process at once, with that code, and
        so does SIGQUIT; what ran is released without a burnt attempt. :data:`FAILED`
        when it has stopped by itself: see :attr:`failure`.
        """

        def stop(number: int, _: object) -> None:
            if number == signal.SIGQUIT or self._stopping.is_set():
                self.process.abandon(_ABANDON_WITHIN)
                os._exit(CUT_OFF)
            self._stopping.set()

        for number in STOPPING:
            signal.signal(number, stop)
        if read_share():
            stop_with_parent(self.ask_to_stop)
        self.start()
        tune_memory()
        wear = ProcessLimits(self.settings, self._count_ran)
        while not self._stopping.wait(_TICK) and not wear.is_over():
            pass
        ended = self.stop()
        if self.failure is not None:
            telemetry.logger.error("stopped: %s", self.failure)
            return FAILED
        return 0 if ended else CUT_OFF

    def _fail(self, error: JobsError) -> None:
        """Stop for good: whoever started it has something to change."""
        self.is_ready = False  # inside a web server nobody waits for its end
        self.failure = error
        self._stopping.set()

    def _find_pulses(self) -> list[Pulse]:
        """Of the threads that should live now: of none while it starts or stops."""
        if not self.is_ready or self._stopping.is_set():
            return []
        pulses = [pulse for worker in self._workers for pulse in worker.pulses]
        return pulses + [member.pulse for member in self._members]

    def _probes_port(self) -> int:
        """Of several processes of one pod each has the next port."""
        share, _ = read_share() or (1, 1)
        return self.settings.probes_port + share - 1

    def _make_metrics(self) -> ServiceMetrics | None:
        """The metrics, if somebody can ask for them."""
        if not (self.settings.probes_port and self.settings.metrics):
            return None
        try:
            from jobs_lib.service.metrics import ServiceMetrics
        except ImportError:  # the extra is not installed: /metrics says so
            return None
        return ServiceMetrics(
            self.database,
            lambda: [meter for one in self._executors for meter in one.meters],
            lambda: {one.role: len(one.owned) for one in self._ownerships},
        )

    @property
    def _executors(self) -> list[Executor]:
        return [one for one in self._workers if isinstance(one, Executor)]

    def _count_ran(self) -> int:
        return sum(executor.ran for executor in self._executors)

    def _find_running(self) -> list[Job]:
        return [job for executor in self._executors for job in executor.running]

    def _kept_days(self) -> set[int]:
        """For how many days finished jobs are kept, by any type or by command."""
        kept = {job_type.keep for job_type in self.app.jobs.values()}
        return {days for days in kept | {self.settings.history_days} if days}

    def _find_role(self) -> str:
        return find_role(
            self.database, self.app.name, self.app.jobs, self.settings.stale_after
        )

    def _refuse_others(self, shares: bool) -> None:
        """Refuse executors that would take this one's jobs, or keep theirs from it.

        Args:
            shares: whether this one shares origins with them by heartbeats.
        """
        process = self.process
        of = self.database, process, process.role, self.settings.stale_after
        try:
            refuse_rivals(*of)
            if shares and not process.topics:
                refuse_strangers(*of)
        except ConfigurationError:
            process.stop()
            raise

    def _read_installation(self) -> tuple[UUID, int, str]:
        with self.database.connect("start") as connection:
            row = connection.execute(
                self.database.queries["read_installation"]
            ).fetchone()
        return cast("tuple[UUID, int, str]", row)

    def _check_access(self) -> bool:
        """Refuse now what Kafka would refuse again and again; whether it answers."""
        consumers = self.app.consumers if "consumers" in self.parts else []
        followed = self.app.consumers if self._sidecar else []
        needs = Needs(
            reads={one.topic for one in consumers},
            joins={one.group for one in consumers},
            writes={t.name for t in self.app.topics.values()}
            if "relay" in self.parts
            else set(),
            follows={one.group for one in followed if not one.is_read_model},
        )
        try:
            check_access(self.settings, needs)
        except AccessError:
            raise
        except UnavailableError as error:
            telemetry.emit("loop.failed", loop="start", error=error)
            return False
        return True

    def _tell_missing(self) -> None:
        """Name what is missing in one line; each part finds it out by itself later."""
        consumers = self.app.consumers if "consumers" in self.parts else []
        written = self.app.topics.values() if "relay" in self.parts else []
        topics = {one.topic for one in consumers} | {topic.name for topic in written}
        # What happens to it from now on each part tells.
        with contextlib.suppress(UnavailableError):
            found = list_partitions(self.settings, topics)
            if missing := sorted(name for name in topics if not found[name]):
                telemetry.warn(MISSING, str(missing_topics(self.settings, missing)))

    def _declare_topics(self) -> None:
        """Record how many partitions count for the origins, once, from Kafka."""
        homes = {self.app.home} - {None}
        topics = homes | {one.topic for one in self._handled}
        for topic in sorted(cast("set[str]", topics)):
            is_home = topic == self.app.home
            self._patiently(partial(declare_topic, self.app, topic, home=is_home))

    def _patiently(self, act: Callable[[], T]) -> T:
        """Wait for a server that does not answer: it may be starting, too."""
        failures = 0
        while not self._stopping.is_set():
            try:
                return act()
            except AccessError:
                raise
            except (UnavailableError, psycopg.OperationalError) as error:
                failures += 1
                telemetry.emit("loop.failed", loop="start", error=error)
                self._stopping.wait(RECONNECT.delay(failures))
                self.process.doubt()
        raise _AskedToStop

    def _add_consumer(self, group: str, declared: list[Subscription]) -> None:
        member = GroupMember(
            self.settings,
            group,
            {one.topic for one in declared},
            may_join=lambda: not self.process.is_cut_off(),
            fenced=self._fail,
        )
        source = MemberSource([member], self.settings.handover_timeout)
        consumer = Consumer(
            self.database,
            member,
            declared,
            self.process.id,
            block=self.settings.consumer_block,
        )
        source.serve(self._own(f"consume:{group}", source, consumer))
        self._members.append(member)

    def _add_executor(self, installation: UUID, chosen: frozenset[str]) -> None:
        executor = Executor(
            self.database,
            self.app.jobs,
            self.process.id,
            installation,
            self.settings,
            self.app.around,
            lambda: self.process.lease,
            lambda: self.process.sees_others,
            role=self.process.role,
            foreign=lambda: self.process.foreign,
            is_measured=self._metrics is not None,
        )
        self.process.report = executor.report
        role = self.process.role
        handled = self._handled
        if self.settings.origins:
            self._own(role, StaticSource(chosen), executor)
        elif not handled:
            filled = FilledOrigins(self.database)
            shared = self._shared(role, self._all_origins, filled.find)
            self._own(role, shared, executor)
        elif self._sidecar:
            groups: dict[str, frozenset[str]] = {}
            for one in handled:
                groups[one.group] = groups.get(one.group, frozenset()) | {one.topic}
            followed = FollowSource(self.settings, groups)
            followed.refused = self._fail
            if share := read_share():
                followed.share(*share)
            self._own(role, self._with_orphans(followed, handled), executor)
        else:
            named = {one.group for one in handled}
            members = [m for m in self._members if m.group in named]
            source = MemberSource(members, self.settings.handover_timeout)
            combined = self._with_orphans(source, handled)
            source.serve(self._own(role, combined, executor))

    def _with_orphans(
        self, source: Source, handled: list[Subscription]
    ) -> CombinedSource:
        """What the source wants, and a share of what nobody is assigned."""
        consumed = {one.topic for one in handled}
        orphans = OrphanSource(self.database, self.process, self.settings, consumed)
        return CombinedSource(source, orphans)

    def _add_relay(self, installation: UUID, shards: int) -> None:
        relay = Relay(
            self.database,
            self.settings,
            self.process.id,
            installation,
            entities=self.app.entities,
            topics={topic.name: topic for topic in self.app.topics.values()},
            source=self.app.name,
            refused=self._fail,
        )
        every = [f"shard/{n}" for n in range(shards)]
        source = self._shared("relay", lambda _: every, is_cut_off=relay.is_cut_off)
        self._own("relay", source, relay)

    def _own(
        self, role: str, source: Source, holder: Executor | Relay | Consumer
    ) -> Ownership:
        ownership = Ownership(
            self.database,
            self.process,
            role,
            source,
            cast("Holder", holder),
            interval=self.settings.heartbeat_interval,
            stale_after=self.settings.stale_after,
            handover_timeout=self.settings.handover_timeout,
            jobs=holder if isinstance(holder, Executor) else None,
        )
        self._ownerships.append(ownership)
        self._workers.append(holder)
        return ownership

    def _shared(
        self,
        role: str,
        *origins: Callable[[psycopg.Connection[Any]], Iterable[str]],
        is_cut_off: Callable[[], bool] = lambda: False,
    ) -> DatabaseSource:
        """Shares origins that last, and others that come and go, in this order."""
        return DatabaseSource(
            self.database,
            self.process,
            role,
            *origins,
            interval=self.settings.heartbeat_interval,
            stale_after=self.settings.stale_after,
            is_cut_off=is_cut_off,
        )

    @property
    def _handled(self) -> list[Subscription]:
        """The consumers whose partitions are origins of jobs."""
        return [one for one in self.app.consumers if not one.is_read_model]

    def _followed_topics(self) -> list[str]:
        """Those whose partitions the executor has as Kafka assigns them."""
        if self.settings.origins:
            return []
        return sorted({one.topic for one in self._handled})

    def _choose_origins(self) -> frozenset[str]:
        """Those that the settings name."""
        if not self.settings.origins:
            return frozenset()
        with self.database.connect("start") as connection:
            every = frozenset(self._all_origins(connection))
        if self.settings.origins == "all":
            return every
        chosen = frozenset(o.strip() for o in self.settings.origins.split(","))
        if unknown := sorted(chosen - every):
            raise ConfigurationError(
                f"JOBS_LIB_ORIGINS names {', '.join(unknown)}, and no declared topic "
                "has such a partition: see `jobs-lib topics`"
            )
        return chosen

    def _all_origins(self, connection: psycopg.Connection[Any]) -> list[str]:
        rows = connection.execute(self.database.queries["read_topics"]).fetchall()
        return [f"{topic}/{n}" for topic, count, _ in rows for n in range(count)]
