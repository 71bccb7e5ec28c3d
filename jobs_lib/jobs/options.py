"""The options of one call that enqueues, and checks that they can be stored."""

from __future__ import annotations

import dataclasses
import json
import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal, cast

from jobs_lib.errors import EnqueueError, PayloadError
from jobs_lib.reasons import count_bytes, find_header_fault, name_class

if TYPE_CHECKING:
    from collections.abc import Mapping

Priority = Literal["high", "normal", "batch"]
PRIORITIES: Mapping[Priority, int] = {"high": 1, "normal": 0, "batch": -1}
GROUP_LIMIT = 1_000
"""Bytes that a group or a unique key may have: indexes hold them."""
HEADERS_LIMIT = 8_192
"""Bytes that a job's headers may have as JSON."""
_LONGEST_DELAY = timedelta(days=36_525)
_EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
# No session's time zone may move it into the year 10000, which no driver can read.
_LATEST = datetime(9999, 12, 30, tzinfo=UTC)


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The options of one call that enqueues; checked when they are made."""

    type: str
    run_at: datetime | None = None
    """The earliest time at which the job may run, with a time zone. Defaults to now."""
    origin: str | None = None
    """The origin ``topic/partition``. Defaults to the group's, or the record's."""
    ordered: bool = True
    """Take the group's lock until the transaction ends, so that the group runs in the
    order of commits. Without it no transaction waits, and neighbours may swap."""
    priority: Priority = "normal"
    """``high`` before ``normal`` before ``batch``."""
    unique: str | None = None
    """At most one unfinished job of the type may have this key."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """Context that travels with the job."""
    delay: timedelta | float | None = None
    """The job may run this long after it is enqueued, by the database's clock: a
    timedelta or seconds, up to 100 years. Not together with ``run_at``."""

    def __post_init__(self) -> None:
        """Refuse options that cannot be stored."""
        check_run_at(self.type, self.run_at)
        check_delay(self.type, self.delay, self.run_at)
        check_key(self.type, "unique key", self.unique)
        check_headers(self.type, self.headers)
        if not isinstance(self.priority, str) or self.priority not in PRIORITIES:
            raise EnqueueError(
                f"the priority of {self.type!r} is {self.priority!r}: give one of "
                f"{', '.join(PRIORITIES)}"
            )

    @property
    def run_at_text(self) -> str | None:
        """The time as a statement's parameter."""
        return None if self.run_at is None else self.run_at.isoformat()

    @property
    def delay_text(self) -> str | None:
        """The delay in seconds, as a statement's parameter."""
        if self.delay is None:
            return None
        return repr(_to_seconds(self.delay))


def check_key(type_name: str, what: str, key: object) -> str | None:
    """Return the group or unique key if it can be stored.

    Raises:
        PayloadError: it is no short, storable string.
    """
    if key is None:
        return None
    if not isinstance(key, str):
        raise PayloadError(
            f"the {what} of {type_name!r} must be a str or None, not a "
            f"{name_class(key)}"
        )
    if not 0 < count_bytes(key) <= GROUP_LIMIT or "\0" in key:
        raise PayloadError(
            f"the {what} of {type_name!r} must have 1 to {GROUP_LIMIT} bytes of UTF-8 "
            f"without NUL, and this one has {len(key)} characters; None means "
            f"no {what}"
        )
    return key


def check_run_at(type_name: str, run_at: object) -> None:
    """Refuse a time that the server or a driver cannot handle.

    Raises:
        EnqueueError: it has no time zone, is too far away, or does not exist.
    """
    if run_at is None:
        return
    if not isinstance(run_at, datetime):
        raise EnqueueError(
            f"run_at of {type_name!r} must be a datetime or None, not {run_at!r}"
        )
    if run_at.utcoffset() is None:
        raise EnqueueError(
            f"run_at of {type_name!r} is {run_at.isoformat()} without a time zone: "
            "give one, as in datetime.now(timezone.utc)"
        )
    try:
        instant = run_at.astimezone(UTC)
    except OverflowError:
        instant = None
    if instant is None or not _EARLIEST <= instant < _LATEST:
        raise EnqueueError(
            f"run_at of {type_name!r} is {run_at.isoformat()}, and must lie in the "
            "years 2000 to 9999; None means now"
        )
    back = instant.astimezone(run_at.tzinfo)
    if abs(back.replace(tzinfo=None) - run_at.replace(tzinfo=None)) > timedelta(0):
        raise EnqueueError(
            f"run_at of {type_name!r} is {run_at.isoformat()}, a time that does not "
            f"exist in {run_at.tzinfo}: clocks are put forward there"
        )


def check_delay(type_name: str, delay: object, run_at: object) -> None:
    """Refuse a delay that is invalid, or that is given together with a time.

    Raises:
        EnqueueError: it is negative, too long, neither a timedelta nor a number, or
            given together with a time.
    """
    if delay is None:
        return
    if run_at is not None:
        raise EnqueueError(
            f"{type_name!r} is given both a run_at and a delay of {delay!r}: give one"
        )
    if isinstance(delay, bool) or not isinstance(delay, timedelta | int | float):
        raise EnqueueError(
            f"the delay of {type_name!r} must be a timedelta or a number of seconds, "
            f"not {delay!r}"
        )
    # NaN is in no range.
    if not 0 <= _to_seconds(delay) <= _LONGEST_DELAY.total_seconds():
        raise EnqueueError(
            f"the delay of {type_name!r} is {delay!r}, and must be 0 seconds to 100 "
            "years; None means none"
        )


def _to_seconds(delay: timedelta | float) -> float:
    if isinstance(delay, timedelta):
        return delay.total_seconds()
    try:
        return float(delay)
    except OverflowError:
        return math.inf


def check_headers(type_name: str, headers: object) -> None:
    """Refuse headers that are no short mapping of strings to strings.

    Raises:
        PayloadError: they cannot be stored.
    """
    if (fault := find_header_fault(headers)) is not None:
        raise PayloadError(
            f"the headers of {type_name!r} must map str to str, in UTF-8 without NUL, "
            f"and {fault}"
        )
    size = len(
        json.dumps(
            dict(cast("Mapping[str, str]", headers)), ensure_ascii=False
        ).encode()
    )
    if size > HEADERS_LIMIT:
        raise PayloadError(
            f"the headers of {type_name!r} have {size} bytes as JSON, the limit is "
            f"{HEADERS_LIMIT}: put the handler's data into the payload"
        )
