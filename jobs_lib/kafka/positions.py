"""How far partitions and groups are: one map for all of a process that ask.

A thread of its own asks Kafka, at most once in an interval, for all that was asked for
since: one request for each kind of offset and broker, and one for each group. Who asks
gets the last answer at once, and its age. So no slow or dead broker holds anybody up,
and more partitions or more who ask cost no more requests.

What is not answered is asked for apart, by a second thread with clients of its own,
until it is answered quickly again. So a round never waits for what is known to be
silent, however many groups that is. A process has two such threads, and two clients of
a group at most.

It only reads. Groups are asked by a consumer that never joins, because the admin
client's requests to a group's coordinator can abort the whole process where the broker
dies meanwhile (confluentinc/librdkafka issue 4605). Ends are asked by one, too: after a
broker's crash the admin client's `list_offsets` fails for as long as the client lives.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from dataclasses import dataclass, field
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

from jobs_lib import telemetry
from jobs_lib.errors import AccessError, ConfigurationError, JobsError
from jobs_lib.kafka.client import as_uuid, make_admin, make_consumer, poll_events
from jobs_lib.kafka.dependencies import check_ends
from jobs_lib.kafka.refusal import SILENT, SOON, explain, no_answer
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from uuid import UUID

    from confluent_kafka.admin import AdminClient

    from jobs_lib.settings import Settings

    _Partitions = dict[str, Mapping[int, bool]]
    _Offsets = Mapping[str, Mapping[int, int]]

_INTERVAL = 1.0
_TIMEOUT = 5.0
WITHIN = 15.0
"""Seconds: older answers are not given, unless the caller says so."""
_IDLE = 60.0
"""Seconds after which the client of a group is closed that nobody asks for."""
_TRIES, _PAUSE = 10, 0.2
_UNKNOWN = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC}
"""Errors of a client that has not heard of a partition, or of any broker."""
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}
_DENIED = KafkaError.GROUP_AUTHORIZATION_FAILED
_DENIED_SECONDS = 30.0
_QUICK_SECONDS = 1.0
"""How long an answer may take before it is asked for apart."""
_NEXT_SECONDS = 0.1
"""How long, if another one was silent in the same round: a node that dies silences many
groups at once, and the others' answers must not become old meanwhile."""
_SILENT_SECONDS = 1.0
"""How long a group may take apart that has not answered there either: others wait for
their turn, and its client looks for its coordinator all the time."""
_PATIENT = 10
"""Each so many times such a group gets the whole time, since it may only be slow."""
_MOST_EVENTS = 100
_LAST_SECONDS = 1.0
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")

_PLACES = {"start": OFFSET_BEGINNING, "end": OFFSET_END, "high": OFFSET_END}
Kind = Literal["start", "end", "high", "committed"]


class _Question(NamedTuple):
    kind: Kind
    topic: str
    group: str = ""


class _Request(NamedTuple):
    """Asks for one kind of offsets of several topics."""

    kind: Kind
    group: str


@dataclass(frozen=True, slots=True)
class KnownOffsets:
    """Offsets of one topic, all of them read at the same time."""

    partitions: int
    """How many partitions the topic had."""
    offsets: Mapping[int, int]
    """By partition. Those are missing for which Kafka gave none: the group has no
    offset there, or the partition has no leader."""
    read_at: float
    """By ``time.monotonic()``, before Kafka was asked."""
    above: Mapping[int, int] = field(default_factory=dict)
    """Offsets of a group that lie above the ends of their partitions, if they were
    compared; these are not in ``offsets``."""

    @property
    def age(self) -> float:
        """Seconds since Kafka was asked."""
        return time.monotonic() - self.read_at

    @property
    def is_complete(self) -> bool:
        """Whether the offset of each partition is known."""
        return len(self.offsets) == self.partitions


