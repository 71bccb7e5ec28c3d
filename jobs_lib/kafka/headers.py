"""The headers of Kafka's messages, also where the client cannot give them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

from jobs_lib.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from confluent_kafka import Message


def list_headers(message: Message) -> Sequence[tuple[str, object]]:
    """List the headers of a message in their order; a name may be repeated.

    Who goes through them gets a :class:`RecordError` if the name of one is not UTF-8.
    """
    try:
        return cast("Sequence[tuple[str, object]]", message.headers() or ())
    except SystemError:
        return hide_headers(message)


def hide_headers(message: Message) -> list[Any]:
    """Replace headers of which a name is not UTF-8, which Kafka's client cannot give.

    It keeps what it has made of them so far, without the name: whoever looks at that a
    second time crashes the process.
    """
    unreadable = _Unreadable(
        f"the record at {message.topic()}/{message.partition()} offset "
        f"{message.offset()} cannot be read: the name of one of its headers is not "
        "UTF-8"
    )
    message.set_headers(unreadable)
    return unreadable


class _Unreadable(list[Any]):
    """Stands for headers that cannot be read, whoever asks, and however often."""

    def __init__(self, why: str) -> None:
        # An empty list would be passed over without a look at its elements.
        super().__init__([("", b"")])
        self._why = why

    def __iter__(self) -> NoReturn:
        raise RecordError(self._why)

    __reversed__ = __iter__
