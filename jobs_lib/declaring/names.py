"""The names of apps, topics and groups: invalid ones are refused."""

from __future__ import annotations

import re
from typing import Any, cast

from jobs_lib.consuming.subscription import Telling
from jobs_lib.errors import ConfigurationError
from jobs_lib.naming import Exact, plain_name

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


def check_after(
    given: object, topic: str | Exact, group: str | Exact, what: str
) -> tuple[tuple[str | Exact, str | Exact], ...]:
    """Check the topics and groups that a consumer waits for, each named once.

    Args:
        given: the argument.
        topic: that the consumer reads.
        group: of the consumer.
        what: names the consumer in messages.

    Raises:
        ConfigurationError: it holds no pairs of names, names the consumer's own group,
            or several other topics.
    """
    pairs = check_pairs(given, what)
    for pair in pairs:
        if pair[1] == group:
            raise ConfigurationError(
                f"{what} waits for its own group, and would wait for ever: leave "
                f"{pair!r} out of `after`"
            )
    others = sorted({plain_name(one) for one, _ in pairs if one != topic})
    if len(others) > 1:
        raise ConfigurationError(
            f"{what} waits for groups that read {' and '.join(map(repr, others))}, and "
            "a record names its place in one other topic: name groups that read this "
            "topic, and one more at most"
        )
    return pairs


def check_pairs(
    given: object, what: str
) -> tuple[tuple[str | Exact, str | Exact], ...]:
    """Check pairs of a topic and a group to wait for, each named once.

    Args:
        given: the argument.
        what: names who waits, in messages.

    Raises:
        ConfigurationError: it holds no pairs of names.
    """
    if not isinstance(given, list | tuple | set | frozenset):
        raise _no_pairs(given, what)
    pairs: dict[tuple[str | Exact, str | Exact], None] = {}
    for pair in given:
        if not _is_pair(pair):
            raise _no_pairs(given, what)
        check_topic_name(plain_name(pair[0]))
        check_name(plain_name(pair[1]), "a consumer group")
        pairs[pair[0], pair[1]] = None
    return tuple(pairs)


def check_telling(
    done: object, derived_from: object, topic: str | Exact, what: str
) -> Telling:
    """Check what a consumer tells the group ``<group>.done``.

    Args:
        done: the argument.
        derived_from: the argument.
        topic: that the consumer reads.
        what: names the consumer in messages.

    Raises:
        ConfigurationError: they are none of their values, or do not go together.
    """
    if not isinstance(done, bool) and done != "sent":
        raise ConfigurationError(
            f"done of {what} is True, False or 'sent', not {_show(done)}"
        )
    if derived_from is None:
        return Telling(cast("bool", done))
    if not _is_pair(derived_from):
        raise ConfigurationError(
            f"derived_from of {what} is {_show(derived_from)}: give the topic that the "
            "records are made of, and the group that tells how far they were made, as "
            'in ("flights", "flight-tracker.done")'
        )
    pair = cast("tuple[str | Exact, str | Exact]", tuple(cast("Any", derived_from)))
    check_topic_name(plain_name(pair[0]))
    check_name(plain_name(pair[1]), "a consumer group")
    if pair[0] == topic:
        raise ConfigurationError(
            f"{what} reads {topic!r}, which cannot be derived from itself: leave "
            "derived_from out"
        )
    if not done:
        raise ConfigurationError(
            f"derived_from of {what} is for its group `.done`, and that is told "
            "nothing: add done=True, or leave derived_from out"
        )
    return Telling(cast("bool", done), pair)


def _is_pair(given: object) -> bool:
    return (
        isinstance(given, list | tuple)
        and len(given) == 2
        and all(isinstance(name, str | Exact) for name in given)
    )


def _no_pairs(given: object, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the `after` of {what} is {_show(given)}: give pairs of a topic and a group, "
        'as in [("flights", "flight-tracker")]'
    )


def _show(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 60 else f"{text[:60]}… ({len(text)} characters)"
