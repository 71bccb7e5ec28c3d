"""Records a second: our consumer beside a member of a group, and at most once."""

from __future__ import annotations

import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

from benchmarks.coordination.stage import GROUP, LONG, Figures, Stage, tell
from benchmarks.figures import median, ratio
from jobs_lib.coordination import Consumer
from jobs_lib.coordination.record import Record
from jobs_lib.kafka.member import GroupMember
from jobs_lib.kafka.places import find_places

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Message

    from jobs_lib.kafka.poller import Partition

PARTITIONS = 4
BATCH = 100
_VALUE = b"1" * 100
_COMMIT_SECONDS = 1.0


class Counted:
    """Counts records from when each partition has come, and tells how many a second."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._handled = 0
        self._before = 0
        """Those that had come when the last partition came: they do not count."""
        self._seen: set[Any] = set()
        self._began = 0.0
        self._took = 0.0
        self._ended = threading.Event()

    def __call__(self, records: list[Any]) -> None:
        """Take a batch of one partition, or several ones."""
        self._handled += len(records)
        if len(self._seen) < PARTITIONS:
            self._seen |= {_find_partition(one) for one in records}
            self._before, self._began = self._handled, time.perf_counter()
        elif self._handled >= self._wanted:
            self._took = time.perf_counter() - self._began
            self._ended.set()

    def wait(self) -> float:
        """Wait for all; return records a second."""
        if not self._ended.wait(LONG):
            raise RuntimeError(f"{self._handled:,} of {self._wanted:,} in {LONG:g} s")
        return (self._wanted - self._before) / self._took


def _find_partition(record: Record | Message) -> int | None:
    at = record.partition
    return at() if callable(at) else at


class Taker:
    """A listener of a group's member that gives the records to a handler."""

    def __init__(
        self, member: GroupMember, handle: Callable[[list[Any]], None], makes: bool
    ) -> None:
        self._member = member
        self._handle = handle
        self._makes = makes
        """Whether the handler gets records, and not Kafka's messages."""
        self._next: dict[Partition, int] = {}
        self._committed_at = time.monotonic()
        member.listen(self)

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """Begin with the first record."""
        for partition in partitions:
            self._member.begin(partition, 0)

    def received(self, messages: list[Message]) -> None:
        """Handle them in batches, and commit now and then."""
        for first in range(0, len(messages), BATCH):
            batch = messages[first : first + BATCH]
            self._handle([Record(one) for one in batch] if self._makes else batch)
        for one in messages:
            at = (one.topic() or "", one.partition() or 0)
            self._next[at] = (one.offset() or 0) + 1
        if time.monotonic() > self._committed_at + _COMMIT_SECONDS:
            self._committed_at = time.monotonic()
            self._member.commit(dict(self._next))

    def has_room(self) -> bool:
        """Always: nothing waits here."""
        return True

    def revoked(self, partitions: frozenset[Partition]) -> None: ...

    def lost(self, partitions: frozenset[Partition]) -> None: ...

    def begun(self, partition: Partition) -> None: ...

    def out_of_range(self, partition: Partition, start: int, end: int) -> None: ...

    def committed(self, offsets: dict[Partition, int]) -> None: ...


def measure_least_once(stage: Stage) -> Figures:
    """Read a topic at least once, and by a group's member, by turns."""
    count = stage.size(2_000_000, 200_000)
    topic = _fill(stage, count)
    pieces: dict[str, Callable[[], float]] = {
        "consume_records_s": lambda: _consume(stage, topic, count)[0],
        "group_records_s": lambda: _take(stage, topic, count, makes=True),
        "group_messages_s": lambda: _take(stage, topic, count, makes=False),
    }
    rates: dict[str, list[float | None]] = {name: [] for name in pieces}
    # Two runs of one kind differ by more than the two kinds do.
    for number in range(stage.size(15, 1)):
        names = list(pieces)
        for name in names if number % 2 == 0 else reversed(names):
            rates[name].append(pieces[name]())
            tell(f"{name}: {rates[name][-1]:,.0f}")
    found: Figures = {name: median(values) for name, values in rates.items()}
    return found | {
        "consume_vs_group": ratio(found["consume_records_s"], found["group_records_s"]),
        "consume_vs_group_messages": ratio(
            found["consume_records_s"], found["group_messages_s"]
        ),
    }


def measure_most_once(stage: Stage) -> Figures:
    """Read at most once with small and large batches, and count what that costs."""
    figures: Figures = {}
    for batch, count in ((1, 5_000), (100, 300_000), (1_000, 1_000_000)):
        wanted = stage.size(count, count // 5)
        rate, records = _consume(
            stage,
            _fill(stage, wanted),
            wanted,
            delivery="at_most_once",
            batch=batch,
        )
        figures[f"at_most_once_records_s_batch_{batch}"] = rate
        figures[f"coordination_messages_per_record_batch_{batch}"] = records / wanted
        tell(f"batches of {batch}: {rate:,.0f} records/s")
    return figures


def _consume(stage: Stage, topic: str, count: int, **more: Any) -> tuple[float, int]:
    """Handle all records; return how many a second, and the log's records."""
    handle, log = Counted(count), stage.make_log()
    given: dict[str, Any] = {"batch": BATCH} | more
    with Consumer(
        stage.settings,
        log=log,
        group=GROUP,
        client_id="bench",
        topics=[topic],
        handle=handle,
        **given,
    ):
        rate = handle.wait()
        return rate, sum(find_places(stage.settings, log, "end").values())


def _take(stage: Stage, topic: str, count: int, *, makes: bool) -> float:
    handle = Counted(count)
    member = GroupMember(stage.settings, f"bench-{uuid.uuid4().hex[:8]}", [topic])
    Taker(member, handle, makes)
    member.start()
    try:
        return handle.wait()
    finally:
        member.stop()


def _fill(stage: Stage, count: int) -> str:
    topic = stage.make_topic("data", PARTITIONS)
    producer = Producer(
        {"bootstrap.servers": stage.broker.bootstrap_servers, "linger.ms": 20}
    )
    for number in range(count):
        while True:
            try:
                producer.produce(topic, _VALUE, b"key", partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    if producer.flush(LONG):
        raise RuntimeError("the broker does not take all records in time")
    return topic
