"""One producer for each shard, fenced by its transactional id."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException, Producer

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.errors import AccessError
from jobs_lib.kafka.client import (
    find_cause,
    flush,
    init_transactions,
    make_producer,
    poll_events,
)
from jobs_lib.kafka.refusal import OF_TOPIC, find_refusal, is_soon_over
from jobs_lib.kafka.refusal import explain as explain_error
from jobs_lib.outbox.block import as_records, others
from jobs_lib.outbox.messages import (
    explain,
    is_refusal,
    produce,
    produce_from,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Iterable, Sequence
    from uuid import UUID

    from jobs_lib.kafka.reach import Reach
    from jobs_lib.outbox.block import OutboxRecord, Records, Refusal
    from jobs_lib.settings import Settings

_FENCED_AT_ONCE = 8
_SHORTEST_TIMEOUT = 1.0
"""Seconds; librdkafka refuses shorter timeouts of transactions."""
_UNCLEAR = {KafkaError._INCONSISTENT, KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT}
"""Errors that librdkafka raises for missing topics, and for many other reasons."""


class ShardProducers:
    """Makes a producer for each owned shard, and sends with it.

    Args:
        settings: where Kafka is.
        installation: the database's id, a part of the transactional ids.
        stopping: once set, nothing waits any more.
        reach: gets the result of each transaction.
        refused: called if Kafka denies the very first transactional id.
        largest: bytes that a message may have; 0 leaves that to the client.
    """

    def __init__(
        self,
        settings: Settings,
        installation: UUID,
        stopping: threading.Event,
        reach: Reach,
        refused: Callable[[AccessError], None] = lambda error: None,
        *,
        largest: int = 0,
    ) -> None:
        self._settings = settings
        self._largest = largest
        self._installation = installation
        self._stopping = stopping
        self._reach = reach
        self._refused = refused
        self._was_let_in = False
        self._timeout = max(_SHORTEST_TIMEOUT, settings.session_timeout / 2)
        self._made: dict[int, Producer] = {}
        self._dropped: list[Producer] = []
        """Dropped producers that may still get an answer."""

    @property
    def shards(self) -> set[int]:
        """The shards that have a producer."""
        return {*self._made}

    def __contains__(self, shard: int) -> bool:
        return shard in self._made

    def drop(self, shard: int) -> None:
        """Forget a producer: the next one aborts the transaction it left open."""
        producer = self._made.pop(shard, None)
        if producer is not None:
            # Queued records must not be sent behind those of a newer producer.
            producer.purge(in_flight=False, blocking=False)
            self._dropped.append(producer)

    def keep(self, shards: Collection[int]) -> None:
        """Drop the producers of all other shards; destroy those dropped before.

        A dropped producer is destroyed only when everything it sent was answered or has
        timed out. If it is destroyed while the broker refuses its records, librdkafka
        2.16 may free memory twice (`rd_kafka_txns_term`,
        `rd_kafka_txn_set_fatal_error`): the process dies, or goes on with memory that
        was overwritten.
        """
        for shard in self.shards.difference(shards):
            self.drop(shard)
        for producer in self._dropped:
            poll_events(producer)
        self._dropped = [producer for producer in self._dropped if len(producer)]

    def close(self) -> None:
        """Destroy all producers, once everything they sent was answered."""
        self.keep(())
        deadline = time.monotonic() + self._timeout
        for producer in self._dropped:
            flush(producer, deadline - time.monotonic())
        self._dropped.clear()

    def fence_off(self, shards: Iterable[int]) -> dict[int, Exception]:
        """Make producers for shards that were taken over, before any row is read.

        Each waits for the broker to abort the transaction that the previous owner left
        open, so they are made in parallel. Returns the errors of those that failed.
        """
        for producer in self._made.values():
            poll_events(producer)
        missing = sorted({*shards} - self.shards)
        if not missing:
            return {}
        failed: dict[int, Exception] = {}
        with ThreadPoolExecutor(_FENCED_AT_ONCE) as pool:
            futures = [(shard, pool.submit(self._make, shard)) for shard in missing]
        for shard, future in futures:
            try:
                self._made[shard] = future.result()
                self._was_let_in = True
                self._reach.answered()
            except KafkaException as error:
                self._reach.failed(error)
                failed[shard] = explain_error(error.args[0], self._settings)
            except AccessError as error:
                self._reach.failed(error)
                failed[shard] = error
        return failed

    def _make(self, shard: int) -> Producer:
        name = f"jobs_lib-{self._installation}-{shard}"
        refusals: deque[AccessError] = deque(maxlen=1)

        def report(refusal: AccessError) -> None:
            # Report it even when there are no rows to send: the next ones would wait.
            refusals.append(refusal)
            telemetry.emit("loop.failed", loop=f"relay shard {shard}", error=refusal)

        def make() -> Producer:
            return make_producer(
                self._settings, name, self._timeout, report, largest=self._largest
            )

        producer = make()
        deadline = time.monotonic() + self._timeout
        while (error := init_transactions(producer, self._timeout)) is not None:
            denied = find_refusal(error, self._settings, name, "WRITE")
            if denied is not None and not self._was_let_in:
                self._refused(denied)
            poll_events(producer)
            if denied is not None or refusals:
                raise denied or refusals[-1]
            if not is_soon_over(error) or time.monotonic() > deadline:
                raise KafkaException(error)
            if not error.retriable():
                producer = make()
            self._stopping.wait(RECONNECT.delay(1))
        return producer

    def send(
        self, shard: int, records: Records, confirm: Callable[[], None]
    ) -> tuple[Records, list[Refusal]]:
        """Send records in their order, in as few transactions as possible.

        Returns the records that are in Kafka, and the refusals. Records that must wait
        behind a refused one are in neither.

        Args:
            shard: the shard of the records.
            records: the records to send.
            confirm: raises if the shard has another owner. Called after each new
                producer is made, which fences the shard's owner: if that is another
                process, the records may have been read before it took over.

        Raises:
            KafkaException: the shard must be taken over anew; whether the records are
                in Kafka is not known.
        """
        try:
            sent = self._send(shard, records, confirm)
        except KafkaException as error:
            self._reach.failed(error)
            raise
        if records:
            self._reach.answered()
        return sent

    def _send(
        self, shard: int, records: Records, confirm: Callable[[], None]
    ) -> tuple[Records, list[Refusal]]:
        done: list[Refusal] = []
        asked = False
        while records:
            producer = self._made[shard]
            sent: Records = records
            refusals: list[Refusal] = []
            error = None
            try:
                producer.begin_transaction()
                found = produce(producer, records)
                if found is not None:
                    spelled = as_records(records)
                    sent, refusals = produce_from(producer, spelled, found[0])
                missing = [one for one in refusals if one.whole_topic]
                if not missing:
                    producer.commit_transaction(self._timeout)
                    return sent, done + refusals
            except KafkaException as failure:
                error = failure.args[0]
            # Outside the except block: an error that the client raises inside it keeps
            # the first error in memory for ever, and the producer with it.
            if error is not None:
                error = find_cause(producer, error)
                if not is_refusal(error) and error.code() not in _UNCLEAR:
                    raise KafkaException(error)
                sent, more = self._search_anew(shard, as_records(sent), error, confirm)
                return sent, done + refusals + more
            self._abort(shard, confirm)
            if not asked:
                # The client answered from its cache, which may lack a topic that was
                # made since. Asking the broker refreshes the cache.
                _check_topics(self._made[shard], as_records(records), self._timeout)
                asked = True
                continue
            # Records of a key before its refused one may go; those of a refused topic
            # would all be refused, too.
            done += refusals
            records = others(as_records(sent), missing)
        return [], done

    def _search_anew(
        self,
        shard: int,
        records: list[OutboxRecord],
        error: KafkaError,
        confirm: Callable[[], None],
    ) -> tuple[Records, list[Refusal]]:
        """Search with a new producer, which also aborts what the last one has sent.

        The broker has seen sequence numbers of the last one that it does not count:
        librdkafka would continue behind them, and be refused for that.
        """
        self._replace(shard, confirm)
        found = self._search(shard, records, error, confirm)
        if found is None:
            raise KafkaException(error)
        return found

    def _abort(self, shard: int, confirm: Callable[[], None]) -> None:
        """Abort a shard's transaction, by a new producer if need be.

        Where Kafka has just refused all that was put in, it has no transaction to end,
        and says so. librdkafka takes that for an error which ends the producer.
        """
        is_broken = False
        try:
            self._made[shard].abort_transaction(self._timeout)
        except KafkaException:
            is_broken = True
        # Outside the except block, as above.
        if is_broken:
            self._replace(shard, confirm)

    def _replace(self, shard: int, confirm: Callable[[], None]) -> None:
        self.drop(shard)
        self._made[shard] = self._make(shard)
        confirm()

    def _search(
        self,
        shard: int,
        records: list[OutboxRecord],
        error: KafkaError,
        confirm: Callable[[], None],
    ) -> tuple[Records, list[Refusal]] | None:
        """Send records again after the broker refused one and did not say which one.

        None if the error is not about the records.
        """
        if error.code() in OF_TOPIC | _UNCLEAR:
            refusals = _check_topics(self._made[shard], records, self._timeout)
            if refusals:
                sent, more = self._send(shard, others(records, refusals), confirm)
                return sent, refusals + more
        if error.code() in _UNCLEAR:
            return None
        if len(records) == 1:
            return [], [explain(records[0], error)]
        middle = len(records) // 2
        sent, refusals = self._send(shard, records[:middle], confirm)
        later, more = self._send(shard, others(records[middle:], refusals), confirm)
        return [*as_records(sent), *as_records(later)], refusals + more


def _check_topics(
    producer: Producer, records: Sequence[OutboxRecord], timeout: float
) -> list[Refusal]:
    """A refusal, of its first record, for each topic that is missing or not visible."""
    first = {record.topic: record for record in reversed(records)}
    found = []
    for topic, record in first.items():
        error = producer.list_topics(topic, timeout=timeout).topics[topic].error
        if error is not None and error.code() in OF_TOPIC:
            found.append(explain(record, error))
    return found
