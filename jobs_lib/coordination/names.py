"""Names and intervals that members are given: what cannot be used is refused."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, TypeGuard

from jobs_lib.backoff import is_number
from jobs_lib.coordination.messages import (
    LARGEST_OFFSET,
    LARGEST_PARTITION,
    LONGEST_INTERVAL_MS,
    NAME_LIMIT,
    SHORTEST_INTERVAL_MS,
    TOPIC_LIMIT,
)
from jobs_lib.errors import ConfigurationError, FencedError

if TYPE_CHECKING:
    from jobs_lib.coordination.messages import Sender
    from jobs_lib.kafka.poller import Partition

_LONGEST_PAUSE = 86_400
"""Seconds between two looks at topics."""
_GROUP_NAME = re.compile(r"[^.\s]+(\.[^.\s]+)+")


def check_names(log: object, group: object, client_id: object) -> None:
    """Refuse names that cannot be used.

    Raises:
        ConfigurationError: which, and why.
    """
    if not log:
        raise ConfigurationError("the coordination log has no name: give log=…")
    if not _is_name(log, TOPIC_LIMIT):
        raise ConfigurationError(
            f"log={log!r} must be the name of a topic in Kafka, as a text of 1 to "
            f"{TOPIC_LIMIT} characters"
        )
    check_group(group)
    if not _is_name(client_id):
        raise ConfigurationError(
            f"client_id={client_id!r} must have 1 to {NAME_LIMIT} characters, and no "
            "half of a surrogate pair: a name that is the process's own, and the same "
            "after a restart"
        )


def check_topics(topics: object) -> None:
    """Refuse what is no list of names of topics.

    Raises:
        ConfigurationError: why.
    """
    # An iterator is empty when it is read again.
    if (
        not isinstance(topics, Collection)
        or isinstance(topics, str | bytes)
        or not topics
        or not all(_is_name(one, TOPIC_LIMIT) for one in topics)
    ):
        raise ConfigurationError(
            f"topics={topics!r} must be a list of names, with one at least: texts of 1 "
            f"to {TOPIC_LIMIT} characters"
        )


def check_part(part: object) -> Partition:
    """Return what can be shared: readers of the log let the name and number through.

    Raises:
        ConfigurationError: it is something else. Each claim of it would be passed over,
            and sent again for ever.
    """
    match part:
        case (name, int(number)) if (
            _is_name(name, TOPIC_LIMIT)
            and type(number) is int
            and 0 <= number <= LARGEST_PARTITION
        ):
            return name, number
    raise ConfigurationError(
        f"{part!r} cannot be shared: parts must return pairs of a name of 1 to "
        f"{TOPIC_LIMIT} characters, without half of a surrogate pair, and a number "
        f"from 0 to {LARGEST_PARTITION}"
    )


def check_position(position: object) -> int:
    """Return what readers of the log let through as a position.

    Raises:
        ConfigurationError: it is something else. Each heartbeat with it would be passed
            over, and its partition would become stale.
    """
    if type(position) is int and 0 <= position <= LARGEST_OFFSET:
        return position
    raise ConfigurationError(
        f"{position!r} cannot be a position: give the offset of the next record, an "
        f"integer from 0 to {LARGEST_OFFSET}"
    )


def check_group(group: object) -> None:
    """Refuse a group's name without a namespace.

    Raises:
        ConfigurationError: it has none, is too long, or is no text.
    """
    if not _is_name(group) or not _GROUP_NAME.fullmatch(group) or group == "-.-":
        raise ConfigurationError(
            f"group={group!r} needs a namespace before a dot, and {NAME_LIMIT} "
            "characters at most, without half of a surrogate pair: such as "
            "'shop.mailer'"
        )


def _is_name(name: object, limit: int = NAME_LIMIT) -> TypeGuard[str]:
    """Whether it is a text that readers of the log let through."""
    if not isinstance(name, str) or not 0 < len(name) <= limit:
        return False
    return not any("\ud800" <= one <= "\udfff" for one in name)


def check_pause(topics_every: float) -> None:
    """Refuse a pause between two looks that is no number of seconds.

    Raises:
        ConfigurationError: why.
    """
    if not is_number(topics_every) or not 0 < topics_every <= _LONGEST_PAUSE:
        raise ConfigurationError(
            f"topics_every={topics_every!r} must be seconds above 0, and at most "
            f"{_LONGEST_PAUSE}"
        )


def check_interval(interval: float) -> None:
    """Refuse an interval out of bounds.

    Raises:
        ConfigurationError: it is no number of seconds, or too short or long.
    """
    least, most = SHORTEST_INTERVAL_MS / 1000, LONGEST_INTERVAL_MS / 1000
    if not is_number(interval) or not least <= interval <= most:
        raise ConfigurationError(
            f"interval={interval!r} must be seconds from {least:g} to {most:g}"
        )


def refuse_client(sender: Sender, what: str) -> FencedError:
    """Make the error for a process whose client's name another one has, too."""
    return FencedError(
        f"another process with the client id {sender.client_id!r} {what} in the group "
        f"{sender.group_id!r}: give each process a client id of its own, and end the "
        "old one before its successor starts"
    )


def name_setting(error: Exception) -> FencedError:
    """Say which setting is the client's name, where a service chooses that."""
    return FencedError(f"{error}. The client id is the pod's name, JOBS_LIB_POD")