class Positions:
    """Where topics begin and end, and how far groups are; see the module.

    Each method returns None for what is not known: it was never asked for, the topic
    does not exist or is not visible, or the last answer is too old. A question makes
    the next answer come.

    Args:
        settings: where Kafka is.
        group: names the client that asks where topics begin and end, since every client
            has the name of a group; by default the pod's name. Kafka should allow this
            client to describe it, or it logs a refusal again and again.
        interval: seconds between the beginnings of two rounds of requests, at least.
        timeout: seconds for the answer to one request.
    """

    def __init__(
        self,
        settings: Settings,
        group: str | None = None,
        *,
        interval: float = _INTERVAL,
        timeout: float = _TIMEOUT,
    ) -> None:
        self._interval = interval
        self._lock = threading.Lock()
        self._asked: set[_Question] = set()
        """What was asked for since the last round."""
        self._wanted = threading.Event()
        self._next_at = 0.0
        """When the next round may begin."""
        self._answers: dict[_Question, KnownOffsets] = {}
        self._checked: dict[_Question, _Checked] = {}
        self._ids: dict[str, UUID] = {}
        """Those of topics: one that is made anew has another one."""
        self._answered: list[Callable[[], object]] = []
        self._telling = threading.Lock()
        """Answers are told one after another, so that the last one counts."""
        self._apart: set[_Request] = set()
        """Those that are asked apart, since they were not answered quickly."""
        self._left: dict[_Request, _Partitions] = {}
        """What is to be asked apart in the next round there."""
        self._is_left = threading.Event()
        name = group or settings.pod
        self._kafka = _Clients(settings, name, timeout)
        self._patient = _Clients(settings, name, timeout)
        self._loop = Loop("positions", self._work, ended=self._kafka.close)
        self._loop_apart = Loop(
            "positions apart", self._work_apart, ended=self._patient.close
        )

    def listen(self, answered: Callable[[], object]) -> None:
        """Call a function after each answer; add it before :meth:`start`.

        So nobody waits for a group that does not answer, except who asked for it. It is
        called after a round without any answer, too. It is called in a thread that
        asks, never in two at once, and may ask for the next round.
        """
        self._answered.append(answered)

    def start(self) -> None:
        """Start the threads; they make no connection before somebody asks."""
        self._loop.start()
        self._loop_apart.start()

    def stop(self) -> None:
        """Stop the threads, and close their clients."""
        until = time.monotonic() + _LAST_SECONDS
        loops = (self._loop, self._loop_apart)
        for loop in loops:
            loop.stopping.set()
        self._wanted.set()
        self._is_left.set()
        for loop in loops:
            # It may wait for an answer, and holds nothing that somebody waits for.
            loop.stop(max(0.0, until - time.monotonic()))

    def ask_starts(self, topic: str, *, within: float = WITHIN) -> KnownOffsets | None:
        """The offsets of the oldest records of a topic's partitions.

        Args:
            topic: by its name in Kafka.
            within: seconds, the age of the answer at most.

        Raises:
            ConfigurationError: no topic can have this name.
        """
        return self._ask(_Question("start", topic), within)

    def ask_ends(self, topic: str, *, within: float = WITHIN) -> KnownOffsets | None:
        """The ends of a topic's partitions: where the next committed records will be.

        What follows the first record of an open transaction lies behind the end.

        Args:
            topic: by its name in Kafka.
            within: seconds, the age of the answer at most.

        Raises:
            ConfigurationError: no topic can have this name.
        """
        return self._ask(_Question("end", topic), within)

    def ask_high(self, topic: str, *, within: float = WITHIN) -> KnownOffsets | None:
        """The high watermarks of a topic's partitions: where the next records will be.

        What precedes them may still be committed or aborted.

        Args:
            topic: by its name in Kafka.
            within: seconds, the age of the answer at most.

        Raises:
            ConfigurationError: no topic can have this name.
        """
        return self._ask(_Question("high", topic), within)

    def ask_committed(
        self, group: str, topic: str, *, within: float = WITHIN
    ) -> KnownOffsets | None:
        """The offsets that a group has committed to Kafka.

        An unknown group is one without offsets.

        Args:
            group: any group, by its name in Kafka.
            topic: by its name in Kafka.
            within: seconds, the age of the answer at most.

        Raises:
            ConfigurationError: no group or topic can have this name.
        """
        if not group:
            raise ConfigurationError("name the group whose offsets you ask for, not ''")
        return self._ask(_Question("committed", topic, group), within)

    def ask_handled(
        self, group: str, topic: str, *, within: float = WITHIN
    ) -> KnownOffsets | None:
        """The offsets that a group has committed, as far as the topic has them.

        An offset above the end of its partition says nothing: the topic was made anew,
        or has lost records. It is left out, and given apart.

        Args:
            group: any group, by its name in Kafka.
            topic: by its name in Kafka.
            within: seconds, the age of the answer at most.

        Raises:
            ConfigurationError: no group or topic can have this name.
        """
        committed = self.ask_committed(group, topic, within=within)
        # The end of a topic only grows, as long as it is the same topic.
        high = self.ask_high(topic, within=math.inf)
        if committed is None or high is None:
            return None
        handled = self._check(_Question("committed", topic, group), committed, high)
        if committed.offsets and not (handled.offsets or handled.above):
            # The ends of none of its partitions are known.
            return None
        return handled

    def _check(
        self, question: _Question, committed: KnownOffsets, high: KnownOffsets
    ) -> KnownOffsets:
        """Compare a group's offsets with the ends once, however many ask."""
        with self._lock:
            known = self._checked.get(question)
            before: Mapping[int, int] = {}
            if known is not None:
                # Equal ones may be long.
                if known.committed is committed and known.high is high:
                    return known.handled
                before = known.handled.offsets
            handled = check_ends(committed, high, before)
            self._checked[question] = _Checked(committed, high, handled)
            return handled

    def _ask(self, question: _Question, within: float) -> KnownOffsets | None:
        if not _TOPIC.fullmatch(question.topic):
            raise ConfigurationError(
                f"no topic can be called {question.topic!r}: in Kafka its name has up "
                "to 249 letters, digits, dots, hyphens and underscores"
            )
        with self._lock:
            self._asked.add(question)
            answer = self._answers.get(question)
        self._wanted.set()
        return answer if answer is not None and answer.age <= within else None

    # The first thread

    def _work(self) -> Iterator[None]:
        while True:
            self._wanted.wait()
            # A round that fails is followed by none sooner than another one.
            self._loop.stopping.wait(self._next_at - time.monotonic())
            self._wanted.clear()
            if self._loop.stopping.is_set():
                return
            began = time.monotonic()
            self._next_at = began + self._interval
            with self._lock:
                asked, self._asked = self._asked, set()
            self._answer(asked)
            yield

    def _answer(self, asked: Collection[_Question]) -> None:
        """Ask Kafka; a topic or group of which nothing is said keeps no others back."""
        self._kafka.close_idle()
        found, failures = self._kafka.find_partitions({one.topic for one in asked})
        self._forget_others(self._kafka.ids)
        requests = self._gather(asked, found)
        has_answer, at_most = False, _QUICK_SECONDS
        for request in self._leave(requests):
            read_at = time.monotonic()
            try:
                offsets = self._kafka.read(*request, requests[request], at_most)
            except (JobsError, KafkaException):
                # The other thread tells why, unless it was only slow.
                self._leave({request: requests[request]}, is_silent=True)
                at_most = _NEXT_SECONDS
                continue
            if offsets is not None:
                has_answer = True
                self._note(request, requests[request], offsets, read_at)
        if not has_answer:
            self._tell()
        for failure in failures:
            if not has_answer and not isinstance(failure, AccessError):
                raise failure
            # It may last: the next round comes as soon as without it.
            telemetry.emit("loop.failed", loop=self._loop.name, error=failure)

    def _gather(
        self, asked: Collection[_Question], found: _Partitions
    ) -> dict[_Request, _Partitions]:
        """Put questions together to requests; leave out topics that are gone."""
        requests: dict[_Request, _Partitions] = {}
        # The ends come last: no end that is known is older than a group's offset then.
        for one in sorted(asked, key=lambda one: not one.group):
            if one.topic in found:
                of_request = requests.setdefault(_Request(one.kind, one.group), {})
                of_request[one.topic] = found[one.topic]
            else:
                # Of a topic that is gone nothing is known.
                with self._lock:
                    self._answers.pop(one, None)
        return requests

    def _forget_others(self, ids: Mapping[str, UUID]) -> None:
        """Forget what was said of topics that were made anew."""
        anew = {topic for topic, id_ in ids.items() if self._ids.get(topic) != id_}
        if not anew:
            return
        self._ids |= ids
        with self._lock:
            for known in (self._answers, self._checked):
                for one in [one for one in known if one.topic in anew]:
                    del known[one]

    def _leave(
        self, requests: Mapping[_Request, _Partitions], *, is_silent: bool = False
    ) -> list[_Request]:
        """Leave silent ones to the other thread; returns those that are not."""
        with self._lock:
            if is_silent:
                self._apart |= requests.keys()
            left = {
                one: topics for one, topics in requests.items() if one in self._apart
            }
            self._left |= left
        if left:
            self._is_left.set()
        return [one for one in requests if one not in left]

    # The second thread

    def _work_apart(self) -> Iterator[None]:
        while True:
            if self._is_left.wait(_IDLE):
                self._is_left.clear()
            if self._loop_apart.stopping.is_set():
                return
            self._answer_apart()
            yield
            self._loop_apart.stopping.wait(self._interval)

    def _answer_apart(self) -> None:
        """Ask for what was silent; who was so most often comes last."""
        self._patient.close_idle()
        with self._lock:
            left, self._left = self._left, {}
        for request in sorted(left, key=self._patient.count_silent):
            if self._loop_apart.stopping.is_set():
                return
            read_at = time.monotonic()
            try:
                offsets = self._patient.read(*request, left[request])
            except (JobsError, KafkaException) as error:
                telemetry.emit("loop.failed", loop=self._loop.name, error=error)
                continue
            is_quick = time.monotonic() <= read_at + _QUICK_SECONDS
            if offsets is not None:
                self._note(request, left[request], offsets, read_at)
            if is_quick:
                with self._lock:
                    self._apart.discard(request)

    # Both

    def _note(
        self, request: _Request, asked: _Partitions, found: _Offsets, read_at: float
    ) -> None:
        """Keep an answer, and tell of it."""
        with self._lock:
            for topic, partitions in asked.items():
                question = _Question(request.kind, topic, request.group)
                known = self._answers.get(question)
                # The other thread may have asked later, and be told sooner.
                if known is None or known.read_at <= read_at:
                    self._answers[question] = KnownOffsets(
                        len(partitions), found.get(topic, {}), read_at
                    )
        self._tell()

    def _tell(self) -> None:
        with self._telling:
            for answered in self._answered:
                answered()


