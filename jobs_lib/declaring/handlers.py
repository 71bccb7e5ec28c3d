"""The functions that handle records, as type checkers see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload
from uuid import UUID

from typing_extensions import TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    # Only for types: declaring consumers must not import it.
    import psycopg

    from jobs_lib.consuming.record import Record

    Connection = psycopg.Connection[Any]
    AsyncConnection = psycopg.AsyncConnection[Any]

V = TypeVar("V", default=Any)
K = TypeVar("K", str, bytes, int, UUID, default=str)

RecordHandler: TypeAlias = "Callable[[Record[V, K], Connection], None]"
AsyncRecordHandler: TypeAlias = (
    "Callable[[Record[V, K], AsyncConnection], Awaitable[None]]"
)
BlockHandler: TypeAlias = "Callable[[list[Record[V, K]], Connection], None]"
AsyncBlockHandler: TypeAlias = (
    "Callable[[list[Record[V, K]], AsyncConnection], Awaitable[None]]"
)


class DeclareHandler(Protocol[V, K]):
    """A decorator of a function that handles records, or whole blocks of them."""

    @overload
    def __call__(self, function: RecordHandler[V, K], /) -> RecordHandler[V, K]: ...
    @overload
    def __call__(
        self, function: AsyncRecordHandler[V, K], /
    ) -> AsyncRecordHandler[V, K]: ...
    @overload
    def __call__(self, function: BlockHandler[V, K], /) -> BlockHandler[V, K]: ...
    @overload
    def __call__(
        self, function: AsyncBlockHandler[V, K], /
    ) -> AsyncBlockHandler[V, K]: ...
