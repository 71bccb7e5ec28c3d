"""The names of apps, topics and groups: invalid ones are refused."""

from __future__ import annotations

import re

from jobs_lib.errors import ConfigurationError

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
"""The names that Kafka accepts."""
_LONGEST = 200
"""The most characters of an app's name, and of a group's."""


def check_topic_name(name: object) -> None:
    """Refuse a name that Kafka accepts for no topic.

    Raises:
        ConfigurationError: the name is empty or invalid.
    """
    if isinstance(name, str) and _TOPIC.fullmatch(name) and name not in {".", ".."}:
        return
    raise ConfigurationError(
        f"{_show(name)} is no name for a topic: give 1 to 249 letters, digits and . _ -"
    )


def check_name(name: object, what: str) -> None:
    """Refuse a name that is empty, or no text of one printable line.

    Args:
        name: the given value.
        what: the kind of thing, as in ``a consumer group``.

    Raises:
        ConfigurationError: the name is refused.
    """
    if (
        isinstance(name, str)
        and 0 < len(name) <= _LONGEST
        and name.isprintable()
        and name == name.strip()
    ):
        return
    raise ConfigurationError(
        f"{_show(name)} is no name for {what}: give 1 to {_LONGEST} printable "
        "characters, such as 'shop'"
    )


def _show(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 60 else f"{text[:60]}… ({len(text)} characters)"
