"""A sender: one thread that relays some of the shards, block by block.

Two fences. The epoch in ``origins`` keeps a stale relay from deleting rows; the shard's
transactional id keeps it from sending, because a take-over calls ``init_transactions``
first, after which the broker refuses the older producer. A block is one Kafka
transaction; its rows are deleted after its commit. A crash between the two sends the
block again: at least once, never less, and in the same order.
"""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import psycopg
from psycopg import IsolationLevel

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.errors import FencedError
from jobs_lib.loop import Loop
from jobs_lib.outbox.block import Hold
from jobs_lib.outbox.starts import Starts
from jobs_lib.postgres.tid_array import TidArray
from jobs_lib.postgres.values import int_array
from jobs_lib.postgres.wakeup import Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from jobs_lib.outbox.block import Block, Row
    from jobs_lib.outbox.producers import ShardProducers
    from jobs_lib.outbox.reader import Reader
    from jobs_lib.postgres.database import Database

_HINTED = 10
"""With hints coming, so many times fewer looks will do."""
_HOLDS_EVERY = 1.0
"""Seconds between two looks for holds whose time has come."""
_HOLDS_AT_ONCE = 100
"""As many as `due_holds` returns."""
_HOLDS_SECONDS = 0.2
"""Of a look: thousands may be due, and other rows wait meanwhile."""
_HOLDS_REST = 4
"""Times as long as a look the next one waits."""