class _Checked(NamedTuple):
    """A group's offsets, the ends that they were compared with, and what was found."""

    committed: KnownOffsets
    high: KnownOffsets
    handled: KnownOffsets


class _Clients:
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
        before = time.monotonic() - _IDLE
        for client in [one for one, at in self._used_at.items() if at < before]:
            self._close(client)
        self._run_callbacks()
        self._refusals.clear()

    def find_partitions(
        self, topics: Iterable[str]
    ) -> tuple[_Partitions, list[Exception]]:
        """Find the partitions of topics that exist, and whether each has a leader.

        Returns also why Kafka does not show it some topics.

        Raises:
            AccessError: Kafka does not let this client in.
            UnavailableError: no broker answers in time.
        """
        if self._admin is None:
            self._admin = make_admin(self._settings, self._refusals.append)
        futures = cast("Any", self._admin).describe_topics(
            TopicCollection(sorted(topics)), request_timeout=self._timeout
        )
        found: _Partitions = {}
        failures: list[Exception] = []
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
                    failures.append(self._explain(error, topic))
                continue
            found[topic] = {
                one.id: one.leader is not None for one in described.partitions
            }
            if (id_ := as_uuid(described.topic_id)) is not None:
                self.ids[topic] = id_
        return found, failures

    def count_silent(self, request: _Request) -> int:
        """Count how often in a row a request was not answered in time."""
        return self._silent.get(request, 0)

    def read(
        self,
        kind: Kind,
        group: str,
        topics: _Partitions,
        at_most: float | None = None,
    ) -> _Offsets | None:
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
        request = _Request(kind, group)
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


def _sort(places: Iterable[TopicPartition]) -> _Offsets:
    """The offsets by topic and partition; those are left out that have none."""
    found: dict[str, dict[int, int]] = {}
    for at in places:
        if at.error is None and at.offset >= 0:
            found.setdefault(at.topic, {})[at.partition] = at.offset
    return found
