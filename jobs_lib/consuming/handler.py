"""A handler of records, and how it is called."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jobs_lib.consuming.record import describe, make_record, read_text
from jobs_lib.consuming.time_limits import TIME_LIMITS, TimedCall
from jobs_lib.errors import RecordError
from jobs_lib.jobs.context import Handling, handled
from jobs_lib.reasons import explain
from jobs_lib.returned import refuse_lazy
from jobs_lib.telemetry.stacks import read_stack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    # Only for types: declaring consumers must not import either of the two.
    import psycopg
    from confluent_kafka import Message

    from jobs_lib.consuming.keys import KeyReader
    from jobs_lib.consuming.placing import Placing
    from jobs_lib.consuming.record import Record
    from jobs_lib.schemas.codec import Decoder

    Connection = psycopg.Connection[Any]

Per: TypeAlias = Literal["record", "block"]
# As in libpq, whose enum would load psycopg where consumers are only declared.
_ACTIVE, _IN_TRANSACTION, _FAILED_TRANSACTION = 1, 2, 3


@dataclass(slots=True, eq=False)
class Handler:
    """A declared function, and what it is called with."""

    function: Callable[..., Any]
    decoder: Decoder
    read_key: KeyReader = read_text
    per: Per = "record"
    timeout: float | None = None
    """Seconds for each call; None for no limit."""
    is_async: bool = field(init=False)
    """Whether an event loop runs it."""

    def __post_init__(self) -> None:
        self.is_async = inspect.iscoroutinefunction(self.function)

    def make_record(self, message: Message, highest: int | None) -> Record[Any, Any]:
        """Make the record that the function gets.

        Raises:
            RecordError: its key or value cannot be read.
        """
        value = decode(message, self.decoder)
        return make_record(message, value, self.read_key, highest)

    def handle(
        self,
        connection: Connection,
        given: Any,
        messages: Sequence[Message],
        by: str,
        placing: Placing | None = None,
    ) -> None:
        """Call the function with a record, or with the records of a block.

        Args:
            connection: with the transaction of the block.
            given: what the function gets.
            messages: that ``given`` was made of.
            by: the consumer group.
            placing: gives jobs the place of the first of these messages; None if nobody
                tells how far they are done.

        Raises:
            RecordError: it took too long, or has broken or ended the transaction.
        """
        topic, number = messages[0].topic() or "", messages[0].partition()
        place = None if placing is None else placing.begin(connection, messages)
        token = handled.set(Handling(f"{topic}/{number}", place))
        try:
            if self.timeout is not None:
                left = self._call_in(self.timeout, connection, given, messages, by)
            elif self.is_async:
                left = call_async(self.function, given, connection)
            else:
                left = self.function(given, connection)
            if left is not None:
                refuse_lazy(left, f"the consumer of {topic!r}")
        finally:
            handled.reset(token)
            if place is not None:
                # What the handler has left behind gets no place.
                place.text = None
        _check_transaction(connection, messages)

    def _call_in(
        self,
        seconds: float,
        connection: Connection,
        given: Any,
        messages: Sequence[Message],
        by: str,
    ) -> Any:
        first = messages[0]
        timed = partial(
            TimedCall,
            f"the handler of {_name(messages)}",
            {
                "group": by,
                "origin": f"{first.topic()}/{first.partition()}",
                "offset": first.offset(),
            },
            seconds,
        )
        if self.is_async:
            return call_async(self.function, given, connection, timed)
        find_stack = partial(read_stack, threading.get_ident())
        with TIME_LIMITS.watch(timed(partial(_cancel, connection), find_stack)):
            return self.function(given, connection)


def call_async(
    function: Callable[..., Awaitable[Any]],
    given: Any,
    connection: Connection,
    timed: Callable[[Callable[[], None], Callable[[], str]], TimedCall] | None = None,
) -> Any:
    """Call an async handler, and wait for its end; the loop of handlers must be open.

    Args:
        function: the handler.
        given: what it gets, beside the connection.
        connection: with an open transaction, which the handler goes on with.
        timed: makes the call's limit, of what cancels it and what finds its stack.
    """
    # Not before there is a connection: they load asyncio and psycopg.
    from jobs_lib.consuming.handler_loop import HANDLER_LOOP
    from jobs_lib.postgres.session import LentSession

    async def call_and_end() -> Any:
        lent = LentSession(connection)
        try:
            return await function(given, lent)
        finally:
            await lent.end()

    try:
        call = HANDLER_LOOP.begin(call_and_end)
        if timed is None:
            return call.wait()
        with TIME_LIMITS.watch(timed(call.cancel, call.find_stack)):
            return call.wait()
    finally:
        # Such as a COPY that nobody has ended.
        if connection.pgconn.transaction_status == _ACTIVE:
            connection.close()


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
        raise refuse_value(message, error) from None


def refuse_value(message: Message, error: ValueError) -> RecordError:
    """Make the error for a value that cannot be read, without the value."""
    return RecordError(
        f"the record at {describe(message)} cannot be read: {explain(error)}"
    )


def _cancel(connection: Connection) -> None:
    """Cancel the statement that the database runs, if there is one."""
    if connection.pgconn.transaction_status == _ACTIVE:
        connection.cancel_safe(timeout=5.0)


def _check_transaction(connection: Connection, messages: Sequence[Message]) -> None:
    """Refuse to go on where a handler has broken or ended the block's transaction.

    Raises:
        RecordError: a statement failed in it, or it is over.
    """
    status = connection.pgconn.transaction_status
    if status == _IN_TRANSACTION:
        return
    if status == _FAILED_TRANSACTION:
        raise RecordError(
            f"a statement failed for {_name(messages)}, and its "
            "handler went on: the transaction is lost. To try a statement that may "
            "fail, wrap it in `with conn.transaction():`, which is a savepoint"
        )
    raise RecordError(
        f"the handler has ended the transaction of {_name(messages)}: "
        "leave commit and rollback to jobs_lib. To undo a part, wrap it in "
        "`with conn.transaction():`, which is a savepoint"
    )


def _name(messages: Sequence[Message]) -> str:
    if len(messages) == 1:
        return f"the record at {describe(messages[0])}"
    return f"the block from {describe(messages[0])} to {messages[-1].offset()}"
