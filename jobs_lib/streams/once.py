"""One event and one answer for each request, however often and wherever it is called.

A request is remembered before its event is sent, with an end of the partition, and the
event's place is noted afterwards. Calls with the same id wait for that place. If it
does not come within the sender's time, one of them looks for the event in the topic,
from the noted end on, and sends it only if it is not there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs_lib.callers import Pause
from jobs_lib.errors import (
    ConfigurationError,
    GrowingError,
    PayloadError,
    RefusedError,
    RequestConflictError,
    TopicError,
    UnavailableError,
    UnknownPublishError,
)
from jobs_lib.streams.cause import number_request
from jobs_lib.streams.event import Place
from jobs_lib.streams.log import REQUEST_HEADER
from jobs_lib.streams.requests import Remembered, digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs_lib.streams.checking import Checker
    from jobs_lib.streams.event import Event, Published
    from jobs_lib.streams.log import Log
    from jobs_lib.streams.publisher import Publisher
    from jobs_lib.streams.requests import Requests
    from jobs_lib.streams.steps import Steps
    from jobs_lib.streams.stream import Check, Stream

_STALL_SECONDS = 1.0
"""How long a sender may take from remembering a request to sending its event."""
_ON_THE_WAY_SECONDS = 1.0
"""How long a broker may take to store what it got from a sender that has given up."""
SECONDS_BESIDE = _STALL_SECONDS + _ON_THE_WAY_SECONDS
"""What a sender has beside the time limit of a publish."""
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.005, 0.1, 1.5
_DIGITS = 16
"""Of a digest, as messages show it."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of ``publish`` with the id of a request."""

    stream: Stream[Any]
    event: Event
    value: Any = field(repr=False)
    id: str
    check: Check | None


class _Target(NamedTuple):
    """Where an event goes."""

    partition: int
    end: int
    """Of the partition, or an earlier one."""
    period: int
    """In which the topic has as many partitions as were counted."""
    at: float
    """When it was chosen, by ``time.monotonic()``."""


class _Watch:
    """Watches the newest attempt of a request, and tells when its time is over.

    The database tells it by its own clock, and too late if that was set back. An
    attempt that was seen for as long as any sender may take is over all the same.

    Args:
        seconds: how long a sender of this process may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: tuple[str, int] | None = None
        self._since = 0.0

    def judge(self, request: str, known: Remembered) -> Remembered:
        """Return what is known of a request, with the end of its sender's time."""
        if self._seen != (request, known.attempts):
            self._seen, self._since = (request, known.attempts), time.monotonic()
        seconds = max(self._seconds, known.send_seconds or 0.0)
        if time.monotonic() > self._since + seconds:
            return replace(known, is_over=True)
        return known


