"""What a consumer does with a block of records, as declared by its decorator."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from typing_extensions import TypeVar

from jobs_lib.consuming.record import Record, describe, make_record, read_headers
from jobs_lib.errors import ConfigurationError, RecordError
from jobs_lib.jobs.context import handling
from jobs_lib.jobs.lazy import refuse_lazy
from jobs_lib.naming import name_in_kafka
from jobs_lib.reasons import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # Only for types: declaring consumers must not import either of the two.
    import psycopg
    from confluent_kafka import Message

    from jobs_lib.schemas.codec import Decoder
    from jobs_lib.settings import Settings

    Connection = psycopg.Connection[Any]
    Applier = Callable[[Connection, Sequence[Message]], None]
    RecordHandler = Callable[[Record["V"], Connection], None]

V = TypeVar("V", default=Any)

OnGap: TypeAlias = Literal["stop", "skip"]
OnError: TypeAlias = Literal["stop", "skip"]
TYPE_HEADER = "ce_type"
# As in libpq, whose enum would load psycopg where consumers are only declared.
_IN_TRANSACTION, _FAILED_TRANSACTION = 2, 3


class BlockError(Exception):
    """A record of a block cannot be applied.

    Attributes:
        index: of the record in the block; None if that is not known.
        error: says why.
    """

    def __init__(self, index: int | None, error: BaseException) -> None:
        super().__init__(index, error)
        self.index = index
        self.error = error


class Subscription:
    """One topic, read by one group."""

    def __init__(
        self, topic: str, group: str, settings: Callable[[], Settings]
    ) -> None:
        self._topic = topic
        self._group = group
        self._settings = settings
        self.is_read_model = False
        self.on_gap: OnGap = "stop"
        """What to do where records are gone."""
        self.on_error: OnError = "stop"
        """What to do with a record that cannot be read or handled."""
        self._all_repeatable = True
        self._handlers: dict[str | None, tuple[RecordHandler, Decoder]] = {}
        self._applier: Applier | None = None
        self._decoder: Decoder | None = None
        """The decoder for the applier."""

    @cached_property
    def topic(self) -> str:
        """The topic's name in Kafka."""
        return name_in_kafka(self._settings(), self._topic)

    @cached_property
    def group(self) -> str:
        """The group's name in Kafka."""
        return name_in_kafka(self._settings(), self._group)

    def is_of(self, topic: str, group: str) -> bool:
        """Whether it was declared with this topic and this group."""
        return (self._topic, self._group) == (topic, group)

    def add_handler(
        self,
        function: RecordHandler,
        type_: str | None,
        decoder: Decoder,
        on_gap: OnGap = "stop",
        on_error: OnError = "stop",
        repeatable: bool = False,
    ) -> None:
        """Handle the records of one type, or of every type, with ``function``.

        Raises:
            ConfigurationError: these records have a handler already, or one of another
                type says something else of gaps or of errors.
        """
        if type_ in self._handlers or self._applier:
            raise ConfigurationError(
                f"the records of {self._topic!r} in the group {self._group!r} have a "
                f"handler already (type {type_!r})"
            )
        if on_gap not in ("stop", "skip"):
            raise ConfigurationError(f"on_gap is 'stop' or 'skip', not {on_gap!r}")
        if self._handlers and on_gap != self.on_gap:
            raise ConfigurationError(
                f"the handlers of {self._topic!r} in the group {self._group!r} share "
                f"its partitions: give them the same on_gap, not {self.on_gap!r} and "
                f"{on_gap!r}"
            )
        _check_on_error(on_error)
        if self._handlers and on_error != self.on_error:
            raise ConfigurationError(
                f"the handlers of {self._topic!r} in the group {self._group!r} share "
                "its partitions: give them the same on_error, not "
                f"{self.on_error!r} and {on_error!r}"
            )
        if not isinstance(repeatable, bool):
            raise ConfigurationError(f"repeatable is True or False, not {repeatable!r}")
        self.on_gap = on_gap
        self.on_error = on_error
        self._all_repeatable &= repeatable
        self._handlers[type_] = (function, decoder)

    def set_applier(
        self, applier: Applier, decoder: Decoder, on_error: OnError = "stop"
    ) -> None:
        """Apply whole blocks with ``applier``, which reads values with ``decoder``.

        Raises:
            ConfigurationError: the records have a handler already, or ``on_error`` is
                none of its words.
        """
        if self._handlers or self._applier:
            raise ConfigurationError(
                f"the records of {self._topic!r} in the group {self._group!r} have a "
                "handler already"
            )
        _check_on_error(on_error)
        self.on_error = on_error
        self._applier = applier
        self._decoder = decoder
        self.is_read_model = True

    @property
    def is_repeatable(self) -> bool:
        """Whether a replay may apply records once more that were applied before.

        Rows with versions do not mind; a handler must declare it, and so must all that
        share the topic and group.
        """
        return self.is_read_model or self._all_repeatable

    def may_pass(self, stored: int, start: int) -> bool:
        """Whether to go on at ``start``, where the records from ``stored`` are gone.

        A read model may: a state topic keeps the newest record of each key, and rows
        with versions do not mind to see one twice.
        """
        return self.is_read_model or (self.on_gap == "skip" and stored < start)

    def load(self) -> None:
        """Check that all settings that the decoders need are set.

        Raises:
            ConfigurationError: one is missing.
        """
        for decoder in self._decoders:
            decoder.load()

    def prepare(self, messages: Sequence[Message]) -> None:
        """Fetch what is needed to read a block, before its transaction begins.

        Raises:
            RecordError: a record cannot be read.
            UnavailableError: a server that must be asked does not answer.
        """
        if not any(decoder.asks for decoder in self._decoders):
            return
        for message in messages:
            if (value := message.value()) is not None:
                decoder = self._decoder or self._choose(message)[1]
                try:
                    decoder.prepare(value)
                except ValueError as error:
                    raise _unreadable(message, error) from None

    def apply(
        self,
        connection: Connection,
        messages: Sequence[Message],
        may_go_on: Callable[[], bool],
    ) -> int:
        """Apply a block of one partition, in order, in the open transaction.

        Args:
            connection: with the transaction of the block.
            messages: the records of the block.
            may_go_on: asked after each record; if it returns False, the block ends.

        Returns the number of records that were applied.

        Raises:
            BlockError: a record cannot be applied.
        """
        if self._applier is not None:
            try:
                self._applier(connection, messages)
            except BaseException as error:
                raise BlockError(None, error) from error
            return len(messages)
        for index, message in enumerate(messages):
            try:
                self._handle(connection, message)
            except BaseException as error:
                raise BlockError(index, error) from error
            if not may_go_on():
                return index + 1
        return len(messages)

    def _handle(self, connection: Connection, message: Message) -> None:
        function, decoder = self._choose(message)
        record = make_record(message, decode(message, decoder))
        with handling(record.origin):
            left = function(record, connection)
            if left is not None:
                refuse_lazy(left, f"the consumer of {self.topic!r}")
        _check_transaction(connection, message)

    @property
    def _decoders(self) -> list[Decoder]:
        of_handlers = [decoder for _, decoder in self._handlers.values()]
        return of_handlers if self._decoder is None else [self._decoder]

    def _choose(self, message: Message) -> tuple[RecordHandler, Decoder]:
        if len(self._handlers) == 1 and None in self._handlers:
            return self._handlers[None]
        type_ = read_headers(message).get(TYPE_HEADER)
        chosen = self._handlers.get(type_) or self._handlers.get(None)
        if chosen is None:
            known = ", ".join(repr(name) for name in self._handlers)
            raise RecordError(
                f"the record at {describe(message)} has the type {type_!r} in its "
                f"header {TYPE_HEADER}, and the group {self.group!r} handles {known}: "
                "declare a consumer for it"
            )
        return chosen


