"""Declare job types, their schedules, and the functions called around them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from jobs_lib.declaring.arguments import (
    check_aliases,
    check_flags,
    check_history,
    check_rate,
    check_seconds,
    choose_name,
    make_limit,
    make_retry,
    make_rules,
    make_workers,
)
from jobs_lib.declaring.functions import (
    check_function,
    check_job,
    check_takes,
    refuse_misplaced,
    refuse_unfit,
)
from jobs_lib.declaring.names import check_pairs
from jobs_lib.errors import ConfigurationError
from jobs_lib.jobs.batch import find_item_type, make_schema
from jobs_lib.jobs.schedule import Schedule
from jobs_lib.jobs.type import JobType
from jobs_lib.kafka.dependencies import Dependency
from jobs_lib.naming import name_in_kafka

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Never

    from jobs_lib.backoff import Retry
    from jobs_lib.jobs.batch import Item
    from jobs_lib.jobs.enqueue import Enqueuer
    from jobs_lib.jobs.limit import Workers
    from jobs_lib.jobs.middleware import EnqueueMiddleware, RunMiddleware
    from jobs_lib.jobs.options import Priority
    from jobs_lib.jobs.rate import Rate
    from jobs_lib.jobs.schedule import Missed
    from jobs_lib.jobs.type import GroupOf, Handler, Rule
    from jobs_lib.naming import Exact
    from jobs_lib.settings import Settings

P = ParamSpec("P")
A = TypeVar("A", bound="RunMiddleware")
T = TypeVar("T")
_YEAR = 366 * 86_400.0


class JobDeclarations:
    """The part of an app that declares jobs.

    Args:
        name: the app's.
        enqueuer: enqueues the declared types' jobs.
        settings: reads the settings, at the first use.
    """

    def __init__(
        self, name: str, enqueuer: Enqueuer, settings: Callable[[], Settings]
    ) -> None:
        self.name = name
        self.jobs: dict[str, JobType[Any]] = {}
        """The types by each name that their jobs may have, aliases included."""
        self.schedules: dict[str, Schedule] = {}
        self.middleware: list[RunMiddleware] = []
        self._enqueuer = enqueuer
        self._read_settings = settings
        self._enqueue_middleware: list[EnqueueMiddleware] = []

    def job(
        self,
        *misplaced: Never,
        name: str | None = None,
        aliases: Sequence[str] = (),
        group: GroupOf = None,
        priority: Priority = "normal",
        retry: Retry | int | None = None,
        history: bool | timedelta = True,
        rules: Mapping[type[BaseException], Rule | int] | None = None,
        time_limit: float | None = None,
        rate: Rate | None = None,
        limit: int | tuple[int, str] | None = None,
        workers: int | Workers | None = None,
        last_only: bool = False,
        debounce: float = 0.0,
        max_wait: float | None = None,
        discarded_is_done: bool = False,
        after: Sequence[tuple[str | Exact, str | Exact]] = (),
    ) -> Callable[[Handler[P]], JobType[P]]:
        """Declare a function as the handler of a job type.

        The function's first parameter is the :class:`Job`; the others, all annotated,
        are its payload's schema.

        Args:
            *misplaced: none: ``@app.job`` needs its parentheses, and names.
            name: the type's name in the table. Defaults to the function's name.
            aliases: earlier names of the type; the handler also runs jobs that were
                enqueued under one of them.
            group: which jobs run one after the other, in the order of enqueue: the
                name of a parameter, or a function of all parameters. A str is the group
                itself; an int or UUID stands for its text. Defaults to none: every job
                is independent.
            priority: ``high`` before ``normal`` before ``batch``, within an origin;
                a call may choose another. Defaults to ``normal``.
            retry: when a failed job runs again: a policy, or after how many attempts it
                is discarded. Defaults to ``exponential()``.
            rules: what certain exceptions mean: a policy of their own, or ``Discard``
                or ``Cancel``. The class closest to the exception's counts.
            time_limit: seconds that an attempt may take. An async handler is cancelled
                then; a plain one goes on, but can commit nothing any more.
            rate: how many may start in how many seconds, over all pods; the others wait
                as scheduled jobs, and no attempt is counted. Defaults to no limit.
            limit: how many run at once, over all pods; or a tuple of a number and a
                parameter: then this number runs at once for each value of the
                parameter. The others wait, and delay no other type. Defaults to no
                limit.
            workers: how many run at once in a process, on workers of their own; other
                types do not use these. To share them, give several types the same
                :class:`Workers`. Defaults to the workers of all types.
            last_only: whether only the newest of this type's waiting jobs in a group
                runs, even if jobs of other types wait there.
            debounce: seconds without a new job in the group before the newest one runs.
            max_wait: seconds after which one runs even if new jobs keep coming.
            discarded_is_done: whether a discarded job counts as done for the group
                ``<group>.done`` of a consumer with ``done=True``. Defaults to no.
            after: pairs of a topic and a consumer group: a job starts only when the
                groups that read its record's topic have handled that record. No
                attempt is counted, and its group waits behind it. Defaults to none.
            history: how long finished jobs can be looked up, in whole days; False for
                not at all. Defaults to the setting ``history_days``.

        Raises:
            ConfigurationError: the name is taken, the function is no handler, its
                signature no schema, or an argument cannot be used.
        """
        refuse_misplaced(misplaced, "app.job")
        frame = sys._getframe(1)
        names = {**frame.f_globals, **frame.f_locals}

        def declare(function: Handler[P]) -> JobType[P]:
            type_name = choose_name(name, function, "app.job")
            what = f"the handler of {type_name!r}"
            check_function(function, what)
            check_job(function, names, what)
            check_seconds(time_limit, "time_limit", type_name, most=86_400)
            check_seconds(debounce, "debounce", type_name, most=_YEAR, zero=True)
            check_seconds(max_wait, "max_wait", type_name, most=_YEAR)
            check_rate(rate, type_name)
            check_flags(what, last_only=last_only)
            pairs = check_pairs(after, what)
            return self._declare(
                function,
                name=type_name,
                aliases=aliases,
                group=group,
                retry=retry,
                history=history,
                last_only=last_only,
                debounce=debounce,
                max_wait=max_wait,
                discarded_is_done=discarded_is_done,
                time_limit=time_limit,
                rate=rate,
                limit=make_limit(limit, type_name),
                workers=make_workers(workers, type_name),
                rules=rules,
                names=names,
                priority=priority,
                after=partial(self._name_dependencies, pairs) if pairs else None,
            )

        return declare

    def batch(
        self,
        *misplaced: Never,
        size: int = 100,
        name: str | None = None,
        aliases: Sequence[str] = (),
        group: GroupOf = None,
        priority: Priority = "normal",
        retry: Retry | int | None = None,
        history: bool | timedelta = True,
        rules: Mapping[type[BaseException], Rule | int] | None = None,
        workers: int | Workers | None = None,
        discarded_is_done: bool = False,
        **unfit: Never,
    ) -> Callable[[Callable[[list[Item[T]]], None]], JobType[[T]]]:
        """Declare a function that handles several jobs of a type in one call.

        Its argument is a list of :class:`Item`, each a job and its payload; ``T`` is
        the payload's schema. :meth:`Item.fail` fails one item. If the handler raises,
        each job is handled again in a call of its own, so that only the faulty ones
        fail.

        Args:
            *misplaced: none: ``@app.batch`` needs its parentheses, and names.
            size: the most jobs that one call takes.
            name: as for :meth:`job`, and so the others.
            aliases: see there.
            group: the order within a group is kept.
            priority: see there.
            retry: see there.
            history: see there.
            rules: see there.
            workers: how many calls run at once in a process; see there.
            discarded_is_done: see there.
            **unfit: none: what else :meth:`job` takes counts for single jobs.

        Raises:
            ConfigurationError: the name is taken, or the signature is a different one,
                or an argument is one of single jobs.
        """
        refuse_misplaced(misplaced, "app.batch")
        refuse_unfit(unfit)
        frame = sys._getframe(1)
        names = {**frame.f_globals, **frame.f_locals}
        if not isinstance(size, int) or not 2 <= size <= 10_000:
            raise ConfigurationError(
                f"a batch has 2 to 10,000 jobs, not {size!r}: for one use @app.job"
            )

        def declare(function: Callable[[list[Item[T]]], None]) -> JobType[[T]]:
            type_name = choose_name(name, function, "app.batch")
            check_function(function, f"the handler of {type_name!r}")
            return self._declare(
                cast("Any", function),
                name=type_name,
                aliases=aliases,
                group=group,
                retry=retry,
                history=history,
                rules=rules,
                names=names,
                priority=priority,
                batch=size,
                workers=make_workers(workers, type_name),
                discarded_is_done=discarded_is_done,
                schema=make_schema(find_item_type(function, type_name, names)),
            )

        return declare

    def _declare(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        aliases: Sequence[str],
        retry: Retry | int | None,
        history: bool | timedelta,
        rules: Mapping[type[BaseException], Rule | int] | None,
        **others: Any,
    ) -> JobType[Any]:
        names_of_jobs = [name, *check_aliases(aliases, name)]
        for one in names_of_jobs:
            if one in self.jobs or names_of_jobs.count(one) > 1:
                raise ConfigurationError(f"the job type {one!r} is declared twice")
        check_history(history, name)
        self._check_workers(others["workers"], name)
        if not isinstance(others["discarded_is_done"], bool):
            raise ConfigurationError(
                f"discarded_is_done of {name!r} is True or False, not "
                f"{others['discarded_is_done']!r}"
            )
        job_type: JobType[Any] = JobType(
            function,
            name=name,
            retry=make_retry(retry, name),
            history=lambda: self._choose_history(history),
            rules=make_rules(rules, name),
            enqueuer=self._enqueuer,
            middleware=self._enqueue_middleware,
            **others,
        )
        self.jobs |= dict.fromkeys(names_of_jobs, job_type)
        return job_type

    def _name_dependencies(
        self, pairs: Iterable[tuple[str | Exact, str | Exact]]
    ) -> tuple[Dependency, ...]:
        """Name in Kafka the groups that a type waits for."""
        settings = self._read_settings()
        return tuple(
            Dependency(*(name_in_kafka(settings, name) for name in pair))
            for pair in pairs
        )

    def _check_workers(self, workers: Workers | None, name: str) -> None:
        """Refuse two different counts for workers of one name."""
        for other in self.jobs.values():
            theirs = other.workers
            if workers and theirs and workers.name == theirs.name and workers != theirs:
                raise ConfigurationError(
                    f"the workers {workers.name!r} are {workers.count} for {name!r}, "
                    f"and {theirs.count} for {other.name!r}: give both the same"
                )

    def _choose_history(self, given: bool | timedelta) -> timedelta | None:
        if isinstance(given, timedelta):
            return given
        days = self._read_settings().history_days
        return timedelta(days=days) if given and days else None

    def enqueue_middleware(self, function: EnqueueMiddleware) -> EnqueueMiddleware:
        """Declare middleware around every enqueue; the first one declared is outermost.

        It gets a :class:`Draft` of the job to enqueue and ``call_next``, and returns
        ``call_next(draft)``.

        Raises:
            ConfigurationError: it cannot be called with these arguments.
        """
        check_takes(function, ("draft", "call_next"), "middleware around enqueue")
        self._enqueue_middleware.append(function)
        return function

    def run_middleware(self, function: A) -> A:
        """Declare a function that is called around each run of a handler.

        It gets the :class:`Job` and a function that calls the handler; the first one
        declared is outermost. An async function is called around async handlers, a
        plain one around plain handlers, and around a call of a batch handler once for
        each of its jobs, one call inside the other.

        Raises:
            ConfigurationError: it cannot be called with these arguments.
        """
        what = "middleware around runs"
        check_function(function, what)
        check_takes(function, ("job", "call_next"), what)
        self.middleware.append(function)
        return function

    def periodic(
        self,
        cron: str,
        *,
        tz: str = "UTC",
        missed: Missed = "one",
        name: str | None = None,
        payload: Mapping[str, Any] | None = None,
    ) -> Callable[[JobType[P]], JobType[P]]:
        """Enqueue a job type at each tick of a schedule, once over all pods.

        Put it above ``@app.job``, several times if needed. A handler with a parameter
        ``tick: datetime`` gets the tick's time in the schedule's zone. A new schedule
        starts from now, and so does one whose expression or zone has changed.

        Args:
            cron: minute, hour, day of month, month and day of week, as Debian's cron
                reads them; with six fields the first is the second.
            tz: the IANA time zone in which the expression is read.
            missed: the jobs for ticks at which no pod ran: ``one`` enqueues one job,
                for the newest tick; ``skip`` none, except for a tick of the last
                minute; ``all`` one for each tick, at most the newest 1,000.
            name: of the schedule. Defaults to the job type's.
            payload: the handler's other arguments.

        Raises:
            ConfigurationError: the name is taken, or an argument cannot be used.
        """

        def declare(job_type: JobType[P]) -> JobType[P]:
            if not isinstance(job_type, JobType):
                raise ConfigurationError(
                    f"{job_type!r} is no job type: put @app.periodic above @app.job"
                )
            if job_type.waits:
                raise ConfigurationError(
                    f"jobs of {job_type.name!r} wait until other groups have handled "
                    "their record, and a tick is none: leave `after` out, or enqueue "
                    "them while a record is handled"
                )
            declared = self.jobs.get(job_type.name)
            if declared is None or declared.function is not job_type.function:
                raise ConfigurationError(
                    f"the job type {job_type.name!r} is not one of the app "
                    f"{self.name!r}, so nobody would run its jobs"
                )
            if payload is not None and not isinstance(payload, Mapping):
                raise ConfigurationError(
                    f"the payload of the schedule of {job_type.name!r} is {payload!r}: "
                    "give the handler's arguments by their names, as in {'region': 1}"
                )
            schedule = Schedule(
                job_type,
                cron,
                name=job_type.name if name is None else name,
                tz=tz,
                missed=missed,
                payload=payload or {},
            )
            if schedule.name in self.schedules:
                raise ConfigurationError(
                    f"the schedule {schedule.name!r} is declared twice: give one of "
                    "them a name of its own, as in name='nightly'"
                )
            self.schedules[schedule.name] = schedule
            return job_type

        return declare
