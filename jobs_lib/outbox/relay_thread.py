"""A relay thread: it relays some of the shards, block by block.

There are two fences. The epoch in ``origins`` keeps a stale relay from deleting rows.
The shard's transactional id keeps it from sending: a take-over first calls
``init_transactions``, and then the broker refuses the older producer. A block is one
Kafka transaction; its rows are deleted after its commit. After a crash between the two
the block is sent again: at least once, never less, and in the same order.
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
from jobs_lib.outbox.copies import Copies
from jobs_lib.outbox.finishing import finish_if_done
from jobs_lib.outbox.staged import MUST_NOTE, note_versions
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
"""While hints come, the thread polls this many times less often."""
_HOLDS_EVERY = 1.0
"""Seconds between two queries for holds that are due."""
_HOLDS_AT_ONCE = 100
"""The number that `due_holds` returns at most."""
_HOLDS_SECONDS = 0.2
"""Limit for one try of holds: thousands may be due, and other rows wait meanwhile."""
_HOLDS_REST = 4
"""The pause after a try of holds is this many times as long as the try."""


class RelayThread:
    """Relays the shards that it is given.

    Args:
        database: where the outbox is.
        reader: reads blocks of rows.
        producers: send the blocks.
        poll_interval: seconds between two polls, when idle.
        receives_hints: whether hints can arrive now, upon which :meth:`wake` is called.
        stopping: set when the thread is to end.
    """

    def __init__(
        self,
        database: Database,
        reader: Reader,
        producers: ShardProducers,
        poll_interval: float,
        receives_hints: Callable[[], bool],
        stopping: threading.Event,
    ) -> None:
        self._database = database
        self._reader = reader
        self._producers = producers
        self._poll_interval = poll_interval
        self._receives_hints = receives_hints
        self._stopping = stopping
        self._wakeup = Wakeup(database, None)
        self._lock = threading.Lock()
        self._sent = threading.Condition(self._lock)
        self._epochs: dict[int, int] = {}
        self._sending: set[int] = set()
        self._failures: dict[int, int] = {}
        self._retry_at: dict[int, float] = {}
        self._last = {True: -1, False: -1}
        """The shard that had its turn last: of those with live rows, and of others."""
        self._sent_batch = False
        """Whether the last block had rows of re-exports."""
        self._holds_at = 0.0
        self._starts = Starts(database.queries)
        self._copies = Copies(database)
        self._full_read_at = math.inf
        """When the next complete read is due, even without a hint."""
        self._server = 0
        """The server that the rows were read from; 0 is unknown."""
        self._waiting = False
        """Whether rows wait that could not leave yet: no hint announces them."""
        self._loop = Loop("relay", self._work, stopping=stopping, ended=self._close)
        self.pulse = self._loop.pulse

    def start(self) -> None:
        """Start the thread; it sends nothing until it is given shards."""
        self._loop.start()

    def stop(self, timeout: float) -> None:
        """Wait until the thread has ended. Call after ``stopping`` is set."""
        self._wakeup.set()
        self._loop.stop(timeout)

    def take(self, shards: Mapping[int, int]) -> None:
        """Start to send these shards, with these epochs."""
        with self._lock:
            self._epochs.update(shards)
        self._wakeup.set()

    def release(self, shards: set[int], deadline: float) -> None:
        """Stop sending these shards; wait for the block that is being sent."""
        with self._sent:
            for shard in shards:
                self._epochs.pop(shard, None)
            self._sent.wait_for(
                lambda: not self._sending & shards,
                max(0.0, deadline - time.monotonic()),
            )

    def wake(self) -> None:
        """Poll for rows now; callable from any thread."""
        self._wakeup.set()

    # In the relay thread

    def _work(self) -> Iterator[None]:
        with self._database.connect(self._loop.name, impatient=True) as connection:
            # For transaction blocks; all else commits statement by statement.
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            # The server may have lost commits, and then reuses ids.
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
        hinted = self._receives_hints() and not self._waiting
        seconds = self._poll_interval * (_HINTED if hinted else 1)
        now = time.monotonic()
        with self._lock:
            due = [at - now for s, at in self._retry_at.items() if s in self._epochs]
        due.append(self._full_read_at - now)
        self._wakeup.wait(max(0.0, min([seconds, *due])))

    def _round(self, connection: psycopg.Connection[Any]) -> bool:
        """One block of every shard that has rows; whether anything moved."""
        now = time.monotonic()
        with self._lock:
            owned = dict(self._epochs)
            ready = {s for s in owned if self._retry_at.get(s, 0.0) <= now}
        self._producers.keep(owned)
        for shard in ready:
            self._retry_at.pop(shard, None)
        self._full_read_at = math.inf
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
        self._full_read_at = self._starts.due_at
        if more and not pending:
            # No other rows wait, so go on with the holds at once.
            self._holds_at = 0.0
            return True
        moved, self._waiting = False, bool(pending)
        for shard, server in self._order(pending):
            if self._stopping.is_set():
                break
            self._server = server
            self._last[self._starts.has_live(shard)] = shard
            self._sent_batch = False
            moved |= self._attempt(connection, shard, owned[shard], self._relay_block)
            if self._sent_batch:
                # A live row that has come meanwhile leaves before the next such block.
                break
        return moved

    def _order(self, pending: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Order the shards that have rows: those with live ones first.

        A shard whose rows cost the connection must not come first every time.
        """

        def rank(row: tuple[int, int]) -> tuple[bool, bool, tuple[int, int]]:
            live = self._starts.has_live(row[0])
            return not live, row[0] <= self._last[live], row

        return sorted(
            (
                row
                for row in pending
                if self._starts.has_live(row[0]) or not self._reader.pace.rests(row[0])
            ),
            key=rank,
        )

    def _attempt(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        epoch: int,
        relay: Callable[[psycopg.Connection[Any], int, int], bool],
    ) -> bool:
        """Relay from a shard, unless it was released; returns whether any row moved."""
        with self._lock:
            if self._epochs.get(shard) != epoch or shard not in self._producers:
                return False
            self._sending.add(shard)
        try:
            # It waits for the broker, and for loaders of the application.
            with self.pulse.elsewhere():
                moved = relay(connection, shard, epoch)
            self._failures.pop(shard, None)
        # If the connection still works, only this shard is affected.
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
        began = time.monotonic()
        block = self._reader.read(
            connection,
            shard,
            epoch,
            self._starts.get(shard),
            batch=self._starts.has_batch(shard),
        )
        if not block:
            return False
        self._sent_batch = bool(block.reexports)
        _emit("block.read", shard, block)
        if block.outgoing:
            self._send(connection, shard, epoch, block)
            _emit("block.produced", shard, block)
        rows = self._delete(connection, shard, epoch, block)
        if block.refusals or block.behind:
            self._hold(connection, shard, epoch, block)
        _emit("block.deleted", shard, block)
        if block.reexports:
            self._reader.pace.note_block(rows, time.monotonic() - began)
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

        if not block.limited:
            block.keep(*self._producers.send(shard, block.outgoing, confirm))
            return
        with self._reader.rates.leaving(connection, block):
            block.keep(*self._producers.send(shard, block.outgoing, confirm))

    def _delete(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        epoch: int,
        block: Block,
    ) -> int:
        """Delete what has left or is dropped; return how many rows these were."""
        ids, places = block.done
        if not ids:
            return 0
        values = {
            **self._fence(shard, epoch),
            "places": TidArray(places),
            "ids": int_array(ids),
            "dropped": int_array(row_id for _, row_id, _ in block.dropped),
        }
        query = "delete_block" if block.reexports else "delete_live"
        deleted = self._delete_rows(connection, query, values, block)
        self._finish(connection, block)
        self._starts.reach(ids[-1])
        if deleted != len(ids):
            raise FencedError(
                f"{len(ids) - deleted} of {len(ids)} rows of shard {shard} were not "
                "there to delete: another relay has taken it over"
            )
        return len(ids)

    def _delete_rows(
        self,
        connection: psycopg.Connection[Any],
        query: str,
        values: Mapping[str, Any],
        block: Block,
    ) -> int:
        """Delete rows that Kafka has; note what has left before, if that is asked for.

        First the notes, then the rows: so every snapshot has the one or the other.
        """

        def delete(*, noted: bool) -> int:
            row = connection.execute(
                self._database.queries[query], {**values, "noted": noted}, prepare=True
            ).fetchone()
            return cast("tuple[int]", row)[0]

        deleted = delete(noted=False)
        if deleted != MUST_NOTE:
            return deleted
        self._copies.write(connection, block)
        note_versions(connection, self._database.queries, block.versions)
        return delete(noted=True)

    def _fence(self, shard: int, epoch: int) -> dict[str, Any]:
        """The parameters of all statements that delete or move rows."""
        return self._reader.own(shard, epoch) | {"server": self._server}

    def _finish(self, connection: psycopg.Connection[Any], block: Block) -> None:
        for reexport in block.reexports:
            finish_if_done(connection, self._database.queries, reexport)

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
        """Try the first row of each hold that is due; returns whether more are due.

        None counts as due if all of these wait for the rates of their re-exports.
        """
        until = time.monotonic() + _HOLDS_SECONDS
        due = connection.execute(
            self._database.queries["due_holds"],
            {"shards": int_array(sorted(epochs))},
            prepare=True,
        ).fetchall()
        tried = False
        spent: set[int] = set()
        for topic, key, held_id, shard, row_id, server in due:
            if time.monotonic() > until or self._stopping.is_set():
                return tried
            self._server = server
            hold = Hold(topic, key, held_id, "")
            tried |= self._attempt(
                connection,
                shard,
                epochs[shard],
                partial(self._retry, row_id=row_id, hold=hold, spent=spent),
            )
        return tried and len(due) == _HOLDS_AT_ONCE

    def _retry(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        epoch: int,
        *,
        row_id: int,
        hold: Hold,
        spent: set[int],
    ) -> bool:
        """Try a held row; returns whether it left, was dropped or was refused.

        If the rate of its re-export allows no record now, that is added to ``spent``.
        """
        this = {"topic": hold.topic, "key": hold.key, "row_id": hold.row_id}
        block = self._reader.read_held(connection, shard, epoch, row_id, spent)
        if block.outgoing:
            self._send(connection, shard, epoch, block)
        if not block:
            spent |= block.reexports
            connection.execute(self._database.queries["requeue_hold"], this)
            return False
        if block.refusals:
            # Write the new kind of hold, too: once its topic's hold is lifted, the row
            # may have one of its own.
            (found,) = (refusal.hold for refusal in block.refusals)
            holds = [found]
            # The hold of a whole topic stays due if only the row is refused: the next
            # row, which is the first without a hold of its own, may tell more.
            if not hold.is_of_topic:
                holds.append(hold._replace(error=found.error))
            self._write_holds(connection, shard, epoch, holds, [])
            return True
        values = {"id": row_id, "dropped": bool(block.dropped)}
        values |= self._fence(shard, epoch)
        if self._delete_rows(connection, "delete_held", values, block) != 1:
            raise FencedError(
                f"row {row_id} of shard {shard} was not there to delete: another relay "
                "has taken it over, or somebody has dropped it"
            )
        self._finish(connection, block)
        connection.execute(self._database.queries["lift_hold"], this)
        telemetry.emit("rows.let_go", **this)
        return True

    def _recover(self, shard: int, error: BaseException) -> None:
        """Drop the shard's producer: the next one aborts its open transaction."""
        self._postpone(shard)
        telemetry.emit("loop.failed", loop=f"relay shard {shard}", error=error)
        self._producers.drop(shard)

    def _postpone(self, shard: int) -> None:
        """Let a shard wait after a failure, longer after each one in a row."""
        self._failures[shard] = self._failures.get(shard, 0) + 1
        delay = RECONNECT.delay(self._failures[shard])
        with self._lock:
            self._retry_at[shard] = time.monotonic() + delay


def _emit(event: str, shard: int, block: Block) -> None:
    if telemetry.listened(event):
        ids, _ = block.done
        telemetry.emit(event, shard=shard, rows=ids)
