"""Refuse records and topics that Kafka or the tables cannot take, at the door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from jobs_lib.errors import ConfigurationError, PayloadError
from jobs_lib.reasons import count_bytes, find_header_fault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs_lib.settings import Settings

KEY_LIMIT = 1_000
"""Bytes that a key may have: indexes hold it, those of consumers as well."""
_LONGEST_CHARACTER = 4
"""Bytes of UTF-8."""
LARGEST_MESSAGE = "max.message.bytes"
"""A topic's limit in Kafka."""
_LARGEST_SENT = "message.max.bytes"
"""The same limit in the relay's client."""
_BY_DEFAULT = 1_000_000
"""The client's default limit; a broker takes a little more."""
VERSIONS = range(2**63)
"""What consumers can compare: the values of a bigint from 0 on."""
_TOMBSTONES = "delete.retention.ms"
_TWO_DAYS_MS = 172_800_000
COMPACTION_LAG = "min.compaction.lag.ms"
"""A topic's setting in Kafka: how long each record is kept at least."""
_LEAST = {_TOMBSTONES, COMPACTION_LAG}
"""Settings whose default is the least that will do."""
_COMPRESSION = "compression.type"
_MAYBE_PLAIN = {"producer", "uncompressed"}
"""Values of it by which records may lie in the topic as they are."""


class Limits(Protocol):
    """What the checks need to know of a declared topic or stream."""

    @property
    def name(self) -> str:
        """Its name in Kafka."""

    @property
    def compacted(self) -> bool:
        """Whether only the last record of each key is kept."""

    @property
    def largest(self) -> int:
        """Bytes that a record's key and value may have."""


def check_key(topic: Limits, key: str | None) -> None:
    """Refuse a key that the outbox cannot store.

    Raises:
        PayloadError: the key is missing, not text, or too long.
    """
    if key is None:
        if topic.compacted:
            raise PayloadError(
                f"the topic {topic.name!r} is compacted, so every record needs a key"
            )
        return
    if not isinstance(key, str) or not 0 < count_bytes(key) <= KEY_LIMIT or "\0" in key:
        given = f"{len(key)} characters" if isinstance(key, str) else type(key).__name__
        raise PayloadError(
            f"a key of the topic {topic.name!r} must have 1 to {KEY_LIMIT} bytes of "
            f"UTF-8 without NUL, and this one does not ({given}): give a short "
            "stable id, or a digest"
        )


def is_short(key: str) -> bool:
    """Whether a text is not too long for a key.

    Most are so short that nothing must be encoded to tell.
    """
    return len(key) <= KEY_LIMIT // _LONGEST_CHARACTER or len(key.encode()) <= KEY_LIMIT


def check_version(topic: Limits, version: object) -> None:
    """Refuse a version that is no bigint, or below 0: consumers do not read it.

    Raises:
        PayloadError: the version is none that consumers read.
    """
    if version is None or (type(version) is int and version in VERSIONS):
        return
    raise PayloadError(
        f"a version of the topic {topic.name!r} must be an int of 64 bits from 0 "
        f"on, or None, and this one is {explain_version(version)}: give a number that "
        "grows with every change of the key"
    )


def explain_version(version: object) -> str:
    """Say what is wrong with a version, and not which one it is."""
    if type(version) is int:
        return "below 0" if version < 0 else "larger"
    return f"of the type {type(version).__name__}"


def check_headers(topic: Limits, headers: object) -> None:
    """Refuse headers that are no text.

    Raises:
        PayloadError: a header is no text.
    """
    if headers is not None and (fault := find_header_fault(headers)) is not None:
        raise PayloadError(
            f"the headers of a record of the topic {topic.name!r} must map str to "
            f"str, in UTF-8 without NUL, and {fault}"
        )


def check_size(topic: Limits, key: str | None, value: bytes) -> None:
    """Refuse a record that is too large for the broker, as far as is known here.

    Raises:
        PayloadError: key and value are larger than the topic's messages may be.
    """
    size = len(value) + len(key or "")
    if size > topic.largest:
        raise PayloadError(
            f"a record of the topic {topic.name!r} has {size:,} bytes, and a message "
            f"there may have {topic.largest:,}: send a reference to the large part, or "
            f"declare the topic with config={{{LARGEST_MESSAGE!r}: '{2 * size}'}} and "
            "run `jobs-lib topics apply`"
        )


def find_largest(config: Mapping[str, str], settings: Settings) -> int:
    """Return how many bytes a topic's message may have: as declared, or by default."""
    declared = config.get(LARGEST_MESSAGE) or settings.kafka.get(_LARGEST_SENT)
    return int(declared) if declared and declared.isdecimal() else _BY_DEFAULT


def make_config(
    name: str, given: Mapping[str, str], *, compacted: bool
) -> dict[str, str]:
    """Make the settings of a topic in Kafka: the defaults, and those that are given.

    Raises:
        ConfigurationError: tombstones would be kept too shortly, or a limit is no
            number.
    """
    config = {_COMPRESSION: "lz4", "cleanup.policy": "delete"}
    if compacted:
        config |= {"cleanup.policy": "compact", _TOMBSTONES: str(_TWO_DAYS_MS)}
    config |= {key: str(value) for key, value in given.items()}
    kept = config.get(_TOMBSTONES)
    if kept is not None and not (kept.isdecimal() and int(kept) >= _TWO_DAYS_MS):
        raise ConfigurationError(
            f"the topic {name!r} would keep tombstones for {_TOMBSTONES}={kept}: a "
            "consumer that is down for longer would never see what was deleted. Give "
            f"{_TWO_DAYS_MS} (two days) or more"
        )
    check_config(name, config)
    return config


def is_as_good(name: str, found: str, default: str) -> bool:
    """Whether a topic may keep another value of a setting than the default.

    An operator who keeps tombstones for longer, or compresses in another way, has done
    so on purpose.
    """
    if name == _COMPRESSION:
        return found not in _MAYBE_PLAIN
    return name in _LEAST and found.isdecimal() and int(found) >= int(default)


def check_config(name: str, config: Mapping[str, str]) -> None:
    """Refuse a declared limit that is no number.

    Raises:
        ConfigurationError: the limit is no number.
    """
    given = config.get(LARGEST_MESSAGE)
    if given is not None and not (given.isdecimal() and int(given)):
        raise ConfigurationError(
            f"the topic {name!r} is declared with {LARGEST_MESSAGE}={given!r}: give a "
            "number of bytes, such as '2000000'"
        )
