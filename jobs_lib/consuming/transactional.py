"""A function whose events Kafka commits together with the offset of its record."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jobs_lib.consuming.handler import decode
from jobs_lib.consuming.record import describe, make_record
from jobs_lib.errors import RecordError
from jobs_lib.naming import name_in_kafka
from jobs_lib.streams.event import Event

if TYPE_CHECKING:
    from collections.abc import Callable

    # Only for types: declaring it must not import it.
    from confluent_kafka import Message

    from jobs_lib.consuming.keys import KeyReader
    from jobs_lib.naming import Exact
    from jobs_lib.schemas.codec import Decoder
    from jobs_lib.settings import Settings


@dataclass(eq=False)
class Transactional:
    """What is declared by ``@app.transactional``.

    Attributes:
        declared_topic: the topic that it reads, as declared.
        declared_group: its consumer group, as declared.
        function: gets a record, and returns the events that it leads to.
        decoder: reads the values.
        read_key: reads the keys.
        settings: reads the settings, at the first use.
    """

    declared_topic: str | Exact
    declared_group: str | Exact
    function: Callable[..., Any]
    decoder: Decoder
    read_key: KeyReader
    settings: Callable[[], Settings]

    @cached_property
    def topic(self) -> str:
        """The topic's name in Kafka."""
        return name_in_kafka(self.settings(), self.declared_topic)

    @cached_property
    def group(self) -> str:
        """The group's name in Kafka."""
        return name_in_kafka(self.settings(), self.declared_group)

    def call(self, message: Message) -> list[Event]:
        """Call the function with a record; returns the events to send.

        Raises:
            RecordError: the record cannot be read, or something else is returned.
        """
        if self.decoder.asks and (value := message.value()) is not None:
            self.decoder.prepare(value)
        value = decode(message, self.decoder)
        returned = self.function(make_record(message, value, self.read_key))
        if returned is None:
            return []
        if isinstance(returned, Event):
            return [returned]
        if isinstance(returned, list | tuple) and all(
            isinstance(one, Event) for one in returned
        ):
            return [*returned]
        raise RecordError(
            f"the function of the record at {describe(message)} returned a "
            f"{type(returned).__name__}: return what `stream.event(key, value)` makes, "
            "a list of these, or None"
        )
