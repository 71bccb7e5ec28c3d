"""A stream: a topic that is the source of truth, and what publishes to it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic

from typing_extensions import TypeVar

from jobs_lib.errors import (
    AccessError,
    ConfigurationError,
    PayloadError,
    UnavailableError,
)
from jobs_lib.kafka.checks import (
    COMPACTION_LAG,
    check_key,
    check_size,
    find_largest,
    make_config,
)
from jobs_lib.naming import name_in_kafka
from jobs_lib.reasons import explain
from jobs_lib.streams.cause import check_cause
from jobs_lib.streams.event import Event, Published
from jobs_lib.streams.steps import run, run_async

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from uuid import UUID

    import psycopg

    from jobs_lib.schemas.codec import Encoder
    from jobs_lib.settings import Settings
    from jobs_lib.streams.cause import Cause
    from jobs_lib.streams.event import Place
    from jobs_lib.streams.publishing import Publishing

    Check = Callable[[str, Any, psycopg.Connection[Any]], object]

V = TypeVar("V", default=Any)
_UPKEEP_SECONDS = 7_200.0
"""The upkeep removes old requests once an hour or so."""


@contextmanager
def _away() -> Iterator[None]:
    """Mark an error that passes once Kafka or the database is back."""
    try:
        yield
    except UnavailableError as error:
        error.is_passing = not isinstance(error, AccessError)
        raise


@dataclass(frozen=True, slots=True)
class Rules:
    """What the declaration of a stream asks of its events.

    Attributes:
        acks: what Kafka must acknowledge: ``"0"``, ``"1"`` or ``"all"``.
        key: the field of the values that holds the key; None if none does.
        internal: the fields that no answer has.
        check: raises a RefusedError for an event that must not be published.
        current: reads the state that a table has of a key.
    """

    acks: str
    key: str | None
    internal: frozenset[str]
    check: Check | None
    current: Callable[[str, psycopg.Connection[Any]], Any] | None

    @property
    def asks_database(self) -> bool:
        """Whether an event is checked in the database before it is sent."""
        return self.check is not None or self.current is not None


class Stream(Generic[V]):
    """A declared stream; made by ``app.stream``."""

    compacted = True
    """Only the last record of each key is kept."""

    def __init__(
        self,
        name: str,
        *,
        encoder: Encoder,
        partitions: int,
        config: Mapping[str, str],
        rules: Rules,
        settings: Callable[[], Settings],
        publishing: Callable[[], Publishing],
    ) -> None:
        make_config(name, config, compacted=True)
        self.declared = name
        """The name without the environment's template."""
        self.given = config
        """The settings in Kafka that the app has declared."""
        self._settings = settings
        self._publishing = publishing
        self.partitions = partitions
        self.encoder = encoder
        """Makes the bytes of the values."""
        self.rules = rules
        self._headers: list[tuple[str, str | bytes | None]] = []
        if encoder.content_type:
            self._headers = [("content-type", encoder.content_type.encode())]

    @cached_property
    def name(self) -> str:
        """Its name in Kafka: the declared name, put into the environment's template."""
        return name_in_kafka(self._settings(), self.declared)

    @property
    def config(self) -> dict[str, str]:
        """How the topic is set in Kafka.

        An event whose fate is unknown is looked for in the topic. So compaction leaves
        it there for as long as its request is remembered.

        Raises:
            ConfigurationError: the declaration lets compaction take it earlier.
        """
        needed = int((self._settings().request_seconds + _UPKEEP_SECONDS) * 1000)
        config = {COMPACTION_LAG: str(needed), **self.given}
        kept = config[COMPACTION_LAG]
        if not kept.isdecimal() or int(kept) < needed:
            raise ConfigurationError(
                f"the stream {self.declared!r} is declared with "
                f"{COMPACTION_LAG}={kept}, and must keep each record for as long as "
                "requests are remembered (JOBS_LIB_REQUEST_SECONDS), and two hours: "
                f"give {needed} or more, or leave it out"
            )
        return make_config(self.declared, config, compacted=True)

    @cached_property
    def largest(self) -> int:
        """Bytes that a record's key and value may have, as far as is known here."""
        return find_largest(self.given, self._settings())

    def publish(
        self,
        key: str,
        value: V | None,
        *,
        request: str | UUID | None = None,
        by: Cause | None = None,
        check: Check | None = None,
    ) -> Published:
        """Send one event, and wait until Kafka has acknowledged it.

        Args:
            key: the entity's stable key.
            value: the whole new state, of the type that the stream declares. None
                deletes the entity.
            request: the id of the caller's request. Calls with the same id make one
                event, in all processes, and all get its answer.
            by: instead of an id, the job or the record whose handler publishes. When it
                is handled again, its event is found, and sent again only if it says
                something else by then.
            check: a function like that of the stream, for this call alone: such as one
                that refuses to create what is there. It is called after the stream's.

        Returns the event as Kafka has it, with its place.

        Raises:
            AccessError: the brokers do not let it in, or deny a right on the topic.
            ConfigurationError: there are both an id and a job or record, or the stream
                has ``acks=0`` with one of them, or the job has no group; or the check
                is async.
            JobsError: the job is over already.
            GrowingError: the topic gets more partitions, and takes no events meanwhile.
                Nothing was sent.
            PayloadError: key, value or id cannot be sent, or the event is larger than
                the topic's may be. Nothing was sent.
            RefusedError: a check refuses the event. Nothing was sent.
            RequestConflictError: the request was sent before with another key or value.
            TopicError: the topic does not exist, or is not visible.
            UnknownPublishError: Kafka has not acknowledged it in time, and nobody knows
                whether it has it. The same call with the same id finds that out.
            UnavailableError: Kafka or the database does not answer, and nothing was
                sent.
        """
        check_cause(self.name, request, by)
        event = self._make_event(key, value)
        with _away():
            steps = self._publishing().publish(self, event, value, request, by, check)
            return run(steps)

    async def publish_async(
        self,
        key: str,
        value: V | None,
        *,
        request: str | UUID | None = None,
        by: Cause | None = None,
        check: Check | None = None,
    ) -> Published:
        """As :meth:`publish`, on an event loop.

        What asks the database runs in a thread, and so do the functions of the stream.

        Args:
            key: the entity's stable key.
            value: the whole new state; None deletes the entity.
            request: the id of the caller's request.
            by: instead of an id, the job or the record whose handler publishes.
            check: a plain function for this call alone.

        Returns the event as Kafka has it, with its place.

        Raises:
            JobsError: as :meth:`publish`.
        """
        check_cause(self.name, request, by)
        event = self._make_event(key, value)
        with _away():
            steps = self._publishing().publish(self, event, value, request, by, check)
            return await run_async(steps)

    def event(self, key: str, value: V | None) -> Event:
        """Make an event for a function of ``app.transactional`` to return.

        Nothing is sent yet, and neither ``check`` nor ``current`` of the stream is
        asked.

        Args:
            key: the entity's stable key.
            value: the whole new state; None deletes the entity.

        Raises:
            PayloadError: key or value cannot be sent.
        """
        return self._make_event(key, value)

    def encode(self, value: Any) -> bytes | None:
        """Encode a value; None stays None.

        Raises:
            PayloadError: it is not of the type that the stream declares, or does not
                fit the schema.
        """
        if value is None:
            return None
        try:
            return self.encoder.encode(value)
        except ValueError as error:
            raise PayloadError(
                f"a value does not fit the stream {self.name!r}: {explain(error)}"
            ) from None

    def show(self, value: bytes | None) -> Any:
        """Return the value in plain types, with its internal fields."""
        return None if value is None else self.encoder.show(value)

    def answer(self, event: Event, place: Place | None) -> Published:
        """Make the answer to a publish, without the internal fields.

        Args:
            event: what was to be published.
            place: where it is; None if it would have changed nothing.
        """
        content, hidden = event.content, self.rules.internal
        if hidden and content is not None:
            content = {name: one for name, one in content.items() if name not in hidden}
        partition, offset = (None, None) if place is None else place
        changed = place is not None
        return Published(event.topic, partition, offset, event.key, content, changed)

    def _make_event(self, key: str, value: V | None) -> Event:
        check_key(self, key)
        encoded = self.encode(value)
        check_size(self, key, encoded or b"")
        content = self.show(encoded)
        self._check_fields(key, content)
        return Event(self.name, key, encoded, content, self._headers)

    def _check_fields(self, key: str, content: Any) -> None:
        """Refuse a value whose field holds another key, or that cannot hide a field."""
        field = self.rules.key
        if content is None or not (field or self.rules.internal):
            return
        if not isinstance(content, dict):
            raise PayloadError(
                f"a value of the stream {self.name!r} is of type "
                f"{type(content).__name__}, and `key` and `internal` name fields: "
                "give an object"
            )
        if field and str(content.get(field)) != key:
            raise PayloadError(
                f"the field {field!r} of a value of the stream {self.name!r} holds "
                "another key than the event, or none: give the same one"
            )
