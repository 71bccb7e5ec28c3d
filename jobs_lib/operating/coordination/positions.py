"""Set the position of a paused group: see PROTOCOL.md, section 7."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal, TypeAlias

from jobs_lib.coordination.messages import (
    ClaimingPartition,
    ReleasingPartition,
    Shared,
)
from jobs_lib.coordination.names import check_group
from jobs_lib.coordination.world import Outcome
from jobs_lib.errors import OperatingError
from jobs_lib.kafka.places import find_places
from jobs_lib.operating.coordination.session import (
    ANSWER_SECONDS,
    INTERVAL,
    as_time,
    as_utc,
    open_for,
    read_time,
    send_pauses,
    wait_until_free,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from jobs_lib.coordination.log import Log
    from jobs_lib.coordination.writer import Sent
    from jobs_lib.settings import Settings

Place: TypeAlias = Literal["earliest", "latest"] | int | datetime
WAIT = 10.0
"""Seconds to wait for holders: the pause has mostly waited for them already."""
LEAST_MS = 5_000
"""Milliseconds that the pause must last yet."""
_INTERVAL_MS = round(INTERVAL * 1000)
_AT_ONCE = 1_000
"""Records that are sent before one of them is read back."""
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Moved:
    """A partition whose position was set."""

    topic: str
    partition: int
    before: int | None
    """The position that the group had; None if it had none."""
    after: int


def set_position(
    settings: Settings,
    log: str,
    group: str,
    topic: str,
    to: Place,
    *,
    partitions: Collection[int] = (),
    wait: float = WAIT,
) -> list[Moved]:
    """Set where a paused group goes on in a topic, and leave the pause as it is.

    Kafka gives each position. All are found, and no partition is held, before the first
    is set. What is set lasts if a later one fails; the same call sets all again.

    Args:
        settings: where Kafka is.
        log: the coordination log's name in Kafka.
        group: the group, with its namespace; it is paused, by whomever.
        topic: the topic's name in Kafka.
        to: the oldest record, the end, an offset, or the first record of a time in
            Kafka or later.
        partitions: only these; an offset needs them. None means all.
        wait: seconds to wait until nobody holds one of them.

    Raises:
        AccessError: Kafka does not let this client in, or denies a right.
        ConfigurationError: the topic cannot be the log, or the group's name is none.
        OperatingError: the group is not paused, a partition is held, or Kafka has no
            such offset or partition.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers, or nothing is read back in time.
    """
    check_group(group)
    offsets = find_offsets(settings, topic, to, partitions)
    after = {Shared(group, topic, one): offset for one, offset in offsets.items()}
    with open_for(settings, log, group) as opened:
        # Only who has paused a group may set it back: say it again in the own name.
        send_pauses(opened, _find_ends(opened))
        if holders := wait_until_free(opened, wait, after.keys()):
            raise OperatingError(
                f"{len(holders)} of the partitions are held yet: "
                f"{_name([str(one) for one in holders])}. Nothing was set. Wait, or "
                "end these processes: what they hold is free after two intervals"
            )
        before = {shared: opened.find(shared).position for shared in after}
        _release_at(opened, after, _claim(opened, [*after]))
    return [
        Moved(topic, shared.partition, before[shared], offset)
        for shared, offset in sorted(after.items())
    ]


def find_offsets(
    settings: Settings, topic: str, to: Place, partitions: Collection[int] = ()
) -> dict[int, int]:
    """Find the offsets of a place in a topic's partitions: only such as Kafka gives.

    Raises:
        OperatingError: there is no such partition, or Kafka has no such offset in it.
        TopicError: the topic does not exist, or is not visible.
        UnavailableError: no broker answers.
    """
    starts = find_places(settings, topic, "start")
    if missing := sorted(set(partitions) - starts.keys()):
        raise OperatingError(
            f"{topic}/{missing[0]} does not exist: {topic!r} has the partitions 0 to "
            f"{len(starts) - 1}"
        )
    chosen = sorted(set(partitions)) or sorted(starts)
    if isinstance(to, int):
        return _check_offset(settings, topic, to, sorted(set(partitions)), starts)
    if to == "earliest":
        found = starts
    elif isinstance(to, datetime):
        found = find_places(settings, topic, as_utc(to))
    else:
        found = find_places(settings, topic, "end")
    return {one: found[one] for one in chosen}


def _check_offset(
    settings: Settings,
    topic: str,
    offset: int,
    partitions: Sequence[int],
    starts: Mapping[int, int],
) -> dict[int, int]:
    if not partitions:
        raise OperatingError(
            f"the offset {offset} needs partitions (--partition): each has offsets of "
            "its own"
        )
    ends = find_places(settings, topic, "end")
    for one in partitions:
        if not starts[one] <= offset <= ends[one]:
            raise OperatingError(
                f"{topic}/{one} has no offset {offset}: its records begin at "
                f"{starts[one]}, and the next one will be {ends[one]}. Give an offset "
                "from the one to the other"
            )
    return dict.fromkeys(partitions, offset)


def _find_ends(log: Log) -> dict[int, int]:
    """Find until when each place says that the sender's group is paused."""
    now_ms, group = read_time(log), log.sender.group_id
    with log.lock:
        pauses = {one.place: one.pauses.get(group) for one in log.get_worlds()}
    ends = {place: 0 if one is None else one.until_ms for place, one in pauses.items()}
    over = [place for place, end in ends.items() if end <= now_ms]
    command = f"jobs-lib coordination pause {group} --for 10m --log {log.topic}"
    way_out = f"Pause it first: {command}"
    if len(over) == len(ends):
        raise OperatingError(
            f"the group {group!r} is not paused, so that its members may process what "
            f"the position skips. {way_out}"
        )
    if over:
        raise OperatingError(
            f"the group {group!r} is paused in {len(ends) - len(over)} of the "
            f"{len(ends)} partitions of the coordination log only. {way_out}"
        )
    if (end := min(ends.values())) < now_ms + LEAST_MS:
        raise OperatingError(
            f"the pause of the group {group!r} ends too soon, at {as_time(end)}: by "
            f"the brokers' clocks it is {as_time(now_ms)}. {way_out}"
        )
    return ends


