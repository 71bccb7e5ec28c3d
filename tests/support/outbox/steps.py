"""A relay that does nothing by itself: the test makes each of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from jobs_lib.outbox.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Iterable

    import psycopg

    from jobs_lib import App
    from jobs_lib.outbox.block import Block

EPOCH = 1
"""The epoch at which a relay of these tests owns its shards."""


def own_shards(
    admin: psycopg.Connection[Any], owner: UUID, shards: Iterable[int]
) -> None:
    """Make a process the owner of shards."""
    admin.execute(
        "insert into jobs_lib.origins (role, origin, owner, epoch)"
        " select 'relay', 'shard/' || n, %s, %s from unnest(%s::int[]) n",
        (owner, EPOCH, [*shards]),
    )


class RelaySteps:
    """The steps of a relay's first sender, for the shards that a process owns."""

    def __init__(self, app: App, owner: UUID) -> None:
        relay = Relay(
            app.database(),
            app.settings,
            owner,
            UUID(int=1),
            entities={},
            topics=app.topics,
            source="test",
        )
        self.reader = relay._reader
        self._sender = relay._senders[0]
        self.starts = self._sender._starts

    def read(self, connection: psycopg.Connection[Any], shard: int) -> Block:
        """The next block of a shard."""
        return self.reader.read(connection, shard, EPOCH)

    def delete(
        self, connection: psycopg.Connection[Any], shard: int, block: Block
    ) -> None:
        """Delete the rows of a block that is in Kafka."""
        self._sender._delete(connection, shard, EPOCH, block)

    def hold(
        self, connection: psycopg.Connection[Any], shard: int, block: Block
    ) -> None:
        """Hold the rows of a block that Kafka has refused, and the rows behind them."""
        self._sender._hold(connection, shard, EPOCH, block)

    def be_of_server(self, server: int) -> None:
        """Treat rows as those of another server from now on."""
        self._sender._server = server