class RelayThread:
    """Relays the shards that it is given.

    Args:
        database: where the outbox is.
        reader: reads blocks of it.
        producers: send them.
        poll_interval: seconds between two looks, when idle.
        hinted: is told of all hints; None not to listen to any.
        hears: says whether hints can come now, whoever listens.
        stopping: set when the thread is to end.
    """

    def __init__(
        self,
        database: Database,
        reader: Reader,
        producers: ShardProducers,
        poll_interval: float,
        hinted: Callable[[], None] | None,
        hears: Callable[[], bool],
        stopping: threading.Event,
    ) -> None:
        self._database = database
        self._reader = reader
        self._producers = producers
        self._poll_interval = poll_interval
        self._hinted = hinted
        self._hears = hears
        self._stopping = stopping
        listens = database.listens and hinted is not None
        self._wakeup = Wakeup(database, database.outbox_channel if listens else None)
        self._turns = 0
        self._lock = threading.Lock()
        self._sent = threading.Condition(self._lock)
        self._epochs: dict[int, int] = {}
        self._sending: set[int] = set()
        self._failures: dict[int, int] = {}
        self._retry_at: dict[int, float] = {}
        self._last = -1
        """The shard that had its turn last."""
        self._holds_at = 0.0
        self._starts = Starts(database.queries)
        self._look_at = math.inf
        """When to look, though nothing was said."""
        self._server = 0
        """Which server the rows were read from; 0 is unknown."""
        self._waiting = False
        """Whether rows wait that could not leave yet: of those no hint tells."""
        self._loop = Loop("relay", self._work, stopping=stopping, ended=self._close)
        self.pulse = self._loop.pulse

    def start(self) -> None:
        """Start the thread; nothing is sent until shards are acquired."""
        self._loop.start()

    def stop(self) -> None:
        """Wait until the thread has ended. Call after ``stopping`` is set."""
        self._wakeup.set()
        self._loop.stop()

    def take(self, shards: Mapping[int, int]) -> None:
        """Start to send shards at these epochs."""
        with self._lock:
            self._epochs.update(shards)
        self._wakeup.set()

    def release(self, shards: set[int], deadline: float) -> None:
        """Stop sending shards; wait for the block that is being sent."""
        with self._sent:
            for shard in shards:
                self._epochs.pop(shard, None)
            self._sent.wait_for(
                lambda: not self._sending & shards,
                max(0.0, deadline - time.monotonic()),
            )

    @property
    def hears(self) -> bool:
        """Whether it can hear hints now; asked from any thread."""
        return self._wakeup.hears

    def wake(self) -> None:
        """Look whether there is something to send, from any thread."""
        self._wakeup.set()

    # The sender's thread

    def _work(self) -> Iterator[None]:
        with self._database.connect(self._loop.name, impatient=True) as connection:
            # Of what runs in a transaction block; the rest commits by itself.
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            # Commits may be lost, and ids come again.
            self._starts = Starts(self._database.queries)
            while not self._stopping.is_set():
                moved = self._round(connection)
                yield
                if not moved:
                    self._sleep()

    def _close(self) -> None:
        self._producers.close()
        self._wakeup.close()

    def _sleep(self) -> None:
        hinted = self._hears() and not self._waiting
        seconds = self._poll_interval * (_HINTED if hinted else 1)
        now = time.monotonic()
        with self._lock:
            due = [at - now for s, at in self._retry_at.items() if s in self._epochs]
        due.append(self._look_at - now)
        hints = self._wakeup.wait(max(0.0, min([seconds, *due])))
        # What was said while nobody heard is lost; and all look at another pace now.
        turned = self._wakeup.turns != self._turns
        self._turns = self._wakeup.turns
        if self._hinted is not None and (hints or turned):
            self._hinted()

    def _round(self, connection: psycopg.Connection[Any]) -> bool:
        """One block of every shard that has rows; whether anything moved."""
        now = time.monotonic()
        with self._lock:
            owned = dict(self._epochs)
            ready = {s for s in owned if self._retry_at.get(s, 0.0) <= now}
        self._producers.keep(owned)
        for shard in ready:
            self._retry_at.pop(shard, None)
        self._look_at = math.inf
        if not ready:
            return False
        with self.pulse.elsewhere():
            lost = self._producers.fence_off(ready)
        for shard, error in lost.items():
            self._recover(shard, error)
            ready.discard(shard)
        more = False
        if now >= self._holds_at:
            more = self._try_held(connection, {s: owned[s] for s in ready})
            took = time.monotonic() - now
            self._holds_at = now + took + max(_HOLDS_EVERY, _HOLDS_REST * took)
        pending = self._starts.find_pending(connection, sorted(ready))
        self._look_at = self._starts.due_at
        if more and not pending:
            # Nobody waits meanwhile.
            self._holds_at = 0.0
            return True
        moved, self._waiting = False, bool(pending)
        # One whose rows cost the connection must not come first every time.
        turns = sorted(pending, key=lambda row: (row[0] <= self._last, row))
        for shard, self._server in turns:
            if self._stopping.is_set():
                break
            self._last = shard
            moved |= self._attempt(connection, shard, owned[shard], self._relay_block)
        return moved

    def _attempt(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        epoch: int,
        relay: Callable[[psycopg.Connection[Any], int, int], bool],
    ) -> bool:
        """Do something with a shard, unless it was given up; whether anything moved."""
        with self._lock:
            if self._epochs.get(shard) != epoch or shard not in self._producers:
                return False
            self._sending.add(shard)
        try:
            # With the broker, and with loaders of the application.
            with self.pulse.elsewhere():
                moved = relay(connection, shard, epoch)
            self._failures.pop(shard, None)
        # Unless the sender needs another connection, it is this shard's trouble alone.
        except BaseException as error:
            if connection.closed:
                self._postpone(shard)
                raise
            self._recover(shard, error)
            return False
        finally:
            with self._sent:
                self._sending.discard(shard)
                self._sent.notify_all()
        return moved

    def _relay_block(
        self, connection: psycopg.Connection[Any], shard: int, epoch: int
    ) -> bool:
        start = self._starts.get(shard)
        block = self._reader.read(connection, shard, epoch, start)
        if not block:
            return False
        _tell("block.read", shard, block)
        if block.outgoing:
            self._send(connection, shard, epoch, block)
            _tell("block.produced", shard, block)
        self._delete(connection, shard, epoch, block)
        if block.refusals or block.behind:
            self._hold(connection, shard, epoch, block)
        _tell("block.deleted", shard, block)
        return True

    def _send(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        epoch: int,
        block: Block,
    ) -> None:
        def confirm() -> None:
            owned = connection.execute(
                self._database.queries["owns_shard"], self._reader.own(shard, epoch)
            ).fetchone()
            if owned != (True,):
                raise FencedError(f"another relay has taken over shard {shard}")

        block.keep(*self._producers.send(shard, block.outgoing, confirm))

    def _delete(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        epoch: int,
        block: Block,
    ) -> None:
        ids, places = block.done
        if not ids:
            return
        query = "delete_block" if block.reexports else "delete_live"
        row = connection.execute(
            self._database.queries[query],
            {
                **self._fence(shard, epoch),
                "places": TidArray(places),
                "ids": int_array(ids),
                "dropped": int_array(row_id for _, row_id, _ in block.dropped),
            },
            prepare=True,
        ).fetchone()
        self._finish(connection, block)
        self._starts.reach(ids[-1])
        deleted = cast("tuple[int]", row)[0]
        if deleted != len(ids):
            raise FencedError(
                f"{len(ids) - deleted} of {len(ids)} rows of shard {shard} were not "
                "there to delete: another relay has taken it over"
            )

    def _fence(self, shard: int, epoch: int) -> dict[str, Any]:
        """The parameters of the statements that delete rows, or move them."""
        return self._reader.own(shard, epoch) | {"server": self._server}

    def _finish(self, connection: psycopg.Connection[Any], block: Block) -> None:
        for reexport in block.reexports:
            connection.execute(
                self._database.queries["finish_reexport"], {"reexport": reexport}
            )

    def _hold(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        epoch: int,
        block: Block,
    ) -> None:
        rows = [row for one in block.refusals for row in one.record.rows]
        rows += block.behind
        holds = [refusal.hold for refusal in block.refusals]
        self._write_holds(connection, shard, epoch, holds, rows)
        for hold in holds:
            telemetry.emit("rows.held", **hold._asdict())

    def _write_holds(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        epoch: int,
        holds: Sequence[Hold],
        rows: Sequence[Row],
    ) -> None:
        connection.execute(
            self._database.queries["hold_rows"],
            {
                **self._fence(shard, epoch),
                "topics": [hold.topic for hold in holds],
                "keys": [hold.key for hold in holds],
                "row_ids": [hold.row_id for hold in holds],
                "errors": [hold.error for hold in holds],
                "classes": int_array(row_class for row_class, _, _ in rows),
                "ids": int_array(row_id for _, row_id, _ in rows),
            },
        )

    def _try_held(
        self, connection: psycopg.Connection[Any], epochs: Mapping[int, int]
    ) -> bool:
        """Try the first row of each hold whose time has come; whether more are due."""
        until = time.monotonic() + _HOLDS_SECONDS
        due = connection.execute(
            self._database.queries["due_holds"],
            {"shards": int_array(sorted(epochs))},
            prepare=True,
        ).fetchall()
        for topic, key, held_id, shard, row_id in due:
            if time.monotonic() > until or self._stopping.is_set():
                return True
            hold = Hold(topic, key, held_id, "")
            self._attempt(
                connection,
                shard,
                epochs[shard],
                partial(self._retry, row_id=row_id, hold=hold),
            )
        return len(due) == _HOLDS_AT_ONCE

    def _retry(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        epoch: int,
        *,
        row_id: int,
        hold: Hold,
    ) -> bool:
        block = self._reader.read_held(connection, shard, epoch, row_id)
        if not block:
            return False
        if block.outgoing:
            self._send(connection, shard, epoch, block)
        if block.refusals:
            # Under what it is now, too: without its topic's hold it may have its own.
            (found,) = (refusal.hold for refusal in block.refusals)
            again = hold._replace(error=found.error)
            self._write_holds(connection, shard, epoch, [again, found], [])
            return False
        own = self._fence(shard, epoch)
        row = connection.execute(
            self._database.queries["delete_held"],
            own | {"id": row_id, "dropped": bool(block.dropped)},
        ).fetchone()
        if row != (1,):
            raise FencedError(
                f"row {row_id} of shard {shard} was not there to delete: another relay "
                "has taken it over, or somebody has dropped it"
            )
        self._finish(connection, block)
        this = {"topic": hold.topic, "key": hold.key, "row_id": hold.row_id}
        connection.execute(self._database.queries["lift_hold"], this)
        telemetry.emit("rows.let_go", **this)
        return True

    def _recover(self, shard: int, error: BaseException) -> None:
        """Drop the shard's producer: the next one aborts what this one left open."""
        self._postpone(shard)
        telemetry.emit("loop.failed", loop=f"relay shard {shard}", error=error)
        self._producers.drop(shard)

    def _postpone(self, shard: int) -> None:
        """Let a shard wait after a failure, the longer the more there were."""
        self._failures[shard] = self._failures.get(shard, 0) + 1
        delay = RECONNECT.delay(self._failures[shard])
        with self._lock:
            self._retry_at[shard] = time.monotonic() + delay


def _tell(event: str, shard: int, block: Block) -> None:
    if telemetry.listened(event):
        ids, _ = block.done
        telemetry.emit(event, shard=shard, rows=ids)
