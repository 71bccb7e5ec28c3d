"""What the streams of an app share: clients, and how an event is published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib.postgres.database import Database
from jobs_lib.streams.cause import derive_request
from jobs_lib.streams.checking import Checker, refuse_async
from jobs_lib.streams.log import Log
from jobs_lib.streams.once import SECONDS_BESIDE, Call, Once
from jobs_lib.streams.permits import Permits
from jobs_lib.streams.publisher import Publisher
from jobs_lib.streams.requests import Requests, read_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from jobs_lib.callers.caller import Autocommit
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.settings import Settings
    from jobs_lib.streams.cause import Cause
    from jobs_lib.streams.event import Event, Published
    from jobs_lib.streams.steps import Steps
    from jobs_lib.streams.stream import Check, Stream


class Publishing:
    """Publishes the events of an app's streams.

    Args:
        settings: where Kafka and the database are.
        connections: gives connections to the database.
        queries: finds the named queries.
        read_groups: lists the app's consumer groups of a topic.
        largest: bytes that the largest event of any stream may have.
    """

    def __init__(
        self,
        settings: Settings,
        connections: Autocommit,
        queries: Callable[[], Queries],
        read_groups: Callable[[str], Sequence[str]],
        largest: int,
    ) -> None:
        seconds = settings.publish_timeout + SECONDS_BESIDE
        self._permits = Permits(
            Database.of(settings), settings.publish_timeout, seconds
        )
        self._publisher = Publisher(settings, largest, self._permits)
        self._log = Log(settings, lambda: self._permits.period)
        self._checker = Checker(self._log, connections, queries, read_groups)
        requests = Requests(connections, queries, seconds)
        self._once = Once(
            self._publisher,
            self._log,
            requests,
            self._checker,
            self._permits.find,
            seconds,
        )

    def close(self) -> None:
        """Wait for what is under way, and close the clients; a publish opens others."""
        self._publisher.close()
        self._log.close()
        self._permits.close()

    def publish(
        self,
        stream: Stream[Any],
        event: Event,
        value: Any,
        request: str | UUID | None,
        by: Cause | None,
        check: Check | None,
    ) -> Steps[Published]:
        """Publish an event; see ``Stream.publish``."""
        if check is not None:
            refuse_async(check)
        if by is not None:
            call = Call(stream, event, value, derive_request(by, event.key), check)
            return (yield from self._once.publish_newest(call))
        if request is not None:
            call = Call(stream, event, value, read_id(request), check)
            return (yield from self._once.publish(call))
        acks = stream.rules.acks
        if not self._publisher.is_ready(event.topic, acks):
            yield from self._publisher.prepare(event.topic, acks)
        if check is not None or stream.rules.asks_database:
            if (yield from self._checker.check(stream, event, value, check)):
                return stream.answer(event, None)
            yield from self._publisher.prepare(event.topic, acks)
        place = yield self._publisher.send(event, acks)
        return stream.answer(event, place)