class Once:
    """Publishes the events of requests.

    Args:
        publisher: sends them.
        log: knows where partitions end, and finds events.
        requests: remembers requests.
        checker: checks events before they are sent.
        find_period: finds the period in which a stream may be published to; None if it
            may not be now.
        seconds: how long a sender may take, from remembering a request on.
    """

    def __init__(
        self,
        publisher: Publisher,
        log: Log,
        requests: Requests,
        checker: Checker,
        find_period: Callable[[str], int | None],
        seconds: float,
    ) -> None:
        self._publisher = publisher
        self._log = log
        self._requests = requests
        self._checker = checker
        self._find_period = find_period
        self._seconds = seconds

    def publish(self, call: Call) -> Steps[Published]:
        """Send the event, or get the answer of the call that does or did so.

        Raises:
            ConfigurationError: the stream has ``acks=0``.
            RequestConflictError: the request has another key or value.
            UnavailableError: it is remembered too slowly each time. Nothing was sent.
            UnknownPublishError: there is no answer in time.
        """
        if call.stream.rules.acks == "0":
            raise ConfigurationError(
                f"the stream {call.event.topic!r} has acks=0, with which Kafka tells "
                "no event's place, so the event of a request could not be found: "
                "declare acks=1 or 'all', or leave `request` out"
            )
        header = REQUEST_HEADER, call.id.encode()
        event = replace(call.event, headers=[*call.event.headers, header])
        call = replace(call, event=event)
        until = time.monotonic() + 2 * self._seconds
        watch = _Watch(self._seconds)
        pause = _FIRST_PAUSE
        while True:
            known = yield partial(self._requests.find, call.event, call.id)
            if known is None:
                answer = yield from self._send_first(call)
            else:
                _refuse_other(call, known)
                answer = yield from self._go_on(call, watch.judge(call.id, known))
            if answer is not None:
                return answer
            if time.monotonic() > until:
                raise UnknownPublishError(
                    f"another call with the request {call.id!r} sends its event to "
                    f"{call.event.topic!r}, and has no answer yet. Call again with the "
                    "same id, to get it"
                )
            yield Pause(pause)
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)

    def publish_newest(self, call: Call) -> Steps[Published]:
        """Let the newest event of a job or record be this one.

        One that is handled again mostly says the same, and its event is found. If it
        says something else now, that is another event behind the first one, with a
        number of its own: a refusal would leave the first one in the topic for good,
        although its change was never committed.

        Raises:
            ConfigurationError: the stream has ``acks=0``.
            UnavailableError: as :meth:`publish`.
            UnknownPublishError: there is no answer in time.
        """
        number, newest = 0, None
        until = time.monotonic() + 2 * self._seconds
        watch = _Watch(self._seconds)
        while True:
            id_ = number_request(call.id, number + 1)
            known = yield partial(self._requests.find, call.event, id_)
            if known is not None:
                number, newest = number + 1, watch.judge(id_, known)
                continue
            if newest is None or newest.digest == digest(call.event):
                number = max(number, 1)
                break
            if newest.is_settled:
                number += 1
                break
            if time.monotonic() > until:
                raise UnknownPublishError(
                    f"an earlier event of the request {call.id!r} is still sent to "
                    f"{call.event.topic!r}, and this one must be behind it"
                )
            # What the sender that has failed or died may still send must be first.
            yield Pause(_LONGEST_PAUSE)
            number -= 1
        id_ = number_request(call.id, number)
        return (yield from self.publish(replace(call, id=id_)))

    def _send_first(self, call: Call) -> Steps[Published | None]:
        """Remember a request, and send its event; None if another call does."""
        try:
            is_vain = yield from self._check(call)
        except RefusedError:
            # An equal call may have been first, and its event be in the table by now.
            if (yield partial(self._requests.find, call.event, call.id)) is None:
                raise
            return None
        if is_vain:
            attempt = yield partial(self._requests.add, call.event, call.id, None, None)
            return None if attempt is None else call.stream.answer(call.event, None)
        target = yield from self._choose(call)
        add = partial(self._requests.add, call.event, call.id)
        attempt = yield partial(add, target.partition, target.end)
        return (yield from self._send(call, attempt, target))

    def _go_on(self, call: Call, known: Remembered) -> Steps[Published | None]:
        """Answer a known request, or take it over; None if it is to be waited for."""
        if known.partition is None or known.search_from is None:
            return call.stream.answer(call.event, None)
        if known.record_offset is not None:
            place = Place(known.partition, known.record_offset)
            return call.stream.answer(call.event, place)
        if not known.is_over:
            return None
        partition, start, attempt = known.partition, known.search_from, known.attempts
        take = partial(self._requests.take, call.event, call.id)
        find = partial(self._log.find_request, call.event, partition)
        if attempt == 1:
            # Nobody has looked for it yet.
            topic, since = call.event.topic, known.remembered_at
            start = yield partial(self._log.find_start, topic, partition, start, since)
        is_over = False
        while not is_over:
            # Before each part of the search: others take over from who is silent for
            # long, and go on where this one is.
            attempt = yield partial(take, partition, start, attempt)
            if attempt is None:
                return None
            offset, start, is_over = yield partial(find, start, call.id)
            if offset is not None:
                return (yield from self._note(call, Place(partition, offset)))
        yield from self._check(call)
        # The key may have another partition by now, if the topic has grown.
        target = yield from self._choose(call)
        attempt = yield partial(take, target.partition, target.end, attempt)
        return (yield from self._send(call, attempt, target))

    def _send(
        self, call: Call, attempt: int | None, target: _Target
    ) -> Steps[Published | None]:
        """Send the event of a remembered request; None if another call does.

        Args:
            call: the request.
            attempt: its number; None if another call has it.
            target: where the event goes.

        Raises:
            UnavailableError: it is remembered too slowly each time. Nothing was sent.
        """
        until = time.monotonic() + self._seconds
        try:
            while attempt is not None and not self._is_current(call, target):
                if time.monotonic() > until:
                    yield partial(self._requests.forget, call.event, call.id, attempt)
                    raise UnavailableError(
                        f"to remember the request {call.id!r} for {call.event.topic!r} "
                        f"took more than {_STALL_SECONDS:g} s each time, for "
                        f"{self._seconds:g} s, and its event may not be sent so late: "
                        "the database or this process is too slow. Nothing was sent. "
                        "Call again later with the same id"
                    )
                # The process stood still, and others may look for the event soon; or
                # the key may have another partition.
                target = yield from self._choose(call)
                take = partial(self._requests.take, call.event, call.id)
                attempt = yield partial(take, target.partition, target.end, attempt)
            if attempt is None:
                return None
            place = yield self._publisher.send(
                call.event, call.stream.rules.acks, target.partition
            )
        except (PayloadError, TopicError, GrowingError):
            if attempt is not None:
                yield partial(self._requests.forget, call.event, call.id, attempt)
            raise
        return (yield from self._note(call, place))

    def _choose(self, call: Call) -> Steps[_Target]:
        """Choose the partition of an event, as soon as it may be sent."""
        period = yield from self._prepare(call)
        partition, end = yield partial(self._note_end, call.event)
        return _Target(partition, end, period, time.monotonic())

    def _is_current(self, call: Call, target: _Target) -> bool:
        """Whether the event may be sent there, and the sender has the time for it."""
        if time.monotonic() > target.at + _STALL_SECONDS:
            return False
        return self._find_period(call.event.topic) == target.period

    def _prepare(self, call: Call) -> Steps[int]:
        return self._publisher.prepare(call.event.topic, call.stream.rules.acks)

    def _check(self, call: Call) -> Steps[bool]:
        yield from self._prepare(call)
        return (
            yield from self._checker.check(
                call.stream, call.event, call.value, call.check
            )
        )

    def _note(self, call: Call, place: Place) -> Steps[Published]:
        place = yield partial(self._requests.answer, call.event, call.id, place)
        return call.stream.answer(call.event, place)

    def _note_end(self, event: Event) -> tuple[int, int]:
        partition = self._log.choose_partition(event)
        return partition, self._log.note_end(event.topic, partition)


def _refuse_other(call: Call, known: Remembered) -> None:
    own = digest(call.event)
    if known.digest == own:
        return
    before, now = (one.hex()[:_DIGITS] for one in (known.digest, own))
    raise RequestConflictError(
        f"the request {call.id!r} was sent to {call.event.topic!r} before with another "
        f"key or value: its SHA-256 began with {before}, and this one's begins with "
        f"{now}. Give each request an id of its own"
    )
