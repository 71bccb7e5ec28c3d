"""A job type: a decorated function, and how its jobs are enqueued."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec

from jobs_lib.backoff import Retry
from jobs_lib.errors import ConfigurationError, PayloadError
from jobs_lib.jobs.enqueue import Enqueuer, Entry, check_group, check_run_at
from jobs_lib.jobs.model import Cancel, Discard, Job
from jobs_lib.jobs.payload import Payload

if TYPE_CHECKING:
    from datetime import datetime

    from jobs_lib.db import Caller

P = ParamSpec("P")
Handler = Callable[Concatenate[Job, P], Awaitable[None] | None]
Rule = Retry | type[Discard] | type[Cancel]
"""What an exception means: a policy of its own, or the end of the job."""
GroupOf = str | Callable[..., str | None] | None

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,199}")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How one call enqueues."""

    run_at: datetime | None = None
    """When the job may run at the earliest, with a time zone. Defaults to now."""
    origin: str | None = None
    """The origin ``topic/partition``. Defaults to the group's, or the record's."""
    ordered: bool = True
    """Take the group's lock until the transaction ends, so that the group runs in the
    order of commit. Without it nobody waits, and neighbours may swap."""


class JobType(Generic[P]):
    """What ``@app.job`` makes of a function."""

    def __init__(
        self,
        function: Handler[P],
        *,
        name: str,
        group: GroupOf,
        retry: Retry,
        history: Callable[[], timedelta | None],
        last_only: bool,
        debounce: float,
        max_wait: float | None,
        time_limit: float | None,
        rules: Mapping[type[BaseException], Rule],
        enqueuer: Enqueuer,
        payload_limit: Callable[[], int],
        names: Mapping[str, object],
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"{name!r} is no name for a job type: letters, digits and _ . : - "
                "only, 200 at the most, starting with a letter"
            )
        self.function = function
        self.name = name
        self.retry = retry
        self.payload = Payload(name, function, names)
        self.options_ = Options()
        self.is_async = inspect.iscoroutinefunction(function)
        self.time_limit = time_limit
        self.rules = rules
        if time_limit is not None and not 0 < time_limit <= 86_400:
            raise ConfigurationError(
                f"the time limit of {name!r} must be above 0 and at most 86,400 "
                f"seconds, not {time_limit}"
            )
        self.last_only = last_only
        self.debounce = debounce
        self.max_wait = max_wait
        if last_only and group is None:
            raise ConfigurationError(
                f"{name!r} runs only the last job of a group, but has none: give group="
            )
        if (debounce or max_wait is not None) and not last_only:
            raise ConfigurationError(
                f"{name!r} has a debounce or max_wait, which need last_only=True"
            )
        self._group = group
        self._history = history
        self._enqueuer = enqueuer
        self._payload_limit = payload_limit
        if isinstance(group, str) and group not in self.payload.signature.parameters:
            raise ConfigurationError(
                f"the group of {name!r} is said to be its parameter {group!r}, but the "
                f"handler takes {self.payload.signature}"
            )
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", name)

    def __call__(
        self, job: Job, *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[None] | None:
        """Call the handler itself, here and now."""
        return self.function(job, *args, **kwargs)

    def find_rule(self, error: BaseException) -> Rule | None:
        """What the type says of such an error; the closest class wins."""
        for kind in type(error).__mro__:
            if kind in self.rules:
                return self.rules[kind]
        return None

    @property
    def keep(self) -> int | None:
        """Days that a finished job stays in the history; None: it never goes in."""
        kept = self._history()
        return None if kept is None else math.ceil(kept / timedelta(days=1))

    def options(
        self,
        *,
        run_at: datetime | None = None,
        origin: str | None = None,
        ordered: bool = True,
    ) -> JobType[P]:
        """The same type with other options for what is enqueued through it.

        Raises:
            EnqueueError: ``run_at`` has no time zone.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.options_ = Options(check_run_at(self.name, run_at), origin, ordered)
        return other

    def enqueue(self, conn: Caller, *args: P.args, **kwargs: P.kwargs) -> int:
        """Insert a job in the transaction of ``conn``; returns the job's id.

        Args:
            conn: a psycopg Connection, or an SQLAlchemy Connection or Session that uses
                the psycopg driver.
            *args: the handler's arguments after ``job``.
            **kwargs: the same by name.

        Raises:
            NoTransactionError: the caller's change would not commit with it.
            PayloadError: the arguments do not fit the signature, or cannot be stored.
            TopicError: the origin names a topic that nobody declared.
        """
        entry = self._entry(self.payload.bind(args, kwargs))
        return self._enqueuer.enqueue(conn, entry, ordered=self.options_.ordered)

    def enqueue_many(self, conn: Caller, payloads: Iterable[Mapping[str, Any]]) -> int:
        """Insert many jobs at once, by COPY, in the order given; returns how many.

        All payloads are checked first, so either all are inserted or none. Each is held
        in memory until then: enqueue millions in slices.

        Raises:
            NoTransactionError: the caller's change would not commit with it.
            PayloadError: one of the payloads does not fit, or cannot be stored.
        """
        entries = [self._entry(dict(payload)) for payload in payloads]
        return self._enqueuer.enqueue_many(conn, entries, ordered=self.options_.ordered)

    def _entry(self, values: dict[str, Any]) -> Entry:
        encoded = self.payload.encode(values, self._payload_limit())
        return Entry(
            self.name,
            encoded,
            check_group(self.name, self._choose_group(values)),
            self.options_.run_at,
            self.options_.origin,
        )

    def _choose_group(self, values: dict[str, Any]) -> object:
        if self._group is None:
            return None
        filled = self.payload.fill(values)
        if isinstance(self._group, str):
            return filled[self._group]
        try:
            return self._group(**filled)
        except TypeError as error:
            raise PayloadError(
                f"the group function of {self.name!r} cannot take the payload's fields "
                f"{', '.join(filled)}: {error}"
            ) from None
