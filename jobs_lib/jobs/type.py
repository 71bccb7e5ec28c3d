"""A job type: a decorated function, and how its jobs are enqueued."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from datetime import timedelta
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypedDict,
    overload,
)
from uuid import UUID

from jobs_lib.backoff import Retry
from jobs_lib.callers import is_autocommit, perform
from jobs_lib.errors import ConfigurationError, EnqueueError
from jobs_lib.jobs.context import current_origin, current_place, trace_headers
from jobs_lib.jobs.enqueue import Enqueuer, Entries, Entry
from jobs_lib.jobs.grouping import Grouping, check_parameter
from jobs_lib.jobs.job import Cancel, Discard, Job
from jobs_lib.jobs.limit import check_default
from jobs_lib.jobs.middleware import Draft, EnqueueMiddleware, call_middleware
from jobs_lib.jobs.options import Options, Priority, check_headers

if TYPE_CHECKING:
    from datetime import datetime

    from typing_extensions import Unpack

    from jobs_lib.callers import Steps
    from jobs_lib.callers.caller import AsyncCaller, Caller
    from jobs_lib.jobs.limit import Limit, Workers
    from jobs_lib.jobs.rate import Rate
    from jobs_lib.kafka.dependencies import Dependency

P = ParamSpec("P")
Handler = Callable[Concatenate[Job, P], Awaitable[None] | None]
Rule = Retry | type[Discard] | type[Cancel]
"""The rule for an exception: its own retry policy, or the end of the job."""
GroupOf = str | Callable[..., str | int | UUID | None] | None

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,199}")


def check_name(name: str) -> None:
    """Refuse a name that a job type cannot have.

    Raises:
        ConfigurationError: the name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} is no name for a job type: use letters, digits and _ . : - "
            "only, 200 at most, starting with a letter"
        )


class Given(TypedDict, total=False):
    """The parameters of :meth:`JobType.options`, explained in :class:`Options`."""

    run_at: datetime | None
    origin: str | None
    ordered: bool
    priority: Priority
    unique: str | None
    headers: Mapping[str, str]
    delay: timedelta | float | None


