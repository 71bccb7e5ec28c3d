"""Write to a coordination log as an operator: see PROTOCOL.md, section 7.

An operator speaks for the group that it pauses, and is no member of it. It never holds
a partition for longer than it takes to set its position.
"""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from jobs_lib.coordination.log import Log
from jobs_lib.coordination.messages import NAME_LIMIT, Probe, ReleaseGroup, Sender
from jobs_lib.coordination.names import check_group
from jobs_lib.coordination.patience import read_clock
from jobs_lib.coordination.world import Freshness, Outcome
from jobs_lib.errors import AccessError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from jobs_lib.coordination.messages import Shared
    from jobs_lib.settings import Settings

OPERATORS = "jobs-lib.operators"
"""The group of an operator's probes: those of the paused group's would count as signs
of a member, and the others would leave a share to it."""
INTERVAL = 10.0
"""Seconds; what a command holds that was killed is free after two of these."""
ANSWER_SECONDS = 15.0
"""Until a record must have been read back."""
LAST_MS = 253_402_300_799_000
"""The end of the year 9999, which is the last one that Python knows."""
_PROBE_EVERY = 0.5
_LOOK_EVERY = 0.2


@dataclass(frozen=True, slots=True)
class Holder:
    """A member that holds a partition."""

    topic: str
    partition: int
    client: str
    instance: str
    """Another one after each start of the client."""
    state: str
    """``fresh``, or ``unknown`` if it was silent for more than an interval."""

    def __str__(self) -> str:
        """Name the partition and its holder."""
        return f"{self.topic}/{self.partition} by {self.client!r} ({self.state})"


def name_operator(settings: Settings, group: str) -> Sender:
    """Name this run of an operator's command, as the sender of a group's records."""
    client_id = f"operator@{settings.pod}"[:NAME_LIMIT]
    return Sender(group, client_id, uuid.uuid4().hex)


@contextmanager
def open_for(settings: Settings, topic: str, group: str) -> Iterator[Log]:
    """Read a log, to write to it for a group.

    Raises:
        AccessError: Kafka does not let this client in, or denies a right.
        ConfigurationError: the topic cannot be the log, or the group's name is none.
        UnavailableError: no broker answers, or the log cannot be read in time.
    """
    check_group(group)
    sender = name_operator(settings, group)
    prober = Sender(OPERATORS, *sender[1:])
    with Log(settings, topic, sender, interval=INTERVAL, prober=prober) as log:
        yield log


def read_time(log: Log) -> int:
    """Ask for the brokers' time, in milliseconds: all places are read up to it.

    Raises:
        UnavailableError: nobody knows it.
    """
    probe = Probe(log.prober)
    sent = [log.send(probe, place=number) for number in range(log.partitions)]
    for one in sent:
        one.wait(ANSWER_SECONDS)
    with log.lock:
        return max(world.now_ms for world in log.get_worlds())


def send_pauses(log: Log, ends: Mapping[int, int]) -> None:
    """Pause the sender's group until some times, by place, and read that back.

    Raises:
        UnavailableError: a place may not have it. It may be sent again.
    """
    sent = {
        place: log.send(ReleaseGroup(log.sender, until_ms), place=place)
        for place, until_ms in ends.items()
    }
    for done, one in enumerate(sent.values()):
        try:
            outcome = one.wait(ANSWER_SECONDS)
        except AccessError:
            raise
        except UnavailableError as error:
            told = str(error)
        else:
            if outcome is Outcome.VALID:
                continue
            told = outcome.value
        raise UnavailableError(
            f"{done} of the {len(sent)} partitions of the coordination log "
            f"{log.topic!r} have what was sent, and the next one may not: {told}. Run "
            "this again"
        )


def is_known(log: Log, group: str) -> bool:
    """Whether the log has said anything of a group's partitions."""
    with log.lock:
        return any(
            shared.group_id == group
            for world in log.get_worlds()
            for shared in world.entries
        )


def wait_until_free(
    log: Log, seconds: float, chosen: Container[Shared] | None = None
) -> list[Holder]:
    """Wait until nobody holds a partition of the sender's group, or is stale.

    Args:
        log: whose sender's group is paused.
        seconds: that pass at most.
        chosen: only these; None for all.

    Returns who still holds some when the time is over.

    Raises:
        UnavailableError: nobody knows, as the log is read anew.
    """
    until, probe_at = read_clock() + seconds, 0.0
    probe = Probe(log.prober)
    while True:
        with log.lock:
            is_read = log.is_known
            holders = list(_find_holders(log, chosen)) if is_read else []
            places = {place for place, _ in holders}
            if is_read and not holders:
                return []
            now = read_clock()
            if now >= until:
                break
            if now >= probe_at:
                # A holder that has died becomes stale only as time passes there.
                probe_at = now + _PROBE_EVERY
                for place in places:
                    log.send(probe, place=place)
            log.lock.wait(min(_LOOK_EVERY, until - now))
    if not is_read:
        raise UnavailableError(
            f"the coordination log {log.topic!r} is read anew, and for {seconds:g} s "
            "nobody knows who holds what. Run this again"
        )
    return sorted(
        (one for _, one in holders), key=lambda one: (one.topic, one.partition)
    )


def _find_holders(
    log: Log, chosen: Container[Shared] | None
) -> Iterator[tuple[int, Holder]]:
    for world in log.get_worlds():
        for shared, (_, holding) in world.entries.items():
            if shared.group_id != log.sender.group_id or holding is None:
                continue
            state = holding.find_freshness(world.now_ms)
            if state is Freshness.STALE or (
                chosen is not None and shared not in chosen
            ):
                continue
            yield (
                world.place,
                Holder(
                    shared.topic,
                    shared.partition,
                    holding.client_id,
                    holding.instance_id,
                    state.value,
                ),
            )


def as_utc(at: datetime) -> datetime:
    """Take a time without a zone for one in UTC."""
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def as_time(time_ms: int) -> datetime:
    """Turn a time of the log into one in UTC; one beyond all years is the last."""
    return datetime.fromtimestamp(min(time_ms, LAST_MS) / 1000, UTC)
