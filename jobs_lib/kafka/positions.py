"""How far partitions and groups are: one map for all of a process that ask.

A thread of its own asks Kafka, at most once in an interval, for all that was asked for
since: one request for each kind of offset and broker, and one for each group. Who asks
gets the last answer at once, and its age. So no slow or dead broker holds anybody up,
and more partitions or more who ask cost no more requests.

What is not answered is asked for apart, by a second thread with clients of its own,
until it is answered quickly again. So a round never waits for what is known to be
silent, however many groups that is. A process has two such threads, and two clients of
a group at most.

It only reads, and joins no group: see `kafka/position_clients.py`.
"""

from __future__ import annotations

import math
import re
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import KafkaException

from jobs_lib import telemetry
from jobs_lib.errors import AccessError, ConfigurationError, JobsError
from jobs_lib.kafka.dependencies import check_ends
from jobs_lib.kafka.position_clients import IDLE, PositionClients, Request
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from uuid import UUID

    from jobs_lib.kafka.position_clients import Kind, Leaders, Offsets
    from jobs_lib.settings import Settings

_INTERVAL = 1.0
_TIMEOUT = 5.0
WITHIN = 15.0
"""Seconds: older answers are not given, unless the caller says so."""
_QUICK_SECONDS = 1.0
"""How long an answer may take before it is asked for apart."""
_NEXT_SECONDS = 0.1
"""How long, if another one was silent in the same round: a node that dies silences many
groups at once, and the others' answers must not become old meanwhile."""
_LAST_SECONDS = 1.0
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


class _Question(NamedTuple):
    kind: Kind
    topic: str
    group: str = ""


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
        self._apart: set[Request] = set()
        """Those that are asked apart, since they were not answered quickly."""
        self._left: dict[Request, Leaders] = {}
        """What is to be asked apart in the next round there."""
        self._is_left = threading.Event()
        name = group or settings.pod
        self._kafka = PositionClients(settings, name, timeout)
        self._patient = PositionClients(settings, name, timeout)
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
        try:
            self._loop.start()
            self._loop_apart.start()
        except BaseException:
            # The process may have no more threads: leave none behind.
            self.stop()
            raise

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
        return self._ask(_ask_group(group, topic), within)

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
        question = _ask_group(group, topic)
        # The end of a topic only grows, as long as it is the same topic.
        ends = _Question("high", topic)
        committed, high = self._ask_together({question: within, ends: math.inf})
        if committed is None or high is None:
            return None
        handled = self._check(question, committed, high)
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
            # Equal ones may be long.
            if known and known.committed is committed and known.high is high:
                return known.handled
            handled = check_ends(committed, high, known.handled if known else None)
            self._checked[question] = _Checked(committed, high, handled)
            return handled

    def _ask(self, question: _Question, within: float) -> KnownOffsets | None:
        (answer,) = self._ask_together({question: within})
        return answer

    def _ask_together(
        self, within: Mapping[_Question, float]
    ) -> list[KnownOffsets | None]:
        """Ask in one round: what misses it is answered an interval later."""
        for one in within:
            if not _TOPIC.fullmatch(one.topic):
                raise ConfigurationError(
                    f"no topic can be called {one.topic!r}: in Kafka its name has up "
                    "to 249 letters, digits, dots, hyphens and underscores"
                )
        with self._lock:
            self._asked |= within.keys()
            known = [(self._answers.get(one), age) for one, age in within.items()]
        self._wanted.set()
        return [
            answer if answer is not None and answer.age <= age else None
            for answer, age in known
        ]

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
        requests = self._gather(asked, found, failures)
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
        for failure in failures.values():
            if not has_answer and not isinstance(failure, AccessError):
                raise failure
            # It may last: the next round comes as soon as without it.
            telemetry.emit("loop.failed", loop=self._loop.name, error=failure)

    def _gather(
        self,
        asked: Collection[_Question],
        found: Leaders,
        failures: Mapping[str, Exception],
    ) -> dict[Request, Leaders]:
        """Put questions together to requests; leave out topics that are gone."""
        requests: dict[Request, Leaders] = {}
        # The ends come last: no end that is known is older than a group's offset then.
        for one in sorted(asked, key=lambda one: not one.group):
            if one.topic in found:
                of_request = requests.setdefault(Request(one.kind, one.group), {})
                of_request[one.topic] = found[one.topic]
            elif isinstance(failures.get(one.topic), AccessError | None):
                # Of a topic that is gone or hidden nothing is known. Where Kafka only
                # did not say it, the last answer stays.
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
        self, requests: Mapping[Request, Leaders], *, is_silent: bool = False
    ) -> list[Request]:
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
            if self._is_left.wait(IDLE):
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
        self, request: Request, asked: Leaders, found: Offsets, read_at: float
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


def _ask_group(group: str, topic: str) -> _Question:
    if not group:
        raise ConfigurationError("name the group whose offsets you ask for, not ''")
    return _Question("committed", topic, group)


class _Checked(NamedTuple):
    """A group's offsets, the ends that they were compared with, and what was found."""

    committed: KnownOffsets
    high: KnownOffsets
    handled: KnownOffsets