class JobType(Generic[P]):
    """A job type; ``@app.job`` makes it from a function."""

    def __init__(
        self,
        function: Handler[P],
        *,
        name: str,
        group: GroupOf,
        retry: Retry,
        history: Callable[[], timedelta | None],
        rules: Mapping[type[BaseException], Rule],
        enqueuer: Enqueuer,
        names: Mapping[str, object],
        last_only: bool = False,
        debounce: float = 0.0,
        max_wait: float | None = None,
        time_limit: float | None = None,
        priority: Priority = "normal",
        middleware: Sequence[EnqueueMiddleware] = (),
        batch: int = 1,
        rate: Rate | None = None,
        limit: Limit | None = None,
        workers: Workers | None = None,
        schema: Callable[..., Any] | None = None,
        discarded_is_done: bool = False,
        after: Callable[[], tuple[Dependency, ...]] | None = None,
    ) -> None:
        # Imported only if there is a signature to read: it loads pydantic.
        from jobs_lib.jobs.payload import Payload

        check_name(name)
        self.function = function
        self.name = name
        self.retry = retry
        self.payload = Payload(name, schema or function, names)
        self.batch = batch
        """The number of jobs that one call of the handler takes at most."""
        try:
            self.options_ = Options(name, priority=priority)
        except EnqueueError as error:
            raise ConfigurationError(str(error)) from None
        self.is_async = inspect.iscoroutinefunction(function)
        self.rate = rate
        self.limit = limit
        self.workers = workers
        self.time_limit = time_limit
        self.rules = rules
        self.last_only = last_only
        self.debounce = debounce
        self.max_wait = max_wait
        self.discarded_is_done = discarded_is_done
        """Whether a discarded job holds back no `.done` group."""
        self.waits = after is not None
        """Whether its jobs wait until other groups have handled their records."""
        self._find_after = after
        if last_only and group is None:
            raise ConfigurationError(
                f"{name!r} runs only the last job of a group, but has none: give group="
            )
        if (debounce or max_wait is not None) and not last_only:
            raise ConfigurationError(
                f"{name!r} has a debounce or max_wait, which need last_only=True"
            )
        if limit is not None and limit.parameter is not None:
            check_parameter(limit.parameter, self.payload, "limit")
            check_default(limit.parameter, self.payload)
        self._group = None if group is None else Grouping(group, self.payload)
        self._history = history
        self._enqueuer = enqueuer
        self._middleware = middleware
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", name)

    def __call__(
        self, job: Job, /, *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[None] | None:
        """Call the handler directly, without a queue."""
        return self.function(job, *args, **kwargs)

    def find_rule(self, error: BaseException) -> Rule | None:
        """Find the type's rule for an error; the closest class wins."""
        for kind in type(error).__mro__:
            if kind in self.rules:
                return self.rules[kind]
        return None

    @cached_property
    def after(self) -> tuple[Dependency, ...]:
        """The groups that must have handled a job's record, by the names in Kafka."""
        return self._find_after() if self._find_after else ()

    @property
    def keep(self) -> int | None:
        """Days for which the history keeps a finished job; None if it does not."""
        kept = self._history()
        return None if kept is None else math.ceil(kept / timedelta(days=1))

    def options(self, **given: Unpack[Given]) -> JobType[P]:
        """Return the same type with other options for jobs enqueued through it.

        Args:
            **given: ``run_at``, ``delay``, ``origin``, ``ordered``, ``priority``,
                ``unique`` and ``headers``, as in :class:`Options`. Other options stay
                as they are, but a time replaces a delay, and a delay a time.

        Raises:
            EnqueueError: an option cannot be used.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        if given.get("delay") is not None:
            given.setdefault("run_at", None)
        elif given.get("run_at") is not None:
            given.setdefault("delay", None)
        other.options_ = dataclasses.replace(self.options_, **given)
        return other

    @overload
    def enqueue(self, conn: Caller, /, *args: P.args, **kwargs: P.kwargs) -> int: ...

    @overload
    def enqueue(
        self, conn: AsyncCaller, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, int]: ...

    def enqueue(
        self, conn: Caller | AsyncCaller, /, *args: P.args, **kwargs: P.kwargs
    ) -> int | Coroutine[Any, Any, int]:
        """Insert a job in the transaction of ``conn``; returns the job's id.

        With an asynchronous connection, await the id; nothing is inserted before. With
        a unique key it may be the id of a job that already waits or runs.

        Args:
            conn: a psycopg Connection or AsyncConnection; or an SQLAlchemy Connection,
                Session, AsyncConnection or AsyncSession with any PostgreSQL driver; or
                Django's connection; or the app, for a transaction of its own.
            *args: the handler's arguments after ``job``.
            **kwargs: the handler's arguments by name.

        Raises:
            NoTransactionError: the caller's change would not commit with it.
            PayloadError: the arguments do not fit the signature, or cannot be stored.
            PlaceError: the type waits for other groups (``after``), and the job comes
                from no record of theirs.
            TopicError: the origin's topic is not declared.
        """
        values = self.payload.bind(args, kwargs)
        if not self._middleware:
            return perform(conn, self._one(values, self.options_))
        return call_middleware(
            self._middleware,
            self._draft([values]),
            lambda draft: perform(conn, self._one(draft.payloads[0], draft.options())),
        )

    @overload
    def enqueue_many(
        self, conn: Caller, payloads: Iterable[Mapping[str, Any]]
    ) -> int: ...

    @overload
    def enqueue_many(
        self, conn: AsyncCaller, payloads: Iterable[Mapping[str, Any]]
    ) -> Coroutine[Any, Any, int]: ...

    def enqueue_many(
        self, conn: Caller | AsyncCaller, payloads: Iterable[Mapping[str, Any]]
    ) -> int | Coroutine[Any, Any, int]:
        """Insert many jobs at once in the order given; returns how many.

        They are inserted by COPY if psycopg is the driver, else by inserts of many
        rows. All payloads are checked first, so either all are inserted or none. They
        stay in memory until then: enqueue millions in slices.

        Raises:
            NoTransactionError: the caller's change would not commit with it.
            PayloadError: a payload does not fit, or cannot be stored.
            PlaceError: as for :meth:`enqueue`.
            EnqueueError: the options have a unique key, which only one job could have.
        """
        if is_autocommit(conn):
            with conn.transaction() as connection:
                return self.enqueue_many(connection, payloads)
        if not self._middleware:
            return perform(conn, self._many(list(payloads), self.options_))
        return call_middleware(
            self._middleware,
            self._draft([dict(payload) for payload in payloads]),
            lambda draft: perform(conn, self._many(draft.payloads, draft.options())),
        )

    def _draft(self, payloads: list[dict[str, Any]]) -> Draft:
        given = self.options_
        return Draft(
            self.name,
            payloads,
            dict(given.headers),
            given.run_at,
            given.origin,
            given.ordered,
            given.priority,
            given.unique,
            given.delay,
        )

    def _one(self, values: dict[str, Any], options: Options) -> Steps[int]:
        encoded = self.payload.encode(values, self._enqueuer.payload_limit)
        group = None if self._group is None else self._group.choose(values)
        entry = Entry(
            encoded,
            group,
            self._headers(options),
            options,
            current_origin(),
            current_place(),
            self.after if self.waits else (),
        )
        return self._enqueuer.enqueue(entry)

    def _many(
        self, payloads: Sequence[Mapping[str, Any]], options: Options
    ) -> Steps[int]:
        if options.unique is not None:
            raise EnqueueError(
                f"enqueue_many cannot give the jobs of {self.name!r} one unique key: "
                "only one of them could be inserted. Call enqueue for each"
            )
        encoded = self.payload.encode_many(payloads, self._enqueuer.payload_limit)
        groups = None if self._group is None else self._group.choose_many(payloads)
        entries = Entries(
            encoded,
            groups,
            self._headers(options),
            options,
            current_origin(),
            current_place(),
            self.after if self.waits else (),
        )
        return self._enqueuer.enqueue_many(entries)

    def _headers(self, options: Options) -> str | None:
        traced = trace_headers()
        if not traced and not options.headers:
            return None
        headers = {**traced, **options.headers}
        if traced:
            check_headers(self.name, headers)
        return json.dumps(headers, ensure_ascii=False)
