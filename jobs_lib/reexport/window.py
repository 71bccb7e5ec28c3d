"""The hours of a day in which a re-export is to be done, and the rate that does it."""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime, time, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from jobs_lib.errors import ReexportError
from jobs_lib.reexport.control import RATE_LIMIT, REACHED

_WINDOW = re.compile(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)", re.ASCII)


class Window(NamedTuple):
    """The hours from one time of the day up to another, maybe of the next day.

    Attributes:
        begin: the time of the day at which it opens.
        end: the time of the day at which it closes.
        zone: of both; None for that of this machine.
    """

    begin: time
    end: time
    zone: ZoneInfo | None = None

    def __str__(self) -> str:
        return f"{self.begin:%H:%M}-{self.end:%H:%M}"


class Span(NamedTuple):
    """The times between which a re-export is to be done, with their zone.

    Attributes:
        begin: the first time.
        end: the last one.
    """

    begin: datetime
    end: datetime

    @property
    def minutes(self) -> float:
        """How long it is."""
        # In one zone, Python would subtract what clocks show.
        took = self.end.astimezone(UTC) - self.begin.astimezone(UTC)
        return took.total_seconds() / 60


def parse_window(text: str, tz: str | None = None) -> Window:
    """Parse a window such as ``22:00-06:00``.

    Args:
        text: its two times of the day.
        tz: the time zone of both, such as ``Europe/Berlin``. Defaults to that of this
            machine.

    Raises:
        ReexportError: it is none, or there is no such time zone.
    """
    try:
        zone = None if tz is None else ZoneInfo(tz)
    # A name that leads out of the folder, or names one.
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ReexportError(
            f"there is no time zone {tz!r}: give one such as Europe/Berlin"
        ) from None
    if found := _WINDOW.fullmatch(text):
        begin_hour, begin_minute, end_hour, end_minute = map(int, found.groups())
        if max(begin_hour, end_hour) < 24 and max(begin_minute, end_minute) < 60:
            begin, end = time(begin_hour, begin_minute), time(end_hour, end_minute)
            if begin != end:
                return Window(begin, end, zone)
    raise ReexportError(
        f"a window has two different times of the day, such as 22:00-06:00, not "
        f"{text!r}"
    )


def find_span(window: Window, now: datetime | None = None) -> Span:
    """Find what is left of the window if it is open, else the whole next one.

    Args:
        window: the times of the day.
        now: with a zone; by default the time of the clock.
    """
    zone = window.zone
    now = (now or datetime.now(UTC)).astimezone(zone)
    day = timedelta(days=1)
    first = now.date() - day  # yesterday's may still be open
    while True:
        last = first if window.end > window.begin else first + day
        begin, end = _at(first, window.begin, zone), _at(last, window.end, zone)
        if now < end:
            return Span(max(begin, now), end)
        first += day


def find_rate(total: int, span: Span) -> int:
    """Find the rate at which so many keys are sent in a span, in records a minute.

    Raises:
        ReexportError: that is more than a re-export may have.
    """
    # A re-export reaches a little less than its rate.
    needed = max(1, math.ceil(total / (max(span.minutes, 1.0) * REACHED)))
    if needed > RATE_LIMIT:
        raise ReexportError(
            f"{total:,} keys in {span.minutes:,.0f} minutes are {needed:,} records a "
            f"minute, and a re-export has {RATE_LIMIT:,} at most: give a longer window"
        )
    return needed


def _at(day: date, of_day: time, zone: ZoneInfo | None) -> datetime:
    """A time of a day, with the offset from UTC that its zone has then."""
    naive = datetime.combine(day, of_day)
    return naive.astimezone() if zone is None else naive.replace(tzinfo=zone)
