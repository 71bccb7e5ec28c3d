"""Ask Kafka, before a service starts, whether it has the rights that it needs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import KafkaError, KafkaException, TopicCollection

from jobs_lib.kafka.client import make_admin, read_topics
from jobs_lib.kafka.members import describe_groups
from jobs_lib.kafka.refusal import deny, find_refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.settings import Settings

_SECONDS = 5.0
_PAUSE = 0.1
_SOON = {
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}
"""Errors of a group whose coordinator has just started or was just chosen."""


@dataclass
class Needs:
    """The topics and groups that a service uses in Kafka."""

    reads: set[str] = field(default_factory=set)
    """Topics."""
    writes: set[str] = field(default_factory=set)
    joins: set[str] = field(default_factory=set)
    """Consumer groups."""
    follows: set[str] = field(default_factory=set)
    """Consumer groups whose assignments or offsets it asks for."""
    measures: set[str] = field(default_factory=set)
    """Topics of which it asks how far other groups are."""

    def topics(self) -> dict[str, set[str]]:
        """The rights needed on each topic."""
        return _gather(READ=self.reads, WRITE=self.writes, DESCRIBE=self.measures)

    def groups(self) -> dict[str, set[str]]:
        """The rights needed on each group."""
        return _gather(READ=self.joins, DESCRIBE=self.follows)


def check_access(settings: Settings, needs: Needs) -> None:
    """Refuse to start a service that Kafka would refuse later, again and again.

    This does not check topics and groups that do not exist, nor transactional ids,
    whose rights a broker does not reveal.

    Raises:
        AccessError: Kafka does not let this client in, or denies it a right.
        UnavailableError: no broker answers.
    """
    # It says the most about brokers that do not answer or do not let it in.
    read_topics(settings, _SECONDS)
    admin = cast("Any", make_admin(settings))
    options = {"include_authorized_operations": True, "request_timeout": _SECONDS}

    def ask_topic(name: str) -> frozenset[str] | KafkaError:
        asked = admin.describe_topics(TopicCollection([name]), **options)[name]
        try:
            # A broker that is too old to know the rights returns none.
            found = asked.result().authorized_operations or ()
        except KafkaException as error:
            failure: KafkaError = error.args[0]
            return failure
        return frozenset(one.name for one in found)

    def ask_group(name: str) -> frozenset[str] | KafkaError:
        found = describe_groups(settings, [name], _SECONDS, rights=True)[name]
        return found if isinstance(found, KafkaError) else found.rights

    deadline = time.monotonic() + _SECONDS
    for name, rights in needs.topics().items():
        _compare(settings, "topic", name, rights, _read(ask_topic, name, deadline))
    for name, rights in needs.groups().items():
        granted = _read(ask_group, name, deadline)
        _compare(settings, "consumer group", name, rights, granted)


def _read(
    ask: Callable[[str], frozenset[str] | KafkaError], name: str, deadline: float
) -> frozenset[str] | KafkaError:
    """The rights on a topic or group, or the error that Kafka answers instead."""
    while True:
        answer = ask(name)
        if not isinstance(answer, KafkaError) or (
            answer.code() not in _SOON or time.monotonic() > deadline
        ):
            return answer
        time.sleep(_PAUSE)


def _compare(
    settings: Settings,
    kind: str,
    name: str,
    rights: set[str],
    granted: frozenset[str] | KafkaError,
) -> None:
    if isinstance(granted, KafkaError):
        both = " and ".join(sorted(rights))
        if (refusal := find_refusal(granted, settings, name, both)) is not None:
            raise refusal
    elif granted:
        for right in sorted(rights):
            if right not in granted:
                raise deny(settings, f"{kind} {name!r}", right)


def _gather(**names: set[str]) -> dict[str, set[str]]:
    """Collect the rights by name."""
    found: dict[str, set[str]] = {}
    for right, of_right in names.items():
        for name in of_right:
            found.setdefault(name, set()).add(right)
    return found
