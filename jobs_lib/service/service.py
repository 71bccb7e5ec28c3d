"""A running service: starts and stops its consumers, executor and relay.

One process may run all of them (``jobs-lib run``), or the executor runs beside the
service as a sidecar (``jobs-lib executor``) and follows its partitions.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import psycopg

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.errors import AccessError, UnavailableError
from jobs_lib.kafka.client import check_settings
from jobs_lib.kafka.dependencies import REFRESHES
from jobs_lib.kafka.positions import WITHIN, Positions
from jobs_lib.kafka.reach import KafkaWatch
from jobs_lib.naming import check_environment
from jobs_lib.operating.home_topic import declare_topic
from jobs_lib.ownership import Process
from jobs_lib.ownership.apps import find_role, refuse_rivals, refuse_strangers
from jobs_lib.postgres.revisions import check_version
from jobs_lib.reexport.lag import LagWatch
from jobs_lib.service.filling import Filling
from jobs_lib.service.limits import ProcessLimits, tune_memory
from jobs_lib.service.maintenance import Maintenance
from jobs_lib.service.parts import PartMaker, Together
from jobs_lib.service.preparation import (
    PARTS,
    can_reach_kafka,
    check_coordination,
    check_dependencies,
    check_model_tables,
    check_parts,
    check_places,
    choose_origins,
    find_dependencies,
    job_consumers,
    read_installation,
    refuse_shared_groups,
    warn_of_missing_topics,
)
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
from jobs_lib.signals import handle_signals
from jobs_lib.telemetry.liveness import SILENT, Liveness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from uuid import UUID

    from jobs_lib.app import App
    from jobs_lib.consuming.measures import Measures
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.consuming.transactor import Transactor
    from jobs_lib.errors import JobsError
    from jobs_lib.executor import Executor
    from jobs_lib.jobs.job import Job
    from jobs_lib.kafka.dependencies import Dependency
    from jobs_lib.kafka.positions import KnownOffsets
    from jobs_lib.service.metrics import ServiceMetrics
    from jobs_lib.service.parts import Owner, Part
    from jobs_lib.telemetry.liveness import Pulse

T = TypeVar("T")
_TICK = 0.5
_ABANDON_WITHIN = 1.0
"""Seconds in which a process that ends at once may write to the database."""


class _AskedToStop(Exception):
    """Stopping was requested while the parts were still being started."""


class Service:
    """The parts of an app that run in this process.

    Args:
        app: the app to run.
        parts: some of ``consumers``, ``executor`` and ``relay``.
        sidecar: whether the executor follows the consumers of another process of this
            pod instead of those in this one.
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
        """Why the service stopped by itself; None if it did not."""
        self._started: list[Part] = []
        """The parts, in the order of their start; they stop in the reverse order."""
        self._owners: list[Owner] = []
        self._transactors: list[Transactor] = []
        self._executor: Executor | None = None
        self.positions: Positions | None = None
        """What Kafka says of groups and topics; None without consumers."""
        self._dependencies: Positions | None = None
        """How far the groups are that consumers and job types wait for; None if they
        wait for none."""
        self._kafka_watch: KafkaWatch | None = None
        """What says whether Kafka answers; None if no part needs it."""
        self._stopping = threading.Event()
        self._metrics = self._make_metrics()
        settings = self.settings
        longest = max(settings.poll_interval, settings.relay_poll_interval)
        silent = max(SILENT, 4 * settings.database_timeout, 20 * longest)
        self._liveness = Liveness(self._find_pulses, silent)
        self._is_running = False
        """Whether all parts have started, and none has been asked to stop."""
        consumes = "consumers" in self.parts
        self._filling = Filling(
            self.settings,
            self.database,
            app.consumers if consumes else (),
            self._ask_dependency,
        )

    @property
    def is_ready(self) -> bool:
        """Whether all parts run, their servers answer, and new read models are full."""
        return self.find_unready() is None

    def find_unready(self) -> str | None:
        """Find out why it is not ready, as ``/readyz`` says it; None if it is."""
        if not self._is_running:
            return "starting or stopping"
        if self.process.is_unanswered():
            return "PostgreSQL does not answer"
        if self._kafka_watch is not None and self._kafka_watch.is_unanswered():
            return "Kafka does not answer"
        return self._filling.explain()

    def start(self) -> None:
        """Start every part and return.

        It waits for a database, a Kafka or a registry that does not answer. If somebody
        asks to stop meanwhile, it starts nothing more. After an error nothing runs any
        more.

        Raises:
            AccessError: Kafka does not let this service in, or denies it a right.
            SchemaVersionError: the tables do not fit this release.
            TopicError: the home topic cannot be declared.
            ConfigurationError: no part has anything to do, the port of the probes
                is not available, Kafka's client does not know a setting, a topic's
                schema is not registered, a read model's table does not fit, or the
                service of another database reads in one of the groups.
        """
        try:
            if self.settings.probes_port:
                # First: a process that waits for Kafka is alive but not ready.
                self._start_part(self._make_probes())
            if self.settings.kafka_bootstrap_servers:
                # An unknown setting is refused once, and not by each part for ever.
                check_settings(self.settings)
            with contextlib.suppress(_AskedToStop):
                self._start_parts()
        except BaseException:
            self._stop_parts()
            raise

    def _start_parts(self) -> None:
        installation, shards = self._check_surroundings()
        groups: dict[str, list[Subscription]] = {}
        for declared in self.app.consumers if "consumers" in self.parts else []:
            groups.setdefault(declared.group, []).append(declared)
        executes = "executor" in self.parts and bool(self.app.jobs)
        relays = "relay" in self.parts and bool(self.app.topics)
        self._describe_process(groups, executes=executes, relays=relays)
        chosen = self._patiently(
            lambda: choose_origins(self.database, self.settings.origins)
        )
        self._patiently(lambda: self._start_part(self.process))
        if executes:
            self._patiently(partial(self._refuse_others, not chosen))
        if groups:
            self.positions = Positions(self.settings, min(groups))
        self._dependencies = self._make_dependencies(min(groups, default=None))
        maker = PartMaker(
            self.app,
            self.database,
            self.process,
            installation,
            self._fail,
            self._dependencies,
        )
        owners = [maker.make_consumer(*group) for group in groups.items()]
        if "consumers" in self.parts:
            self._transactors = maker.make_transactors()
        if executes:
            members = [owner.member for owner in owners if owner.member is not None]
            executor = maker.make_executor(is_measured=self._metrics is not None)
            self.process.report = executor.report
            self._executor = executor
            owners.append(
                maker.own_jobs(executor, chosen, members, sidecar=self._sidecar)
            )
        if relays:
            owners.append(maker.make_relay(shards))
        needs_kafka = groups or relays or self._transactors or self._sidecar
        if needs_kafka and self.settings.kafka_bootstrap_servers:
            self._kafka_watch = KafkaWatch(self.settings)
        self._owners = owners[::-1]
        ticks = executes and bool(self.app.schedules)
        for part in self._list_parts(ticks=ticks, relays=relays):
            self._start_part(part)
        self._filling.note_ends()
        self._is_running = True
        # A part may have failed for good meanwhile.
        if self.failure is not None:
            self._is_running = False

    def _check_surroundings(self) -> tuple[UUID, int]:
        """Check the database, Kafka and the app; return identity and shards."""
        self._patiently(partial(check_version, self.database))
        installation, shards, environment = self._patiently(
            lambda: read_installation(self.database)
        )
        check_environment(self.settings, environment)
        self.app.names_in_kafka()  # a name of another environment is refused now
        self._patiently(
            partial(check_model_tables, self.database, self.app, self.parts)
        )
        self._patiently(partial(check_places, self.database, self.app, self.parts))
        reaches = can_reach_kafka(self.app, self.parts, sidecar=self._sidecar)
        if reaches:
            shown = self.database, self.app, self.parts, installation
            self._patiently(partial(refuse_shared_groups, *shown))
        self._patiently(partial(check_dependencies, self.app, self.parts))
        self._patiently(partial(check_coordination, self.app, self.parts))
        self._patiently(self.app.load_schemas)
        self._declare_topics()
        check_parts(self.app, self.parts)
        if reaches:
            warn_of_missing_topics(self.app, self.parts)
        return installation, shards

    def _list_parts(self, *, ticks: bool, relays: bool) -> Iterator[Part]:
        """All other parts in the order of their start; they stop in the reverse order.

        At the end, then, the members leave their groups first, and Kafka hands the
        partitions over while the workers still settle.
        """
        consumers = self.app.consumers if "consumers" in self.parts else []
        yield Maintenance(
            self.database,
            self._kept_days(),
            models=[one.model for one in consumers if one.model is not None],
            answer_seconds=self.settings.answer_seconds,
            request_seconds=self.settings.request_seconds,
        )
        if self._metrics is not None:
            yield self._metrics
        if self.positions is not None:
            yield self.positions
        if self._dependencies is not None:
            yield self._dependencies
        if self._kafka_watch is not None:
            yield self._kafka_watch
        # The relay ends last, because the others may still write to the outbox.
        relay = self._owners[:1] if relays else []
        others = self._owners[len(relay) :]
        yield from [owner.worker for owner in relay]
        yield Together(owner.worker for owner in others)
        yield from [owner.ownership for owner in relay]
        yield Together(owner.ownership for owner in others)
        members = [owner.member for owner in self._owners]
        yield Together(member for member in members if member is not None)
        yield Together(self._transactors)
        if relays and self.app.entities:
            yield LagWatch(self.database, self.settings)
        if ticks:
            yield Scheduler(self.database, self.app.schedules.values())

    def _make_dependencies(self, group: str | None) -> Positions | None:
        """What says how far other groups are: it has an interval of its own."""
        if not find_dependencies(self.app, self.parts):
            return None
        return Positions(self.settings, group, interval=self.settings.gate_refresh)

    def _ask_dependency(self, one: Dependency) -> KnownOffsets | None:
        """Ask how far a group is, as the gates do; None if that is not known now."""
        if self._dependencies is None:
            return None
        # Also an old answer says that a group was behind.
        within = max(WITHIN, REFRESHES * self.settings.gate_refresh)
        return self._dependencies.ask_committed(one.group, one.topic, within=within)

    def _describe_process(
        self, groups: Iterable[str], *, executes: bool, relays: bool
    ) -> None:
        """Set the process's roles; its heartbeat publishes them."""
        process, app = self.process, self.app
        roles = [f"consume:{group}" for group in groups]
        if executes:
            process.role = self._patiently(self._find_role)
            process.types = sorted(app.jobs)
            roles.append(process.role)
            if not self.settings.origins:
                # The executor owns their partitions as Kafka assigns them.
                process.topics = sorted({one.topic for one in job_consumers(app)})
        process.roles = sorted([*roles, "relay"] if relays else roles)

    def _start_part(self, part: Part) -> None:
        part.start()
        self._started.append(part)

    def _stop_parts(self) -> None:
        """Stop all; an error is raised once all have been stopped."""
        with contextlib.ExitStack() as stopping:
            stopping.callback(self.app.close_registry)
            for part in self._started:
                stopping.callback(part.stop)
            self._started.clear()

    def stop(self) -> bool:
        """Release all origins, wait for running jobs, and stop.

        Return whether all running jobs have ended. Jobs that have not are released
        without counting an attempt, and can commit nothing any more.
        """
        deadline = time.monotonic() + self.settings.shutdown_timeout
        self._is_running = False
        unfinished = self._quiesce(self.settings.shutdown_timeout)
        if unfinished:
            telemetry.emit("jobs.released", ids=unfinished)
        self._stop_parts()
        if time.monotonic() > deadline:
            telemetry.logger.warning(
                "stopped %.1f s after the shutdown timeout of %g s",
                time.monotonic() - deadline,
                self.settings.shutdown_timeout,
            )
        return not unfinished

    def _quiesce(self, patience: float) -> list[int]:
        """Begin no more jobs, and wait; return the ids of jobs that still run."""
        if self._executor is None:
            return []
        with telling(self._find_running, patience):
            return self._executor.quiesce(patience)

    def ask_to_stop(self) -> None:
        """End :meth:`run` in order, from any thread."""
        self._stopping.set()

    def run(self) -> int:
        """Start, wait for SIGTERM or SIGINT, and stop; return the exit code.

        A process that reaches the settings' limit of memory or jobs stops by itself.

        The code is 0 if all running jobs have ended, and :data:`CUT_OFF` if some had
        not within the shutdown timeout. A second signal or SIGQUIT ends the process at
        once with :data:`CUT_OFF`; running jobs are released without counting an
        attempt. It is :data:`FAILED` if the service failed by itself: see
        :attr:`failure`.
        """

        def stop(number: int) -> None:
            if number == signal.SIGQUIT or self._stopping.is_set():
                try:
                    self.process.abandon(_ABANDON_WITHIN)
                finally:
                    os._exit(CUT_OFF)
            self._stopping.set()

        handle_signals(STOPPING, stop)
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
        """Stop for good: a person has to change something before the next start."""
        self.failure = error
        self._is_running = False  # inside a web server nobody waits for its end
        self._stopping.set()

    def _find_pulses(self) -> list[Pulse]:
        """The threads that must be alive now: none during the start and the stop."""
        if not self._is_running or self._stopping.is_set():
            return []
        pulses = [pulse for one in self._owners for pulse in one.worker.pulses]
        pulses += [one.pulse for one in self._transactors]
        return pulses + [one.member.pulse for one in self._owners if one.member]

    def _make_probes(self) -> Probes:
        # Each process of a pod uses the next port.
        share, _ = read_share() or (1, 1)
        return Probes(
            self.settings.probes_port + share - 1,
            self.find_unready,
            self._liveness.find_silent,
            self._metrics.render if self._metrics is not None else None,
        )

    def _make_metrics(self) -> ServiceMetrics | None:
        """The metrics, if there is a port to ask for them."""
        if not (self.settings.probes_port and self.settings.metrics):
            return None
        try:
            from jobs_lib.service.metrics import ServiceMetrics
        except ImportError:  # the extra is not installed: /metrics says so
            return None
        return ServiceMetrics(
            self.database,
            lambda: self._executor.meters if self._executor else [],
            self._count_owned,
            self._find_measures,
            lambda: self.positions,
            lambda: self._executor.gates.values() if self._executor else (),
        )

    def _find_measures(self) -> list[Measures]:
        return [one.measures for one in self._owners if one.measures is not None]

    def _count_owned(self) -> dict[str, int]:
        owned = [one.ownership for one in self._owners]
        return {one.role: len(one.owned) for one in owned}

    def _count_ran(self) -> int:
        return self._executor.ran if self._executor else 0

    def _find_running(self) -> Sequence[Job]:
        return self._executor.running if self._executor else []

    def _kept_days(self) -> set[int]:
        """For how many days any type, or a command, keeps finished jobs."""
        kept = {job_type.keep for job_type in self.app.jobs.values()}
        return {days for days in kept | {self.settings.history_days} if days}

    def _find_role(self) -> str:
        return find_role(
            self.database, self.app.name, self.app.jobs, self.settings.stale_after
        )

    def _refuse_others(self, shares: bool) -> None:
        """Fail if other executors would take this one's jobs, or keep theirs from it.

        Args:
            shares: whether this one shares origins with them by heartbeats.
        """
        process = self.process
        of = self.database, process, process.role, self.settings.stale_after
        refuse_rivals(*of)
        if shares and not process.topics:
            refuse_strangers(*of)

    def _declare_topics(self) -> None:
        """Record from Kafka, once, how many partitions count for the origins."""
        home = self.app.home
        topics = {one.topic for one in job_consumers(self.app)}
        for topic in sorted(topics | ({home} if home else set())):
            declare = partial(declare_topic, self.app, topic, home=topic == home)
            self._patiently(declare)

    def _patiently(self, act: Callable[[], T]) -> T:
        """Wait for a server that does not answer: it may still be starting."""
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
