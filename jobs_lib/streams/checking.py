"""What is checked in the database before an event is sent."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs_lib import telemetry
from jobs_lib.errors import ConfigurationError, PayloadError
from jobs_lib.kafka.reader import Span
from jobs_lib.streams.requests import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    import psycopg

    from jobs_lib.callers.caller import Autocommit
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.streams.event import Event
    from jobs_lib.streams.log import Log
    from jobs_lib.streams.steps import Steps
    from jobs_lib.streams.stream import Check, Stream


class _End(NamedTuple):
    """The end of the partition of an event."""

    partition: int
    offset: int


class Checker:
    """Calls the ``check`` of a stream, and compares events with its ``current`` state.

    Args:
        log: knows where the topic ends.
        connections: gives connections to the database.
        queries: finds the named queries.
        read_groups: lists the app's consumer groups of a topic.
    """

    def __init__(
        self,
        log: Log,
        connections: Autocommit,
        queries: Callable[[], Queries],
        read_groups: Callable[[str], Sequence[str]],
    ) -> None:
        self._log = log
        self._connections = connections
        self._queries = queries
        self._read_groups = read_groups

    def check(
        self, stream: Stream[Any], event: Event, value: Any, check: Check | None
    ) -> Steps[bool]:
        """Check an event; returns whether it would change nothing.

        Args:
            stream: gets the event.
            event: the event.
            value: before it was encoded.
            check: of this call alone.

        Raises:
            RefusedError: one of the checks refuses it.
        """
        if check is None and not stream.rules.asks_database:
            return False
        is_vain: bool = yield partial(self._check, stream, event, value, check)
        return is_vain

    def _check(
        self, stream: Stream[Any], event: Event, value: Any, own: Check | None
    ) -> bool:
        from jobs_lib.postgres.session import take_back  # loads the driver

        current = stream.rules.current
        # Before the table is read: if the table has all up to this end, it has the
        # state that the newest event says.
        end = None if current is None else self._read_end(event)
        with self._connections.transaction() as connection:
            for check in (stream.rules.check, own):
                if check is not None:
                    check(event.key, value, connection)
            if current is None or end is None:
                return False
            take_back(connection)
            read = self._read_offsets(connection, event, end.partition)
            if read is None:
                return False
            is_said = _says(stream, event, current(event.key, connection))
        if not is_said or self._may_be_behind(read, event, end):
            return False
        return self._are_of_topic(read, event, end)

    def _read_end(self, event: Event) -> _End:
        partition = self._log.choose_partition(event)
        _, end = self._log.read_range(event.topic, partition)
        return _End(partition, end)

    def _may_be_behind(
        self, read: list[tuple[int, UUID | None]], event: Event, end: _End
    ) -> bool:
        """Whether the table may lack a record before the end.

        The stored offset is the one behind a record. Markers of transactions, and
        events of those that were aborted, may lie between it and the end.
        """
        first = min(offset for offset, _ in read)
        if first >= end.offset:
            return False
        span = Span(first, end.offset)
        return self._log.may_go_on(event.topic, end.partition, span)

    def _are_of_topic(
        self, read: list[tuple[int, UUID | None]], event: Event, end: _End
    ) -> bool:
        """Whether offsets are of the topic that there is now.

        Its consumers may not have noticed yet that it was made anew, or that it has
        lost its last records: then the table says nothing of its events.
        """
        furthest = max(offset for offset, _ in read)
        # They may have read on since.
        if furthest > end.offset and furthest > self._read_end(event).offset:
            return False
        known = {id_ for _, id_ in read if id_ is not None}
        if not known:
            return True
        current = self._log.read_id(event.topic)
        return current is None or known == {current}

    def _read_offsets(
        self, connection: psycopg.Connection[Any], event: Event, partition: int
    ) -> list[tuple[int, UUID | None]] | None:
        """Read the next offset of each of the app's consumers, and of which topic.

        Returns None if one has not begun.
        """
        groups = self._read_groups(event.topic)
        if not groups:
            raise ConfigurationError(
                f"the stream {event.topic!r} has `current`, which reads a table, and "
                "the app declares no consumer or read model of the stream that keeps "
                "the table: declare it, or leave `current` out"
            )
        values = {"topic": event.topic, "partition": partition, "groups": [*groups]}
        rows = connection.execute(
            self._queries()["read_next_offsets"], values
        ).fetchall()
        return rows if len(rows) == len(groups) else None


def _says(stream: Stream[Any], event: Event, state: Any) -> bool:
    """Whether an event says what the table has.

    A state that the stream's type cannot hold may come from another release. No event
    says it, and the one that is to be sent may be what repairs it.
    """
    try:
        encoded = stream.encode(state)
    except PayloadError as error:
        telemetry.warn(
            f"the states of {event.topic}",
            f"`current` of the stream {event.topic!r} returned a state that no event "
            f"can say, so one was sent whatever the table has: {error}",
        )
        return False
    return digest(replace(event, content=stream.show(encoded))) == digest(event)


def refuse_async(check: Check) -> None:
    """Refuse the check of a call if nobody would await it.

    Raises:
        ConfigurationError: it is async.
    """
    if iscoroutinefunction(check):
        raise ConfigurationError(
            "the check of a publish is async, and is called in a transaction that is "
            "not: make it a plain function"
        )
