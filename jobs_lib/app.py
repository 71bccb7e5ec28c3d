"""An application: everything that its decorators declare, and nothing that connects."""

from __future__ import annotations

import importlib
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from typing_extensions import TypeVar

from jobs_lib.backoff import Retry
from jobs_lib.consuming.declared import Declared, read_model_applier
from jobs_lib.db import Database, load_queries
from jobs_lib.errors import ConfigurationError
from jobs_lib.jobs.batch import find_item_type, make_schema
from jobs_lib.jobs.enqueue import Enqueuer
from jobs_lib.jobs.type import JobType
from jobs_lib.outbox.entity import Entity
from jobs_lib.outbox.topic import Topic
from jobs_lib.reexport import CHUNK_TYPE, chunk_handler
from jobs_lib.schedule import Schedule
from jobs_lib.settings import Settings, default_settings, require_database_url
from jobs_lib.transaction import Pools

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import psycopg
    from typing_extensions import TypeForm

    from jobs_lib.consuming.declared import RecordHandler, RowOf
    from jobs_lib.db import Queries
    from jobs_lib.jobs.around import AroundEnqueue
    from jobs_lib.jobs.batch import Item
    from jobs_lib.jobs.options import Priority
    from jobs_lib.jobs.rate import Rate
    from jobs_lib.jobs.run import Around
    from jobs_lib.jobs.type import GroupOf, Handler, Rule
    from jobs_lib.outbox.entity import Loader
    from jobs_lib.schedule import Missed
    from jobs_lib.transaction import Transaction

P = ParamSpec("P")
V = TypeVar("V", default=Any)
A = TypeVar("A", bound="Around")
T = TypeVar("T")


