"""A schedule: the ticks of a periodic job, and what becomes of missed ticks.

Nothing here reads a clock or a database. All times inside are UTC: Python compares two
times of one zone by their wall clocks, which go back an hour once a year.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import dropwhile, islice, takewhile
from typing import TYPE_CHECKING, Any, Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from jobs_lib.errors import ConfigurationError, PayloadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jobs_lib.jobs.type import JobType

Missed = Literal["skip", "one", "all"]
"""The rule for ticks while no scheduler ran: see :meth:`Schedule.choose`."""

MISSED_AFTER = timedelta(minutes=1)
"""A tick that is noticed this late is still on time."""
MOST_TICKS = 1_000
"""The ticks that ``all`` enqueues at once; older ones are dropped."""
TICK = "tick"
"""The parameter that gives a handler the tick's time."""

_NAME_LIMIT = 200
_SAMPLE = datetime(2000, 1, 1, tzinfo=UTC)
# No zone puts its clocks back by more.
_LONGEST_FOLD = timedelta(hours=3)


@dataclass(frozen=True, slots=True)
class Due:
    """The ticks that are due at some moment."""

    ticks: list[datetime]
    """The ticks to enqueue, in their order."""
    until: datetime | None
    """The newest tick that is due; None if none is."""
    dropped: tuple[datetime, datetime] | None
    """The first tick that is not enqueued, and the first later one that is (or now)."""


class Schedule:
    """A job type, a cron expression with its zone, and a rule for missed ticks."""

    def __init__(
        self,
        job_type: JobType[Any],
        cron: str,
        *,
        name: str,
        tz: str,
        missed: Missed,
        payload: Mapping[str, Any],
    ) -> None:
        """Check everything that can be checked without a database.

        Raises:
            ConfigurationError: one of the arguments cannot be used.
        """
        is_text = isinstance(name, str)
        if not (is_text and 0 < len(name) <= _NAME_LIMIT) or "\0" in name:
            raise ConfigurationError(
                f"{name!r} is no name for a schedule: give 1 to {_NAME_LIMIT} "
                "characters"
            )
        if missed not in get_args(Missed):
            raise ConfigurationError(
                f"the schedule {name!r} cannot treat missed ticks by {missed!r}: give "
                "'skip', 'one' or 'all'"
            )
        if not isinstance(cron, str):
            raise ConfigurationError(
                f"the schedule {name!r} has the cron expression {cron!r}: give a text, "
                "as in '0 3 * * *'"
            )
        self.job_type = job_type
        self.name = name
        self.missed = missed
        self._cron = " ".join(cron.split())
        self._zone = _find_zone(name, tz)
        self.definition = f"{self._cron} {tz}"
        """When it changes, the schedule starts again from now."""
        self._payload = dict(payload)
        self._takes_tick = TICK in job_type.payload.signature.parameters
        self._check_cron()
        self._check_payload()

    def payload(self, tick: datetime) -> dict[str, Any]:
        """Make the payload of the job for one tick, with its time in the zone."""
        time = {TICK: tick.astimezone(self._zone)} if self._takes_tick else {}
        return self._payload | time

    def next(self, after: datetime) -> datetime:
        """Return the first tick after a time; far in the future if there is none."""
        return next(self._ticks(after), datetime.max.replace(tzinfo=UTC))

    def choose(self, after: datetime, now: datetime) -> Due:
        """Choose what to enqueue for the ticks after ``after`` and up to ``now``.

        Every rule enqueues a tick that is noticed in time. If several are due, ``skip``
        and ``one`` take only the newest, and ``skip`` not even that if it is older than
        a minute; ``all`` takes the newest thousand.
        """
        come = self._come(after, now)
        if not come:
            return Due([], None, None)
        if self.missed == "all":
            kept = come[-MOST_TICKS:]
        elif self.missed == "skip" and now - come[-1] > MISSED_AFTER:
            kept = []
        else:
            kept = come[-1:]
        dropped = None
        if len(kept) < len(come):
            dropped = (self.next(after), kept[0] if kept else now)
        return Due(kept, come[-1], dropped)

    def _come(self, after: datetime, now: datetime) -> list[datetime]:
        """Find the ticks in (after, now]; only the newest ones if they are too many."""
        most = MOST_TICKS + 1
        ahead = takewhile(lambda tick: tick <= now, self._ticks(after))
        come = list(islice(ahead, most))
        if len(come) < most:
            return come
        # Count backwards, so as not to walk through a year of seconds. Begin a bit
        # later than now, because a wall clock that is put back shows `now` twice.
        back = map(_to_utc, self._simulate(now + _LONGEST_FOLD, reverse=True))
        return list(islice(dropwhile(lambda tick: tick > now, back), most))[::-1]

    def _ticks(self, after: datetime) -> Iterator[datetime]:
        # In an hour that the wall clock shows twice, a search that begins in the second
        # pass may return a tick of the first one.
        ticks = map(_to_utc, self._simulate(after))
        return dropwhile(lambda tick: tick <= after, ticks)

    def _simulate(self, start: datetime, *, reverse: bool = False) -> CronSim:
        return CronSim(self._cron, start.astimezone(self._zone), reverse=reverse)

    def _check_cron(self) -> None:
        try:
            first = next(self._simulate(_SAMPLE), None)
        except CronSimError as error:
            reason = str(error)[:1].lower() + str(error)[1:]
        else:
            if first is not None:
                return
            reason = "no such day in fifty years"
        raise ConfigurationError(
            f"the schedule {self.name!r} has the cron expression {self._cron!r}, which "
            f"cannot be used ({reason}): give minute, hour, day of month, month and "
            "day of week, as in '30 3 * * MON-FRI'"
        )

    def _check_payload(self) -> None:
        if self._takes_tick and TICK in self._payload:
            raise ConfigurationError(
                f"the payload of the schedule {self.name!r} has {TICK!r}, which is the "
                "time of each tick: leave it out"
            )
        try:
            self.job_type.payload.encode(self.payload(_SAMPLE), 2**30)
        except PayloadError as error:
            raise ConfigurationError(
                f"the schedule {self.name!r} cannot enqueue: {error}"
            ) from None


def _find_zone(name: str, tz: str) -> ZoneInfo:
    try:
        return ZoneInfo(tz)
    # The name is a folder of zones, a path that leads outside, or no zone.
    except (ZoneInfoNotFoundError, TypeError, ValueError, OSError):
        raise ConfigurationError(
            f"the schedule {name!r} has the time zone {tz!r}, which is not known: give "
            "a name such as 'Europe/Zurich' or 'UTC'"
        ) from None


def _to_utc(tick: datetime) -> datetime:
    return tick.astimezone(UTC)