def _claim(log: Log, partitions: Sequence[Shared]) -> dict[Shared, int]:
    """Claim partitions for a moment; return the claims.

    Nobody else can claim one while the own pause lasts, however long that takes.
    """
    claims: dict[Shared, int] = {}
    for some in _cut(partitions):
        sent = {
            shared: log.send(ClaimingPartition(log.sender, shared, _INTERVAL_MS))
            for shared in some
        }
        refused: list[tuple[Shared, Outcome]] = []
        for shared, one in sent.items():
            outcome = one.wait(ANSWER_SECONDS)
            if outcome is Outcome.VALID and one.offset is not None:
                claims[shared] = one.offset
            else:
                refused.append((shared, outcome))
        if refused:
            _let_go(log, claims)
            shared, outcome = refused[0]
            raise OperatingError(
                f"{shared.origin} cannot be claimed, since "
                f"{outcome.value}. Nothing was set. Does another command set positions "
                "of this group, or has the pause ended? Run this again"
            )
    return claims


def _release_at(
    log: Log, after: Mapping[Shared, int], claims: Mapping[Shared, int]
) -> None:
    """Release partitions with their new positions, and see that these hold."""
    for some in _cut([*claims]):
        sent = [_release(log, one, claims[one], after[one]) for one in some]
        for one in sent:
            one.wait(ANSWER_SECONDS)
    # A position that is smaller counts only while the own pause lasts.
    left = [one for one in after if log.find(one).position != after[one]]
    if left:
        names = _name([f"{one.topic}/{one.partition}" for one in left])
        raise OperatingError(
            f"the positions of {len(left)} of {len(after)} partitions are not set, "
            f"since the pause was over, or was somebody else's: {names}. Pause the "
            "group for longer, and run this again"
        )


def _let_go(log: Log, claims: Mapping[Shared, int]) -> None:
    """Release what was claimed, and leave the positions as they are."""
    for shared, claim in claims.items():
        _release(log, shared, claim, None)


def _release(log: Log, shared: Shared, claim: int, position: int | None) -> Sent:
    return log.send(ReleasingPartition(log.sender, shared, claim, position))


def _cut(partitions: Sequence[Shared]) -> list[Sequence[Shared]]:
    return [
        partitions[first : first + _AT_ONCE]
        for first in range(0, len(partitions), _AT_ONCE)
    ]


def _name(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
