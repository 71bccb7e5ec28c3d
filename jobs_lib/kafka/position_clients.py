"""The clients of one thread that asks Kafka where topics and groups are.

They only read. Groups are asked by a consumer that never joins, because the admin
client's requests to a group's coordinator can abort the whole process where the broker
dies meanwhile (confluentinc/librdkafka issue 4605). Ends are asked by one, too: after a
broker's crash the admin client's `list_offsets` fails for as long as the client lives.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)

from jobs_lib.errors import AccessError
from jobs_lib.kafka.client import as_uuid, make_admin, make_consumer, poll_events
from jobs_lib.kafka.refusal import SILENT, SOON, explain, no_answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from confluent_kafka.admin import AdminClient

    from jobs_lib.settings import Settings

    Leaders = dict[str, Mapping[int, bool]]
    """By topic and partition, whether it has a leader."""
    Offsets = Mapping[str, Mapping[int, int]]
    """By topic and partition."""

IDLE = 60.0
"""Seconds after which the client of a group is closed that nobody asks for."""
_TRIES, _PAUSE = 10, 0.2
_UNKNOWN = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC}
"""Errors of a client that has not heard of a partition, or of any broker."""
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}
_DENIED = KafkaError.GROUP_AUTHORIZATION_FAILED
_DENIED_SECONDS = 30.0
_SILENT_SECONDS = 1.0
"""How long a group may take apart that has not answered there either: others wait for
their turn, and its client looks for its coordinator all the time."""
_PATIENT = 10
"""Each so many times such a group gets the whole time, since it may only be slow."""
_MOST_EVENTS = 100

_PLACES = {"start": OFFSET_BEGINNING, "end": OFFSET_END, "high": OFFSET_END}
Kind = Literal["start", "end", "high", "committed"]


class Request(NamedTuple):
    """Asks for one kind of offsets of several topics."""

    kind: Kind
    group: str
    """Empty if they are those of a log."""


class PositionClients:
    """The clients of one thread."""

    def __init__(self, settings: Settings, group: str, timeout: float) -> None:
        self._settings = settings
        self._group = group
        self._timeout = timeout
        self._admin: AdminClient | None = None
        self._consumers: dict[tuple[str, bool], Consumer] = {}
        """By group, and whether it sees what is not committed yet."""
        self._used_at: dict[tuple[str, bool], float] = {}
        self.ids: dict[str, UUID] = {}
        """Those of the topics that were found last; none from an old broker."""
        self._refusals: deque[AccessError] = deque(maxlen=1)
        self._denied: dict[str, tuple[float, AccessError]] = {}
        """Groups that may not be asked for: when to ask again, and the reason."""
        self._silent: dict[tuple[Kind, str], int] = {}
        """How often in a row a request was not answered in time."""

    def close(self) -> None:
        """Close all of them."""
        for client in list(self._consumers):
            self._close(client)
        self._admin = None

    def close_idle(self) -> None:
        """Close clients that were not used for a while; run the others' callbacks."""
        before = time.monotonic() - IDLE
        for client in [one for one, at in self._used_at.items() if at < before]:
            self._close(client)
        self._run_callbacks()
        self._refusals.clear()

    def find_partitions(
        self, topics: Iterable[str]
    ) -> tuple[Leaders, dict[str, Exception]]:
        """Find the partitions of topics that exist, and whether each has a leader.

        Returns also why nothing is said of some topics, of which some may exist.

        Raises:
            AccessError: Kafka does not let this client in.
            UnavailableError: no broker answers in time.
        """
        if self._admin is None:
            self._admin = make_admin(self._settings, self._refusals.append)
        futures = cast("Any", self._admin).describe_topics(
            TopicCollection(sorted(topics)), request_timeout=self._timeout
        )
        found: Leaders = {}
        failures: dict[str, Exception] = {}
        self.ids = {}
        for topic, future in futures.items():
            try:
                described = future.result()
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                if error.code() in SILENT:
                    explained = self._explain(error, topic)
                    # It asks the controller alone, and if that has died, for minutes:
                    # a new client hears of the next one.
                    self._admin = None
                    raise explained from None
                if error.code() not in _MISSING:
                    failures[topic] = self._explain(error, topic)
                continue
            found[topic] = {
                one.id: one.leader is not None for one in described.partitions
            }
            if (id_ := as_uuid(described.topic_id)) is not None:
                self.ids[topic] = id_
        return found, failures

    def count_silent(self, request: Request) -> int:
        """Count how often in a row a request was not answered in time."""
        return self._silent.get(request, 0)

    def read(
        self,
        kind: Kind,
        group: str,
        topics: Leaders,
        at_most: float | None = None,
    ) -> Offsets | None:
        """Ask for one kind of offsets; ``group`` is empty if they are those of a log.

        Returns None if nothing is known now. It may take ``at_most`` seconds; None
        leaves it to how often the request was silent.

        Raises:
            AccessError: Kafka denies the right to it.
            UnavailableError: no broker answers in time.
        """
        at = _PLACES.get(kind, OFFSET_INVALID)
        # One without a leader would keep the answers for all others back.
        places = [
            TopicPartition(topic, number, at)
            for topic, partitions in topics.items()
            for number, has_leader in partitions.items()
            if has_leader or group
        ]
        if group and time.monotonic() < self._denied.get(group, (0.0,))[0]:
            raise self._denied[group][1]
        # Every client needs a group's name.
        name = group or self._group
        consumer = self._get(name, sees_uncommitted=kind == "high")
        ask = consumer.committed if group else consumer.offsets_for_times
        request = Request(kind, group)
        if at_most is None and self.count_silent(request) % _PATIENT:
            at_most = _SILENT_SECONDS
        timeout = self._timeout if at_most is None else min(self._timeout, at_most)
        until = math.inf if at_most is None else time.monotonic() + timeout
        for left in reversed(range(_TRIES)):
            is_last = not left or time.monotonic() >= until
            try:
                found = ask(places, timeout=timeout) if places else []
                if is_last or not self._refresh(consumer, found, timeout):
                    self._denied.pop(group, None)
                    self._silent.pop(request, None)
                    return _sort(found)
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                is_last = is_last or time.monotonic() >= until
                if error.code() in SILENT:
                    self._silent[request] = self.count_silent(request) + 1
                if error.code() not in SOON or (
                    is_last and error.code() not in _MISSING
                ):
                    told = group or ", ".join(sorted(topics))
                    raise self._explain(error, told) from None
            if is_last:
                break
            time.sleep(_PAUSE)
        # A topic was deleted just now: the next round leaves it out.
        return None

    def _refresh(
        self, consumer: Consumer, found: Iterable[TopicPartition], timeout: float
    ) -> bool:
        """Let a client learn of partitions that are new; False if it knew them all.

        It knows the partitions of some time ago.
        """
        new = {
            at.topic
            for at in found
            if at.error is not None and at.error.code() in _UNKNOWN
        }
        for topic in new:
            consumer.list_topics(topic, timeout=timeout)
        return bool(new)

    def _get(self, group: str, *, sees_uncommitted: bool) -> Consumer:
        """The client of a group, which never joins it."""
        client = group, sees_uncommitted
        if client not in self._consumers:
            self._consumers[client] = make_consumer(
                self._settings,
                group,
                self._refusals.append,
                sees_uncommitted=sees_uncommitted,
            )
        self._used_at[client] = time.monotonic()
        return self._consumers[client]

    def _close(self, client: tuple[str, bool]) -> None:
        self._consumers.pop(client).close()
        del self._used_at[client]

    def _run_callbacks(self) -> None:
        if self._admin is not None:
            poll_events(self._admin)
        for (group, _), consumer in self._consumers.items():
            for _ in range(_MOST_EVENTS):
                message = consumer.poll(0)
                if message is None:
                    break
                # The request itself only waits in vain for a coordinator.
                error = message.error()
                if error is not None and error.code() == _DENIED:
                    self._deny(group, explain(error, self._settings, group, "DESCRIBE"))

    def _deny(self, group: str, refusal: Exception) -> None:
        """Ask for a group again only after a while, since the answer is a timeout."""
        assert isinstance(refusal, AccessError)
        self._denied[group] = (time.monotonic() + _DENIED_SECONDS, refusal)

    def _explain(self, error: KafkaError, name: str) -> Exception:
        self._run_callbacks()
        # Negative codes are the client's own: no broker has answered.
        is_own = error.code() < 0
        if is_own and name in self._denied:
            self._deny(name, self._denied[name][1])
            return self._denied[name][1]
        if is_own and self._refusals:
            return self._refusals[-1]
        explained = explain(error, self._settings, name, "DESCRIBE")
        if isinstance(explained, KafkaException) and (is_own or error.code() in SOON):
            return no_answer(self._settings, f"{error.str()} ({error.name()})")
        return explained


def _sort(places: Iterable[TopicPartition]) -> Offsets:
    """The offsets by topic and partition; those are left out that have none."""
    found: dict[str, dict[int, int]] = {}
    for at in places:
        if at.error is None and at.offset >= 0:
            found.setdefault(at.topic, {})[at.partition] = at.offset
    return found
