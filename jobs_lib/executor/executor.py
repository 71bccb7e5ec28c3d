"""The executor: its dispatchers claim and settle jobs, its workers run them."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from jobs_lib.executor.claiming.claimer import Claimer
from jobs_lib.executor.claiming.pace import Pace
from jobs_lib.executor.dispatcher import Dispatcher
from jobs_lib.executor.limiting.gate import JobGate
from jobs_lib.executor.limiting.limiter import Limiter
from jobs_lib.executor.limiting.slots import Slots
from jobs_lib.executor.meter import Meter
from jobs_lib.executor.running.workers import WorkerPool
from jobs_lib.executor.section import divide
from jobs_lib.executor.settling.completer import Completer
from jobs_lib.ownership.lease import UNLIMITED
from jobs_lib.ownership.role import EXECUTE
from jobs_lib.partitioner import split_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from uuid import UUID

    from jobs_lib.executor.lane import ClaimedJob
    from jobs_lib.executor.section import Section
    from jobs_lib.jobs.limit import Workers
    from jobs_lib.jobs.middleware import RunMiddleware
    from jobs_lib.jobs.type import JobType
    from jobs_lib.jobs.waiting import ExplainCircle
    from jobs_lib.kafka.positions import Positions
    from jobs_lib.ownership.lease import Lease
    from jobs_lib.postgres.database import Database
    from jobs_lib.settings import Settings
    from jobs_lib.telemetry.liveness import Pulse

_TOLD = 20
"""How many running jobs are named, the oldest first."""
_DISPATCHERS = 2
"""While one waits for the database, the other reads what it got from it."""


class Executor:
    """Runs the jobs of its origins; the Holder of an app's executors."""

    def __init__(
        self,
        database: Database,
        types: Mapping[str, JobType[Any]],
        owner: UUID,
        installation: UUID,
        settings: Settings,
        middleware: Sequence[RunMiddleware] = (),
        lease: Callable[[], Lease] = lambda: UNLIMITED,
        sees_others: Callable[[], bool] = lambda: True,
        *,
        role: str = EXECUTE,
        foreign: Callable[[], frozenset[str]] = frozenset,
        is_measured: bool = False,
        dependencies: Positions | None = None,
        explain_circle: ExplainCircle | None = None,
    ) -> None:
        """Make it from an app's types.

        Args:
            database: holds the jobs.
            types: the handlers, by the names that their jobs may have.
            owner: the process, as the owner of origins.
            installation: the database's identity.
            settings: the number of workers, and the like.
            middleware: the middleware called around each run, the outermost first.
            lease: returns the process's current lease.
            sees_others: says whether heartbeats of other live processes would be seen.
            role: the role in which the process owns origins.
            foreign: returns the types that other apps know.
            is_measured: whether anybody wants figures of its jobs.
            dependencies: says how far the groups are that types wait for; None to let
                all jobs start.
            explain_circle: knows which jobs would wait for themselves.
        """
        self._pools: dict[Workers | None, WorkerPool] = {}
        self.meters: list[Meter] = []
        """The figures of its jobs; none if nobody wants them."""
        self._sections: list[list[Dispatcher]] = []
        """The dispatchers of each section; they share the origins."""
        sections = divide(types)
        self.gates = _make_gates(
            sections, dependencies, settings.gate_refresh, explain_circle
        )
        """What sections wait for, by their place."""
        number = itertools.count()
        alone = threading.Lock()
        for place, section in enumerate(sections):
            gate = self.gates.get(place)
            workers = self._pools.get(section.workers)
            if workers is None:
                ours = {n: t for n, t in types.items() if t.workers == section.workers}
                workers = self._pools[section.workers] = WorkerPool(
                    database, ours, owner, settings, middleware, self._wake,
                    section.workers, _find_gates(ours, self.gates.values()), role=role,
                    is_timed=is_measured,
                )  # fmt: skip
            limiter = None
            if section.limit:
                stale_after = settings.stale_after
                slots = Slots(section, owner, lease, stale_after, sees_others)
                is_async = types[min(section.types)].is_async
                limiter = Limiter(workers, slots, is_async=is_async)
            dispatchers: list[Dispatcher] = []
            for first in itertools.islice(number, _DISPATCHERS):
                step = len(sections) * _DISPATCHERS
                claimer = Claimer(
                    owner, installation, types, first, step, alone, lease, section,
                    role, foreign, gate,
                )  # fmt: skip
                if limiter is not None:
                    limiter.serve(claimer.finished, claimer.passed)
                meter = Meter() if is_measured else None
                if meter is not None:
                    self.meters.append(meter)
                dispatchers.append(
                    Dispatcher(
                        database,
                        claimer,
                        Completer(owner, types, role),
                        workers,
                        Pace(
                            workers.size // _DISPATCHERS, settings.batch // _DISPATCHERS
                        ),
                        settings.poll_interval,
                        # One dispatcher listens for all.
                        None if first else self._hint,
                        self._receives_hints,
                        meter,
                        limiter,
                        self._share_work if len(sections) > 1 else None,
                        takes_slots=not dispatchers,
                    )
                )
            if gate is not None:
                gate.wakes += [one.wake for one in dispatchers]
            self._sections.append(dispatchers)

    @property
    def ran(self) -> int:
        """How many jobs it has run or begun to run."""
        return sum(workers.ran for workers in self._pools.values())

    @property
    def running(self) -> list[ClaimedJob]:
        """The jobs whose handlers run; any thread may ask."""
        return [job for dispatcher in self._dispatchers for job in dispatcher.running]

    def report(self) -> list[dict[str, Any]]:
        """What jobs wait for besides their turn; any thread may ask.

        There is one item for the types whose workers are all busy: the number of
        workers, and some of the jobs that they run, with their ages in seconds. There
        is another for each type that waits for its limit, and for the types that wait
        for the same groups.
        """
        report: list[dict[str, Any]] = [gate.report() for gate in self.gates.values()]
        now = time.monotonic()
        busy = [one for workers in self._pools.values() for one in workers.find_busy()]
        for types, count, is_awaited in busy:
            running = [job for job in self.running if job.type in types]
            # A job that has waited for long is released, and waits nevertheless.
            if not is_awaited and len(running) < count:
                continue
            running.sort(key=lambda job: job.began)
            jobs = [
                {"id": j.id, "type": j.type, "seconds": round(now - j.began, 3)}
                for j in running[:_TOLD]
            ]
            report.append({"types": types, "workers": count, "jobs": jobs})
        for first, *_ in self._sections:
            section = first.section
            # All dispatchers of a section share its slots.
            if section.limit is not None and first.lacks_slots:
                report.append(
                    {
                        "types": sorted(section.types),
                        "type": section.type_name,
                        "limit": section.limit.most,
                        "parameter": section.limit.parameter,
                    }
                )
        return report

    @property
    def pulses(self) -> list[Pulse]:
        """The signs of life of its threads."""
        pulses = [pulse for workers in self._pools.values() for pulse in workers.pulses]
        return [*pulses, *(one.pulse for one in self._dispatchers)]

    def start(self) -> None:
        """Start the threads; nothing runs until origins are taken.

        After an error none runs any more.
        """
        try:
            for workers in self._pools.values():
                workers.start()
            for dispatcher in self._dispatchers:
                dispatcher.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the threads. Call after the origins have been released."""
        for dispatcher in self._dispatchers:
            dispatcher.stop()
        for workers in self._pools.values():
            workers.stop()

    def take(self, origins: Mapping[str, int]) -> None:
        """Start to claim from origins at these epochs."""
        for dispatcher, share in self._share(origins):
            dispatcher.take({origin: origins[origin] for origin in share})

    def quiesce(self, timeout: float) -> list[int]:
        """Claim nothing more, and wait up to ``timeout`` seconds for running jobs.

        Return the ids of the jobs that still run then: they are released, which counts
        no attempt, and can commit nothing any more.
        """
        deadline = time.monotonic() + timeout
        waits = [dispatcher.quiesce(deadline) for dispatcher in self._dispatchers]
        return [job_id for wait in waits for job_id in wait()]

    def release(self, origins: frozenset[str], timeout: float) -> None:
        """Stop claiming from origins; wait for their running jobs, and settle them."""
        deadline = time.monotonic() + timeout
        waits = [
            dispatcher.release(share, deadline)
            for dispatcher, share in self._share(origins)
        ]
        for wait in waits:
            wait()

    def lose(self, origins: Iterable[str]) -> None:
        """Begin no more jobs of these origins, without waiting."""
        for dispatcher, share in self._share(origins):
            dispatcher.lose(share)

    def hurry(self, jobs: Mapping[int, str]) -> None:
        """Run these before all others: ids, with their origins."""
        for dispatcher, share in self._share(jobs.values()):
            dispatcher.hurry({i: o for i, o in jobs.items() if o in share})

    def _hint(self, origin: str) -> bool:
        """Pass on the first dispatcher's hint; one without an origin is for all.

        Return whether it concerns others: an origin has a dispatcher in each section.
        """
        told = False
        for dispatcher in self._dispatchers[1:]:
            # It may be no origin at all: anybody may send a NOTIFY.
            if not origin or dispatcher.owns(origin):
                dispatcher.hint(origin)
                told = True
        return told

    def _receives_hints(self) -> bool:
        return self._sections[0][0].receives_hints

    def _share(self, origins: Iterable[str]) -> list[tuple[Dispatcher, frozenset[str]]]:
        every = list(origins)
        shares: dict[Dispatcher, set[str]] = {}
        for dispatchers in self._sections:
            for origin in every:
                dispatcher = dispatchers[_place(origin, len(dispatchers))]
                shares.setdefault(dispatcher, set()).add(origin)
        return [(one, frozenset(share)) for one, share in shares.items()]

    def _share_work(
        self,
        sender: Dispatcher,
        groups: Sequence[tuple[str, str, str | None]],
        due: Sequence[tuple[str, int, str | None, str]] | None,
        heard: Callable[[], None] | None,
    ) -> None:
        """Pass on to the other sections what one section found of theirs.

        Args:
            sender: the dispatcher that found it.
            groups: origin, group, and the type with which it goes on; None if it may
                go on behind jobs that another section has in flight.
            due: jobs that may run now: origin, id, group and type; None if nobody
                knows which.
            heard: called by each that has heard of the groups.
        """
        for dispatcher in self._dispatchers:
            if dispatcher.section == sender.section:
                continue
            concerned = [
                (origin, group)
                for origin, group, type_ in groups
                if type_ is None or type_ in dispatcher.section.types
            ]
            if concerned:
                dispatcher.follow(concerned, heard)
            if due is None:
                dispatcher.look_back()
            elif due:
                dispatcher.take_due(due)

    @property
    def _dispatchers(self) -> list[Dispatcher]:
        return [one for dispatchers in self._sections for one in dispatchers]

    def _wake(self) -> None:
        for dispatcher in self._dispatchers:
            dispatcher.wake()


def _make_gates(
    sections: Iterable[Section],
    dependencies: Positions | None,
    refresh: float,
    explain_circle: ExplainCircle | None,
) -> dict[int, JobGate]:
    if dependencies is None:
        return {}
    return {
        place: JobGate(
            section.types, section.after, dependencies, refresh, explain_circle
        )
        for place, section in enumerate(sections)
        if section.after
    }


def _find_gates(types: Iterable[str], gates: Iterable[JobGate]) -> dict[str, JobGate]:
    """Find the gate of each of these types that has one."""
    every = {name: gate for gate in gates for name in gate.types}
    return {name: every[name] for name in types if name in every}


def _place(origin: str, count: int) -> int:
    return split_origin(origin)[1] % count
