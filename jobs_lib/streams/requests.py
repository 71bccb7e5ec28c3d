"""The requests of a stream in the database: remembered before the send, answered after.

Each call is a transaction of its own: a request must be committed before its event is
sent. Otherwise a process that dies in between would leave an event that nobody looks
for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib import telemetry
from jobs_lib.errors import PayloadError, UnavailableError
from jobs_lib.reasons import find_reason
from jobs_lib.streams.event import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from jobs_lib.callers.caller import Autocommit
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.streams.event import Event

_LONGEST = 200
"""The most characters of a request's id."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """A request in the table; the fields are its columns."""

    digest: bytes
    partition: int | None
    search_from: int | None
    attempts: int
    record_offset: int | None
    is_over: bool
    """Whether its sender's time is over."""
    send_seconds: float | None
    """How long any sender may take to this topic; None if nobody has noted it."""
    remembered_at: datetime
    """When it was added, before its event was sent."""

    @property
    def is_settled(self) -> bool:
        """Whether its event will not come any more if it is not there."""
        return self.is_over or self.partition is None or self.record_offset is not None


class Requests:
    """The requests by which events are published.

    Args:
        connections: gives connections.
        queries: finds the named queries.
        seconds: how long a sender may take.
    """

    def __init__(
        self, connections: Autocommit, queries: Callable[[], Queries], seconds: float
    ) -> None:
        self._connections = connections
        self._queries = queries
        self._seconds = seconds

    def find(self, event: Event, request: str) -> Remembered | None:
        """Find a request; None if it is not remembered."""
        row = self._ask("find_request", event, request)
        return None if row is None else Remembered(*row)

    def add(
        self, event: Event, request: str, partition: int | None, search_from: int | None
    ) -> int | None:
        """Remember a request; None if another call has done so.

        Args:
            event: will be sent.
            request: the id.
            partition: gets the event; None if none will be sent.
            search_from: not behind the end that the partition has now.

        Returns the number of the attempt.
        """
        return self._begin(
            "add_request",
            event,
            request,
            digest=digest(event),
            partition=partition,
            search_from=search_from,
        )

    def take(
        self,
        event: Event,
        request: str,
        partition: int,
        search_from: int,
        attempts: int,
    ) -> int | None:
        """Take a request over; None if another call has done so, or has its answer.

        Args:
            event: of the request.
            request: the id.
            partition: gets the event, or may have it.
            search_from: as for :meth:`add`.
            attempts: the number of the attempt that is over.

        Returns the number of the new attempt.
        """
        return self._begin(
            "take_request",
            event,
            request,
            attempts=attempts,
            partition=partition,
            search_from=search_from,
        )

    def answer(self, event: Event, request: str, place: Place) -> Place:
        """Note the place of an event; returns the one that counts.

        The event is in Kafka. If the database does not take its place, the next call
        with this id looks for it there.
        """
        try:
            row = self._ask(
                "answer_request",
                event,
                request,
                partition=place.partition,
                offset=place.offset,
            )
        except (psycopg.Error, UnavailableError) as error:
            telemetry.warn(
                "requests",
                f"the place of an event of {event.topic!r} could not be noted, and a "
                f"repeated request will look for it in Kafka: {find_reason(error)}",
            )
            return place
        return place if row is None else Place(*row)

    def forget(self, event: Event, request: str, attempts: int) -> None:
        """Forget a request whose event Kafka has refused."""
        with self._connections.alone() as connection:
            values = {"topic": event.topic, "id": request, "attempts": attempts}
            connection.execute(self._queries()["forget_request"], values)

    def _begin(
        self, query: str, event: Event, request: str, **values: Any
    ) -> int | None:
        row = self._ask(query, event, request, seconds=self._seconds, **values)
        return None if row is None else int(row[0])

    def _ask(
        self, query: str, event: Event, request: str, **values: Any
    ) -> Sequence[Any] | None:
        parameters: Mapping[str, Any] = {"topic": event.topic, "id": request, **values}
        with self._connections.alone() as connection:
            row: Sequence[Any] | None = connection.execute(
                self._queries()[query], parameters
            ).fetchone()
            return row


def read_id(request: str | UUID) -> str:
    """Return the text of a request's id.

    Raises:
        PayloadError: it is no id.
    """
    text = str(request)
    if 0 < len(text) <= _LONGEST and text.isprintable() and text.isascii():
        return text
    raise PayloadError(
        f"the id of a request has 1 to {_LONGEST} printable characters of ASCII, and "
        f"this one does not ({len(text)} characters): give a UUID, or a digest"
    )


def digest(event: Event) -> bytes:
    """Digest key and value, whatever the order of the value's fields is."""
    content = event.content
    if isinstance(content, bytes):
        content = sha256(content).hexdigest()
    text = json.dumps([event.key, content], sort_keys=True, default=str)
    return sha256(text.encode()).digest()