class App:
    """The jobs, schedules, topics, consumers and entities of one service.

    Args:
        name: the service, as it appears in headers and logs.
        home: the topic whose partitions are the origins of this service's groups: the
            one whose records it handles. Defaults to none: the origins are shared by
            heartbeat, without Kafka.
        settings: defaults to the environment's, read at the first use.
    """

    def __init__(
        self, name: str, *, home: str | None = None, settings: Settings | None = None
    ) -> None:
        self.name = name
        self.home = home
        self.jobs: dict[str, JobType[Any]] = {}
        self.schedules: dict[str, Schedule] = {}
        self.topics: dict[str, Topic[Any]] = {}
        self.consumers: list[Declared] = []
        self.entities: dict[str, Entity] = {}
        self.around: list[Around] = []
        self._settings = settings
        self._enqueuer = Enqueuer(self._queries, lambda: self.settings)
        self._around_enqueue: list[AroundEnqueue] = []
        self._pools = Pools(lambda: self.settings)

    @property
    def settings(self) -> Settings:
        """What was given, or the environment's."""
        return self._settings or default_settings()

    def database(self) -> Database:
        """The service's database; connects when it is first used.

        Raises:
            ConfigurationError: no URL is set.
        """
        return Database(
            require_database_url(self.settings),
            self.settings.schema_name,
            direct_url=self.settings.direct_url,
            pgbouncer=self.settings.pgbouncer,
            timeout=self.settings.database_timeout,
        )

    def transaction(self) -> Transaction:
        """A transaction for what has nothing else to commit.

        ``with app.transaction() as conn`` gives a psycopg connection of a pool, and
        ``async with`` an asynchronous one. The end of the block commits, an error in it
        rolls back.

        Raises:
            UnavailableError: on entering, when no connection is had within 30 s.
        """
        return self._pools.transaction()

    def alone(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """A connection in autocommit mode.

        An app can be given wherever a connection is: what is enqueued or sent by it is
        a transaction of its own, and takes one round trip.

        Raises:
            UnavailableError: on entering, when no connection is had within 30 s.
        """
        return self._pools.alone()

    def close(self) -> None:
        """Close the connections that :meth:`transaction` has kept open."""
        self._pools.close()

    async def aclose(self) -> None:
        """As :meth:`close`, for those of the running event loop."""
        await self._pools.aclose()

    def around_enqueue(self, hook: AroundEnqueue) -> AroundEnqueue:
        """Declare a hook around every enqueue; the first one declared is outermost.

        It is called with a :class:`Draft` of what is to be enqueued and ``call_next``,
        and returns ``call_next(draft)``.
        """
        self._around_enqueue.append(hook)
        return hook

    def job(
        self,
        *,
        name: str | None = None,
        group: GroupOf = None,
        priority: Priority = "normal",
        retry: Retry | None = None,
        history: bool | timedelta = True,
        rules: Mapping[type[BaseException], Rule] | None = None,
        time_limit: float | None = None,
        rate: Rate | None = None,
        last_only: bool = False,
        debounce: float = 0.0,
        max_wait: float | None = None,
    ) -> Callable[[Handler[P]], JobType[P]]:
        """Declare a function as the handler of a job type.

        The function's first parameter is the :class:`Job`; the others, all annotated,
        are its payload's schema.

        Args:
            name: the type's name in the table. Defaults to the function's name.
            group: the jobs that run one after the other, in the order of enqueue: the
                name of a parameter, or a function of all of them that returns a string.
                Defaults to none: every job is independent.
            priority: ``high`` before ``normal`` before ``batch``, within an origin;
                a call may choose another. Defaults to ``normal``.
            retry: when a failed job runs again. Defaults to ``exponential()``.
            rules: what certain exceptions mean: a policy of their own, or ``Discard``
                or ``Cancel``. The class closest to the exception's counts.
            time_limit: seconds that an attempt may take. An async handler is cancelled
                then; a plain one goes on, but can commit nothing any more.
            rate: how many may start in how many seconds, over all pods; the others wait
                as scheduled jobs, and no attempt is counted. Defaults to no limit.
            last_only: of the jobs of a group that wait, only the newest runs.
            debounce: seconds of quiet in its group before the newest one runs.
            max_wait: seconds after which one runs even without such a quiet.
            history: how long finished jobs can be looked up, in whole days; False for
                not at all. Defaults to the setting ``history_days``.

        Raises:
            ConfigurationError: the name is taken, or the signature is no schema.
        """
        frame = sys._getframe(1)
        names = {**frame.f_globals, **frame.f_locals}

        def declare(function: Handler[P]) -> JobType[P]:
            type_name = name or str(getattr(function, "__name__", ""))
            if type_name in self.jobs:
                raise ConfigurationError(
                    f"the job type {type_name!r} is declared twice"
                )
            job_type: JobType[P] = JobType(
                function,
                name=type_name,
                group=group,
                retry=retry or Retry(),
                history=lambda: self._choose_history(history),
                last_only=last_only,
                debounce=debounce,
                max_wait=max_wait,
                time_limit=time_limit,
                rate=rate,
                rules=rules or {},
                enqueuer=self._enqueuer,
                names=names,
                priority=priority,
                around=self._around_enqueue,
            )
            self.jobs[type_name] = job_type
            return job_type

        return declare

    def batch(
        self,
        *,
        size: int = 100,
        name: str | None = None,
        group: GroupOf = None,
        priority: Priority = "normal",
        retry: Retry | None = None,
        history: bool | timedelta = True,
        rules: Mapping[type[BaseException], Rule] | None = None,
    ) -> Callable[[Callable[[list[Item[T]]], None]], JobType[[T]]]:
        """Declare a function that handles several jobs of a type in one call.

        It is called with a list of :class:`Item`, each a job and its payload; ``T`` is
        the payload's schema. :meth:`Item.fail` fails one of them. When the handler
        raises, each of them is handled in a call of its own, so that only those fail
        that cannot be handled.

        Args:
            size: jobs that one call takes at the most.
            name: as for :meth:`job`, and so the others.
            group: the order within a group is kept.
            priority: see there.
            retry: see there.
            history: see there.
            rules: see there.

        Raises:
            ConfigurationError: the name is taken, or the signature is another one.
        """
        frame = sys._getframe(1)
        names = {**frame.f_globals, **frame.f_locals}
        if not 2 <= size <= 10_000:
            raise ConfigurationError(
                f"a batch has 2 to 10,000 jobs, not {size}: for one use @app.job"
            )

        def declare(function: Callable[[list[Item[T]]], None]) -> JobType[[T]]:
            type_name = name or str(getattr(function, "__name__", ""))
            if type_name in self.jobs:
                raise ConfigurationError(
                    f"the job type {type_name!r} is declared twice"
                )
            job_type: JobType[[T]] = JobType(
                cast("Any", function),
                name=type_name,
                group=group,
                retry=retry or Retry(),
                history=lambda: self._choose_history(history),
                last_only=False,
                debounce=0.0,
                max_wait=None,
                time_limit=None,
                rules=rules or {},
                enqueuer=self._enqueuer,
                names=names,
                priority=priority,
                around=self._around_enqueue,
                batch=size,
                schema=make_schema(find_item_type(function, type_name, names)),
            )
            self.jobs[type_name] = job_type
            return job_type

        return declare

    def around_run(self, function: A) -> A:
        """Declare a function that is called around each run of a handler.

        It is called with the :class:`Job` and a function that goes on; the first
        declared is the outermost. An async function is called around async handlers, a
        plain one around plain handlers.
        """
        self.around.append(function)
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

        Stands above ``@app.job``, several times if need be. A handler with a parameter
        ``tick: datetime`` is told the tick's time in the schedule's zone. A new
        schedule starts from now, and so does one whose expression or zone has changed.

        Args:
            cron: minute, hour, day of month, month and day of week, as Debian's cron
                reads them; with six fields the first is the second.
            tz: the IANA time zone in which the expression is read.
            missed: what is enqueued for ticks at which no pod was there: ``one`` job,
                for the newest tick; ``skip`` for none but one of the last minute;
                ``all`` of them, the newest 1,000 at the most.
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
            declared = self.jobs.get(job_type.name)
            if declared is None or declared.function is not job_type.function:
                raise ConfigurationError(
                    f"the job type {job_type.name!r} is not one of the app "
                    f"{self.name!r}, so nobody would run its jobs"
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

    def topic(
        self,
        name: str,
        *,
        value: TypeForm[V] = Any,
        compacted: bool = False,
        partitions: int | None = None,
    ) -> Topic[V]:
        """Declare a topic that this service writes to, through the outbox.

        Args:
            name: the topic's name in Kafka.
            value: the type of the values: a dataclass, a pydantic model, ``bytes``, …
                Type checkers hold ``send`` to it. Defaults to whatever has a JSON form.
            compacted: whether only the last record of each key is kept.
            partitions: how many it is created with where it does not exist. Defaults
                to 100, so that work can be spread for years; to 3 for a compacted one,
                which carries state.

        Raises:
            ConfigurationError: the topic is declared already.
        """
        if name in self.topics:
            raise ConfigurationError(f"the topic {name!r} is declared twice")
        topic = Topic(
            name,
            value=value,
            compacted=compacted,
            partitions=partitions or (3 if compacted else 100),
            queries=self._queries,
        )
        self.topics[name] = topic
        return topic

    def consumer(
        self,
        topic: str,
        *,
        group: str,
        type: str | None = None,
        value: TypeForm[V] = Any,
    ) -> Callable[[RecordHandler[V]], RecordHandler[V]]:
        """Declare a function that handles the records of a topic.

        It is called with a :class:`Record` of that value and the connection whose
        transaction also stores the offset: both are committed, or neither.

        Args:
            topic: the topic to read.
            group: the consumer group.
            type: handle only records whose header ``ce_type`` is this; several
                functions may share a topic and group that way.
            value: the type of the records' values. Defaults to whatever the JSON holds.
        """

        def declare(function: RecordHandler[V]) -> RecordHandler[V]:
            self._declare_consumer(topic, group).add_handler(function, type, value)
            return function

        return declare

    def read_model(
        self,
        topic: str,
        *,
        table: str,
        key: str,
        group: str,
        value: TypeForm[V] = Any,
    ) -> Callable[[RowOf[V]], RowOf[V]]:
        """Declare a function that maps the records of a state topic to rows of a table.

        The function gets a :class:`Record` and returns the row's columns as a mapping,
        or None to remove the row; it is not called for a tombstone. Row and offset are
        written in one transaction. A row is only replaced by a newer version.

        Args:
            topic: the compacted topic to read.
            table: ``table`` or ``schema.table``, with a column ``version bigint``.
            key: the column that takes the record's key.
            group: the consumer group.
            value: the type of the records' values. Defaults to whatever the JSON holds.
        """

        def declare(function: RowOf[V]) -> RowOf[V]:
            declared = self._declare_consumer(topic, group)
            declared.set_applier(read_model_applier(function, table, key, value))
            return function

        return declare

    def entity(
        self, topic: Topic[V], *, source: str, key: str, name: str | None = None
    ) -> Callable[[Loader[V]], Loader[V]]:
        """Declare how the current states of an entity are read, for re-exports.

        The function gets a connection and a list of keys and returns the states by key,
        of the topic's type; what it leaves out is gone and becomes a tombstone.

        Args:
            topic: where the states go.
            source: the service's own table, ``table`` or ``schema.table``.
            key: the column whose text form is the record's key.
            name: what commands call it. Defaults to ``source``.
        """

        def declare(function: Loader[V]) -> Loader[V]:
            entity = Entity(name or source, topic.name, source, key, function)
            if entity.name in self.entities:
                raise ConfigurationError(
                    f"the entity {entity.name!r} is declared twice"
                )
            self.entities[entity.name] = entity
            if CHUNK_TYPE not in self.jobs:
                handler = chunk_handler(lambda: load_queries(self.settings.schema_name))
                self.job(name=CHUNK_TYPE)(handler)
            return function

        return declare

    def _choose_history(self, given: bool | timedelta) -> timedelta | None:
        if isinstance(given, timedelta):
            return given
        days = self.settings.history_days
        return timedelta(days=days) if given and days else None

    def _queries(self) -> Queries:
        return load_queries(self.settings.schema_name)

    def _declare_consumer(self, topic: str, group: str) -> Declared:
        for declared in self.consumers:
            if (declared.topic, declared.group) == (topic, group):
                return declared
        declared = Declared(topic, group)
        self.consumers.append(declared)
        return declared


def load_app(path: str) -> App:
    """The app at ``module:attribute``, looked up from the working folder too.

    Raises:
        ConfigurationError: there is no such module or attribute, or it is no App.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(
            f"{path!r} names no app: write module:attribute, as in service:app"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the module of {path!r} cannot be imported: {error}. Is it on the path, "
            "or in the working folder?"
        ) from None
    app = getattr(module, attribute, None)
    if not isinstance(app, App):
        raise ConfigurationError(
            f"{path!r} is {'missing' if app is None else 'no App'}: name the App of "
            f"{module_name}"
        )
    return app
