"""The relay: a shard's rows to Kafka, block by block, in the order of their ids.

Two fences. The epoch in ``origins`` keeps a stale relay from deleting rows; the shard's
transactional id keeps it from sending, because a take-over calls ``init_transactions``
first, after which the broker refuses the older producer. A block is one Kafka
transaction; its rows are deleted after its commit. A crash between the two sends the
block again: at least once, never less, and in the same order.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import psycopg
from confluent_kafka import KafkaException, Producer
from psycopg import IsolationLevel

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.errors import FencedError
from jobs_lib.kafka.client import make_producer
from jobs_lib.outbox.block import BATCH, Block, StateReader, add_live

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from jobs_lib.db import Database
    from jobs_lib.outbox.entity import Entity
    from jobs_lib.outbox.topic import Topic
    from jobs_lib.settings import Settings

_BATCH_LIMIT = 100
"""Rows of re-exports in one block: so a second never sees a burst of more."""
_FENCED_AT_ONCE = 8
_SHORTEST_TIMEOUT = 1.0
"""Seconds; librdkafka refuses shorter ones of transactions."""


class Relay:
    """Sends the shards that it is given; a Holder of the role ``relay``."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        owner: UUID,
        installation: UUID,
        *,
        entities: Mapping[str, Entity],
        topics: Mapping[str, Topic[Any]],
        source: str,
    ) -> None:
        self._database = database
        self._settings = settings
        self._owner = owner
        self._installation = installation
        self._states = StateReader(entities, topics, source)
        self._source = source
        self._timeout = max(_SHORTEST_TIMEOUT, settings.session_timeout / 2)
        self._pool = database.pool("relay rate", 1)
        self._lock = threading.Lock()
        self._epochs: dict[int, int] = {}
        self._producers: dict[int, Producer] = {}
        self._sending: set[int] = set()
        self._sent = threading.Condition(self._lock)
        self._failures: dict[int, int] = {}
        self._retry_at: dict[int, float] = {}
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._relay, name="jobs_lib relay", daemon=True
        )

    def start(self) -> None:
        """Start the thread; nothing is sent until shards are acquired."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Call after the shards have been released."""
        self._stopping.set()
        self._wake.set()
        self._thread.join()
        self._pool.close(timeout=1)

    def acquire(self, origins: Mapping[str, int]) -> None:
        """Start to send shards at these epochs."""
        with self._lock:
            for origin, epoch in origins.items():
                self._epochs[_parse(origin)] = epoch
        self._wake.set()

    def release(self, origins: frozenset[str], timeout: float) -> None:
        """Stop sending shards; wait for the block that is being sent."""
        shards = {_parse(origin) for origin in origins}
        with self._sent:
            for shard in shards:
                self._epochs.pop(shard, None)
            self._sent.wait_for(lambda: not self._sending & shards, timeout)

    # The relay's thread

    def _relay(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                with self._database.connect("relay", impatient=True) as connection:
                    # Of what runs in a transaction block; the rest commits by itself.
                    connection.isolation_level = IsolationLevel.REPEATABLE_READ
                    while not self._stopping.is_set():
                        self._wake.clear()
                        moved = self._round(connection)
                        failures = 0
                        if not moved:
                            self._wake.wait(self._settings.relay_poll_interval)
            except Exception as error:
                failures += 1
                telemetry.emit("loop.failed", loop="relay", error=error)
                self._stopping.wait(RECONNECT.delay(failures))

    def _round(self, connection: psycopg.Connection[Any]) -> bool:
        """One block of every shard that has rows; whether anything moved."""
        now = time.monotonic()
        with self._lock:
            epochs = {
                shard: epoch
                for shard, epoch in self._epochs.items()
                if self._retry_at.get(shard, 0.0) <= now
            }
        for shard in self._producers.keys() - epochs.keys():
            del self._producers[shard]
        if not epochs:
            return False
        self._fence_off(epochs.keys() - self._producers.keys())
        pending = connection.execute(
            self._database.queries["pending_shards"], {"shards": list(epochs)}
        ).fetchall()
        moved = False
        for (shard,) in pending:
            if self._stopping.is_set():
                break
            with self._lock:
                given_up = self._epochs.get(shard) != epochs[shard]
                if given_up or shard not in self._producers:
                    continue
                self._sending.add(shard)
            try:
                moved |= self._relay_block(connection, shard, epochs[shard])
                self._failures.pop(shard, None)
            except psycopg.OperationalError:
                raise
            # Whatever else it is, a loader of the application's included, is this
            # shard's trouble alone.
            except Exception as error:
                self._recover(shard, error)
            finally:
                with self._sent:
                    self._sending.discard(shard)
                    self._sent.notify_all()
        return moved

    def _relay_block(
        self, connection: psycopg.Connection[Any], shard: int, epoch: int
    ) -> bool:
        producer = self._producers[shard]
        block = self._read_block(connection, shard, epoch)
        if not block:
            return False
        telemetry.emit("block.read", shard=shard, rows=block.ids)
        if block.records:
            self._produce(producer, block)
            telemetry.emit("block.produced", shard=shard, rows=block.ids)
        self._delete(connection, shard, epoch, block)
        telemetry.emit("block.deleted", shard=shard, rows=block.ids)
        return True

    def _fence_off(self, shards: Iterable[int]) -> None:
        """Make producers for shards that were taken over, before anything is read.

        Each waits for the broker to abort what the owner before left open, so they do
        it side by side.
        """
        missing = sorted(shards)
        if not missing:
            return
        with ThreadPoolExecutor(_FENCED_AT_ONCE) as pool:
            made = [
                (shard, pool.submit(self._make_producer, shard)) for shard in missing
            ]
        for shard, future in made:
            try:
                self._producers[shard] = future.result()
            except KafkaException as error:
                self._recover(shard, error)

    def _make_producer(self, shard: int) -> Producer:
        timeout = self._timeout
        name = f"jobs_lib-{self._installation}-{shard}"
        producer = make_producer(self._settings, name, timeout)
        deadline = time.monotonic() + timeout
        while True:
            try:
                producer.init_transactions(timeout)
            except KafkaException as error:
                # Such as a coordinator that is still loading, on a broker just started.
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise
                self._stopping.wait(RECONNECT.delay(1))
            else:
                return producer

    def _read_block(
        self, connection: psycopg.Connection[Any], shard: int, epoch: int
    ) -> Block:
        block = Block()
        parameters = {
            "shard": shard,
            "origin": f"shard/{shard}",
            "owner": self._owner,
            "epoch": epoch,
            "limit": self._settings.relay_block,
        }
        # One snapshot for the live rows and for the states of the batch rows: a state
        # that is newer than the live rows of its key would be sent before them.
        with connection.transaction():
            live = connection.execute(
                self._database.queries["read_live"],
                parameters,
                prepare=True,
                binary=True,
            ).fetchall()
            add_live(block, live, self._source)
            if len(live) < self._settings.relay_block:
                parameters["limit"] = _BATCH_LIMIT
                batch = connection.execute(
                    self._database.queries["read_batch"], parameters, prepare=True
                ).fetchall()
                if batch:
                    self._add_batch(connection, block, batch)
        return block

    def _add_batch(
        self,
        connection: psycopg.Connection[Any],
        block: Block,
        rows: list[tuple[Any, ...]],
    ) -> None:
        waiting: dict[int, list[tuple[Any, ...]]] = {}
        for row in rows:
            row_id, _, _, _, reexport_id, superseded, state = row
            block.reexports.add(reexport_id)
            if superseded or state in (None, "cancelled"):
                block.rows.append((BATCH, row_id))
                block.dropped.append(row_id)
            else:
                waiting.setdefault(reexport_id, []).append(row)
        for reexport_id, wanted in waiting.items():
            allowed = wanted[: self._take_records(reexport_id, len(wanted))]
            if allowed:
                self._states.add_batch(connection, block, allowed)

    def _take_records(self, reexport_id: int, wanted: int) -> int:
        # In a transaction of its own: others take from the same bucket, and must not
        # wait for a snapshot, or fail because of one.
        with self._pool.connection() as connection:
            row = connection.execute(
                self._database.queries["take_records"],
                {"reexport": reexport_id, "wanted": wanted},
                prepare=True,
            ).fetchone()
        return cast("tuple[int]", row)[0]

    def _produce(self, producer: Producer, block: Block) -> None:
        failed: list[KafkaException] = []

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(KafkaException(error))

        producer.begin_transaction()
        for record in block.records:
            while True:
                try:
                    producer.produce(
                        record.topic,
                        value=record.value,
                        key=record.key,
                        headers=record.headers,
                        on_delivery=delivered,
                    )
                    break
                except BufferError:
                    # The producer's queue is full: let it deliver some.
                    producer.poll(0.05)
        producer.commit_transaction(self._timeout)
        if failed:
            raise failed[0]

    def _delete(
        self,
        connection: psycopg.Connection[Any],
        shard: int,
        epoch: int,
        block: Block,
    ) -> None:
        row = connection.execute(
            self._database.queries["delete_block"],
            {
                "shard": shard,
                "origin": f"shard/{shard}",
                "owner": self._owner,
                "epoch": epoch,
                "classes": [row_class for row_class, _ in block.rows],
                "ids": block.ids,
                "dropped": block.dropped,
            },
            prepare=True,
        ).fetchone()
        for reexport in block.reexports:
            connection.execute(
                self._database.queries["finish_reexport"], {"reexport": reexport}
            )
        deleted = cast("tuple[int]", row)[0]
        if deleted != len(block.rows):
            raise FencedError(
                f"{len(block.rows) - deleted} of {len(block.rows)} rows of shard "
                f"{shard} were not there to delete: another relay has taken it over"
            )

    def _recover(self, shard: int, error: Exception) -> None:
        """Drop the shard's producer: the next one aborts what this one left open."""
        self._failures[shard] = self._failures.get(shard, 0) + 1
        delay = RECONNECT.delay(self._failures[shard])
        self._retry_at[shard] = time.monotonic() + delay
        telemetry.emit("loop.failed", loop=f"relay shard {shard}", error=error)
        self._producers.pop(shard, None)


def _parse(origin: str) -> int:
    return int(origin.rpartition("/")[2])
