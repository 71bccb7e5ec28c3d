"""Names and intervals that members are given: what cannot be used is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from jobs_lib.backoff import is_number
from jobs_lib.coordination.messages import (
    LONGEST_INTERVAL_MS,
    NAME_LIMIT,
    SHORTEST_INTERVAL_MS,
)
from jobs_lib.errors import ConfigurationError, FencedError

if TYPE_CHECKING:
    from collections.abc import Collection

    from jobs_lib.coordination.messages import Sender

_GROUP_NAME = re.compile(r"[^.\s]+(\.[^.\s]+)+")


def check_names(
    log: str, group: str, client_id: str, topics: Collection[str] | None
) -> None:
    """Refuse names that cannot be used.

    Raises:
        ConfigurationError: which, and why.
    """
    if not log:
        raise ConfigurationError("the coordination log has no name: give log=…")
    check_group(group)
    if not isinstance(client_id, str) or not 0 < len(client_id) <= NAME_LIMIT:
        raise ConfigurationError(
            f"client_id={client_id!r} must have 1 to {NAME_LIMIT} characters: a name "
            "that is the process's own, and the same after a restart"
        )
    if topics is not None and (
        isinstance(topics, str) or not topics or not all(topics)
    ):
        raise ConfigurationError(
            f"topics={topics!r} must be a list of names, with one at least"
        )


def check_group(group: str) -> None:
    """Refuse a group's name without a namespace.

    Raises:
        ConfigurationError: it has none, or is too long.
    """
    if not _GROUP_NAME.fullmatch(group) or len(group) > NAME_LIMIT or group == "-.-":
        raise ConfigurationError(
            f"group={group!r} needs a namespace before a dot, and {NAME_LIMIT} "
            "characters at most: such as 'shop.mailer'"
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
