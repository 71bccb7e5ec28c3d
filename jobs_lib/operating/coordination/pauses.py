"""Pause a group that shares partitions, and end its pause."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from jobs_lib.errors import OperatingError
from jobs_lib.operating.coordination.session import (
    Holder,
    as_time,
    as_utc,
    is_known,
    open_for,
    read_time,
    send_pauses,
    wait_until_free,
)

if TYPE_CHECKING:
    from jobs_lib.coordination.log import Log
    from jobs_lib.settings import Settings

WAIT = 60.0
"""Seconds to wait for holders: a dead one is stale after two intervals, 20 s mostly."""
LONGEST = timedelta(days=366)
_SPARE = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Paused:
    """A group that was paused."""

    group: str
    until: datetime
    """By the brokers' clocks."""
    before: datetime | None
    """Until when it was paused already; None if it was not."""
    is_known: bool
    """Whether the log had said anything of the group's partitions."""
    holders: list[Holder]
    """Who still holds partitions."""


@dataclass(frozen=True, slots=True)
class Released:
    """A group whose members were made to release what they held."""

    group: str
    is_known: bool
    holders: list[Holder]
    """Who held on to partitions."""


def pause(
    settings: Settings,
    log: str,
    group: str,
    until: datetime | timedelta,
    *,
    wait: float = WAIT,
) -> Paused:
    """Pause a group: its members release what they hold, and nobody claims anything.

    A pause that the group has is replaced, whoever has made it.

    Args:
        settings: where Kafka is.
        log: the coordination log's name in Kafka.
        group: the group, with its namespace.
        until: the end of the pause, or how long it lasts, by the brokers' clocks.
        wait: seconds to wait until nobody holds a partition.

    Raises:
        AccessError: Kafka does not let this client in, or denies a right.
        ConfigurationError: the topic cannot be the log, or the group's name is none.
        OperatingError: the pause would be over, or too long; nothing was sent.
        UnavailableError: no broker answers, or nothing is read back in time.
    """
    with open_for(settings, log, group) as opened:
        known = is_known(opened, group)
        now_ms = read_time(opened)
        before_ms = find_pause(opened, now_ms)
        until_ms = _begin(opened, until, now_ms)
        return Paused(
            group,
            as_time(until_ms),
            None if before_ms is None else as_time(before_ms),
            known,
            wait_until_free(opened, wait),
        )


def resume(settings: Settings, log: str, group: str) -> datetime | None:
    """End the pause of a group, whoever has made it.

    Returns until when it was paused; None if it was not.

    Raises:
        AccessError: Kafka does not let this client in, or denies a right.
        ConfigurationError: the topic cannot be the log, or the group's name is none.
        UnavailableError: no broker answers, or nothing is read back in time.
    """
    with open_for(settings, log, group) as opened:
        before_ms = find_pause(opened, read_time(opened))
        _end(opened)
    return None if before_ms is None else as_time(before_ms)


def release(
    settings: Settings, log: str, group: str, *, wait: float = WAIT
) -> Released:
    """Let the members of a group release all that they hold, and claim it anew.

    It is a pause that ends once nobody holds anything, or when the time is over. Only
    a holder itself can release a partition, so a member that hangs keeps its own.

    Args:
        settings: where Kafka is.
        log: the coordination log's name in Kafka.
        group: the group, with its namespace.
        wait: seconds to wait until nobody holds a partition.

    Raises:
        AccessError: Kafka does not let this client in, or denies a right.
        ConfigurationError: the topic cannot be the log, or the group's name is none.
        OperatingError: the group is paused; nothing was sent.
        UnavailableError: no broker answers, or nothing is read back in time.
    """
    with open_for(settings, log, group) as opened:
        known = is_known(opened, group)
        now_ms = read_time(opened)
        before_ms = find_pause(opened, now_ms)
        if before_ms is not None:
            raise OperatingError(
                f"the group {group!r} is paused until {as_time(before_ms)}, so that "
                "its members release all that they hold, and claim nothing"
            )
        try:
            # If this process is killed, the pause ends by itself.
            _begin(opened, timedelta(seconds=wait) + _SPARE, now_ms)
            holders = wait_until_free(opened, wait)
        finally:
            _end_own(opened)
    return Released(group, known, holders)


def find_pause(log: Log, now_ms: int) -> int | None:
    """Find until when the sender's group is paused somewhere; None if it is not."""
    with log.lock:
        ends = [
            pause.until_ms
            for world in log.get_worlds()
            if (pause := world.pauses.get(log.sender.group_id)) is not None
        ]
    return max((one for one in ends if one > now_ms), default=None)


def _begin(log: Log, until: datetime | timedelta, now_ms: int) -> int:
    now = as_time(now_ms)
    last = now + LONGEST
    if isinstance(until, datetime):
        end = as_utc(until)
    else:
        end = now + min(until, 2 * LONGEST)
    if end <= now:
        raise OperatingError(
            f"a pause until {end} is over: by the brokers' clocks it is {now}. Give a "
            "later end"
        )
    if end > last:
        raise OperatingError(
            f"a pause of more than {LONGEST.days} days is too long: it may end on "
            f"{last} at the latest. Pause the group again later"
        )
    end_ms = round(end.timestamp() * 1000)
    send_pauses(log, dict.fromkeys(range(log.partitions), end_ms))
    return end_ms


def _end(log: Log) -> None:
    send_pauses(log, dict.fromkeys(range(log.partitions), 0))


def _end_own(log: Log) -> None:
    """End the sender's own pause, and leave what others have made of it since."""
    with log.lock:
        others = {
            world.place
            for world in log.get_worlds()
            if (pause := world.pauses.get(log.sender.group_id)) is not None
            and pause[1:] != log.sender[1:]
        }
    own = [place for place in range(log.partitions) if place not in others]
    send_pauses(log, dict.fromkeys(own, 0))