def _check_on_error(on_error: object) -> None:
    if on_error not in ("stop", "skip"):
        raise ConfigurationError(f"on_error is 'stop' or 'skip', not {on_error!r}")


def _check_transaction(connection: Connection, message: Message) -> None:
    """Refuse to go on where a handler has broken or ended the block's transaction.

    Raises:
        RecordError: a statement failed in it, or it is over.
    """
    status = connection.info.transaction_status
    if status == _IN_TRANSACTION:
        return
    if status == _FAILED_TRANSACTION:
        raise RecordError(
            f"a statement failed for the record at {describe(message)}, and its "
            "handler went on: the transaction is lost. To try a statement that may "
            "fail, wrap it in `with conn.transaction():`, which is a savepoint"
        )
    raise RecordError(
        f"the handler has ended the transaction of the record at {describe(message)}: "
        "leave commit and rollback to jobs_lib. To undo a part, wrap it in "
        "`with conn.transaction():`, which is a savepoint"
    )


def decode(message: Message, decoder: Decoder) -> Any:
    """Decode the value of a message; None for a tombstone.

    Raises:
        RecordError: the value cannot be read as the type that the consumer declares.
    """
    value = message.value()
    if value is None:
        return None
    try:
        return decoder.decode(value)
    except ValueError as error:
        raise _unreadable(message, error) from None


def _unreadable(message: Message, error: ValueError) -> RecordError:
    return RecordError(
        f"the record at {describe(message)} cannot be read: {explain(error)}"
    )
