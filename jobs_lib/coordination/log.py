"""The log: all its partitions read in order and folded, and records sent to it.

See PROTOCOL.md, sections 1, 2, 5 and 8. One thread reads. Each partition of the log is
a place with a world of its own. As long as the log :attr:`Log.is_known`, the worlds are
those of its last records. When a reader meets a log that was cut, it forgets all worlds
and reads anew.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol, Self

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, KafkaError

from jobs_lib import telemetry
from jobs_lib.coordination.log_topic import (
    check_log,
    refuse_create_time,
    refuse_growth,
)
from jobs_lib.coordination.messages import (
    Probe,
    Sender,
    Snapshot,
    Unreadable,
    decode,
    find_place,
)
from jobs_lib.coordination.opening import (
    Cut,
    ReadAnew,
    open_log,
    raise_unless_soon_over,
)
from jobs_lib.coordination.patience import Patience, Standstill
from jobs_lib.coordination.snapshots import NOBODY, split
from jobs_lib.coordination.world import Outcome
from jobs_lib.coordination.writer import Sent, Writer
from jobs_lib.errors import UnavailableError
from jobs_lib.kafka.places import find_places
from jobs_lib.kafka.topic_ids import TopicIds
from jobs_lib.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from uuid import UUID

    from confluent_kafka import Message as KafkaMessage

    from jobs_lib.coordination.messages import Message, Shared
    from jobs_lib.coordination.place import Place
    from jobs_lib.coordination.world import Entry, World
    from jobs_lib.errors import AccessError
    from jobs_lib.settings import Settings

_POLL_SECONDS = 0.05
_FETCH = 500
_PAUSE = 0.1
_SEND_SECONDS = 10.0


class LogListener(Protocol):
    """Learns what the log says. The reading thread calls it, with the lock held."""

    def applied(self, place: int, message: Message, outcome: Outcome) -> None:
        """Note a record that was folded; the log may not be known yet."""

    def lost(self, reason: str) -> None:
        """Note that nothing is known any more."""

    def known(self) -> None:
        """Note that all that the log has is known, at first or again."""


class Log:
    """Reads a log, folds it, and sends records to it.

    Use it as a context manager, or call :meth:`start` and :meth:`stop`.
    """

    def __init__(
        self,
        settings: Settings,
        topic: str,
        sender: Sender,
        *,
        interval: float = 10.0,
        only_reads: bool = False,
        ids_every: float = 10.0,
        prober: Sender | None = None,
    ) -> None:
        """Prepare; no connection is made yet.

        Args:
            settings: where Kafka is.
            topic: the log's name in Kafka.
            sender: whose records are read back.
            interval: of the sender, in seconds.
            only_reads: whether it never writes. It then takes a log whose beginning is
                gone as it is.
            ids_every: seconds between two looks whether the topic was made anew.
            prober: the same run in the group of its probes; the sender by default.
        """
        self.topic = topic
        self.sender = sender
        self.prober = prober or sender
        self.interval = interval
        self.partitions = 0
        """How many the log has."""
        self.is_known = False
        """Whether the worlds are those of the log's last records."""
        self.lost_places: set[int] = set()
        """The places whose beginning nobody knew when they were read anew."""
        self.lock = threading.Condition()
        """Held while the worlds change."""
        self._settings = settings
        self._only_reads = only_reads
        self._places: list[Place] = []
        self._gaps: set[int] = set()
        self._untold: set[int] = set()
        """The places in which positions were lost with another log, as long as no
        snapshot there says so."""
        self._adrift: list[tuple[Sent, int, int, Exception]] = []
        """Claims of batches that may be in a log that is read anew: each with its
        place, how far that was read, and why nobody knows."""
        self._listeners: list[LogListener] = []
        self._refusals: deque[AccessError] = deque(maxlen=1)
        self._ids = TopicIds(settings, [topic], ids_every)
        self._id: UUID | None = None
        self._known_id: UUID | None = None
        """Of the topic when the log was known last."""
        self._read_to: dict[int, int] = {}
        """How far each place was read then."""
        self._writer: Writer | None = None
        self._opened: Consumer | None = None
        self._standstill = Standstill(interval)
        self._gives_up = threading.Event()
        """Set once nobody waits for its start any more."""
        self._loop = Loop(f"log {topic}", self._read)
        self.pulse = self._loop.pulse

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    def listen(self, listener: LogListener) -> None:
        """Add a listener; call this before :meth:`start`."""
        self._listeners.append(listener)

    def start(self, patience: float = 30.0) -> None:
        """Read the log to its end, and go on to read it in a thread.

        Args:
            patience: seconds that may pass without any progress.

        Raises:
            AccessError: Kafka does not let this client in, or denies a right.
            ConfigurationError: the topic cannot be the log.
            UnavailableError: no broker answers, or the log cannot be read in time, or
                :meth:`give_up_start` was called.
        """
        check_log(self._settings, self.topic, self.interval)
        if not self._only_reads:
            self._writer = Writer(
                self._settings,
                self.topic,
                _SEND_SECONDS,
                self._acknowledge,
                self._give_up,
            )
            self._writer.start()
        try:
            self._read_first(patience)
            self._loop.start()
        except BaseException:
            try:
                self._close()
            finally:
                if self._writer is not None:
                    self._writer.stop(0)
            raise

    def give_up_start(self) -> None:
        """Let :meth:`start`, in another thread, end soon, unless the log is known."""
        self._gives_up.set()

    def stop(self, timeout: float = 10.0) -> None:
        """End: what was sent is acknowledged first, if Kafka does so in time."""
        try:
            if self._writer is not None:
                self._writer.stop(timeout)
        finally:
            self._loop.stop()
            self._close()

    # What the worlds say

    def find_place(self, shared: Shared) -> int:
        """Find the place of a shared partition."""
        return find_place(shared.topic, shared.partition, self.partitions)

    def get_world(self, place: int) -> World:
        """Return the world of a place. Hold the lock while you look at it."""
        return self._places[place].world

    def get_worlds(self) -> list[World]:
        """Return the worlds of all places, likewise."""
        return [place.world for place in self._places]

    def find(self, shared: Shared) -> Entry:
        """Return what is known of a shared partition."""
        with self.lock:
            return self.get_world(self.find_place(shared)).find(shared)

    def read_to_end(self, timeout: float = 30.0) -> None:
        """Wait until all was folded that the log has now.

        Raises:
            UnavailableError: no broker answers, or that takes longer.
        """
        ends = find_places(self._settings, self.topic, "end")

        def is_read() -> bool:
            return self.is_known and all(
                self._places[number].world.next_offset >= end
                for number, end in ends.items()
                if number < self.partitions
            )

        with self.lock:
            if not self.lock.wait_for(is_read, timeout):
                raise UnavailableError(
                    f"the coordination log {self.topic!r} was not read to its end "
                    f"within {timeout:g} s. Is a broker down, or was the log cut?"
                )

    # Sending

    def send(
        self,
        message: Message,
        *,
        place: int | None = None,
        then: Callable[[Sent], None] | None = None,
    ) -> Sent:
        """Send a record, without waiting.

        Args:
            message: what it says.
            place: where; that of its partition by default.
            then: called once it was read back, or failed, with the lock held.
        """
        assert self._writer is not None, "this log is only read"
        sent = Sent(message, then)
        shared: Shared | None = getattr(message, "shared", None)
        key = None if shared is None else shared.origin
        with self.lock:
            if place is None:
                assert shared is not None
                place = self.find_place(shared)
            self._places[place].unacknowledged.add(sent)
        self._writer.send(sent, place, self.partitions, key)
        return sent

    def probe(self, places: Iterable[int], quiet: float = 0.0) -> None:
        """Send a probe to those places that have had no record for some seconds."""
        with self.lock:
            for number in places:
                place = self._places[number]
                if place.note_probe(quiet):
                    self.send(Probe(self.prober), place=number)

    def is_current(self, place: int) -> bool:
        """Whether it was read to its end since the reading thread last stood still."""
        with self.lock:
            return self._places[place].current_at >= self._standstill.ended_at

    def catch_up(self, place: int, then: Callable[[Sent], None]) -> None:
        """Send a probe there, unless one is on its way: read back, it tells the end.

        Args:
            place: where.
            then: called once the probe was read back, or failed, with the lock held.
        """
        with self.lock:
            asked = self._places[place].catching_up
            if asked is None or asked.is_done:
                probe = self.send(Probe(self.prober), place=place, then=then)
                self._places[place].catching_up = probe

    def _acknowledge(self, sent: Sent, number: int, offset: int) -> None:
        with self.lock:
            if not sent.is_done:
                self._places[number].acknowledge(sent, offset)

    def _give_up(self, sent: Sent, number: int, error: Exception) -> None:
        with self.lock:
            if not sent.is_done:
                self._places[number].give_up(sent, error)

    def _write_snapshot(
        self, place: Place, failed: Callable[[], None] = lambda: None
    ) -> None:
        """Write a snapshot in a thread of its own: a large world takes a while.

        Args:
            place: whose world it states.
            failed: called for each part that may not be in the log, with the lock held.
        """
        if self._writer is None:
            return
        world, writer, partitions = place.world.copy(), self._writer, self.partitions

        def note(sent: Sent) -> None:
            if sent.error is not None:
                failed()

        def write() -> None:
            for part in split(world, self.sender, is_partial=place.has_lost):
                writer.send(Sent(part, note), world.place, partitions, None)

        thread = threading.Thread(target=write, name="jobs_lib snapshot", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # No thread is left. What was read needs not be read anew for that.
            telemetry.emit("loop.failed", loop=self._loop.name, error=error)
            failed()

    # Reading

    def _read_first(self, patience: float) -> None:
        """Read in the caller's thread, so that it gets the error."""
        left, before = Patience(patience), -1
        while not self.is_known:
            if self._gives_up.is_set():
                raise UnavailableError(
                    f"the coordination log {self.topic!r} was not read to its end "
                    "before its reader was told to stop"
                )
            try:
                if self._opened is None:
                    self._opened = self._open()
                self._step(self._opened)
            except ReadAnew as why:
                self._forget(why)
            # What follows in the others, which are read, brings this one no further.
            behind = [place for place in self._places if place.is_behind]
            count = sum(place.world.next_offset for place in behind or self._places)
            if count != before:
                left, before = Patience(patience), count
            elif left.is_over:
                raise UnavailableError(
                    f"the coordination log {self.topic!r} is not read to its end, and "
                    f"for {patience:g} s nothing has followed. Has each of its "
                    "partitions a leader?"
                )

    def _read(self) -> Iterator[None]:
        try:
            while not self._loop.stopping.is_set():
                try:
                    if self._opened is None:
                        self._opened = self._open()
                    self._step(self._opened)
                except ReadAnew as why:
                    self._forget(why)
                    self._loop.stopping.wait(_PAUSE)
                yield
        except Exception as error:
            self._forget(error)
            raise

    def _open(self) -> Consumer:
        """Begin to read anew."""
        self._refusals.clear()
        # The id first: if the topic is made anew meanwhile, its id differs.
        self._id = self._ids.read([self.topic]).get(self.topic)
        consumer, places = open_log(
            self._settings,
            self.topic,
            self.interval,
            self._refusals.append,
            self._gaps,
        )
        with self.lock:
            # What was sent since the worlds were forgotten is not read back either.
            self._hand_over(
                UnavailableError(f"the coordination log {self.topic!r} was read anew")
            )
            self.partitions, self._places = len(places), places
            self._standstill = Standstill(self.interval)
            self._mark_lost(places)
            adrift, self._adrift = self._adrift, []
            for sent, number, read_to, error in adrift:
                if number < len(places):
                    places[number].adopt(sent, read_to, error)
                else:
                    sent.end(None, error)
        return consumer

    def _mark_lost(self, places: list[Place]) -> None:
        """Note that positions were lost, if the log is not the one that was known."""
        is_other = None not in (self._id, self._known_id) and self._id != self._known_id
        for place in places:
            if place.is_lost:
                self._untold.discard(place.number)  # The snapshot says so.
            if is_other or place.target < self._read_to.get(place.number, 0):
                self._untold.add(place.number)
            if place.number in self._untold:
                place.is_lost = True

    def _step(self, consumer: Consumer) -> None:
        first = consumer.poll(_POLL_SECONDS)
        self._standstill.note()
        messages = [] if first is None else [first, *consumer.consume(_FETCH, 0)]
        if self._refusals:
            raise self._refusals.pop()
        with self.lock:
            for message in messages:
                self._take(message)
            if not self.is_known:
                self._settle()
            elif self._untold:
                self._tell_losses()
            self.lock.notify_all()
        seen = self._ids.poll().get(self.topic)
        if seen is not None and seen != self._id:
            self._note_id(seen)

    def _note_id(self, seen: UUID) -> None:
        """Note the id of the topic, which was not known when it was opened."""
        if self._id is not None:
            raise Cut(f"the topic was made anew: its id is {seen}, no more {self._id}")
        self._id = seen
        if self.is_known:
            self._known_id = seen

    def _take(self, message: KafkaMessage) -> None:
        number, offset = message.partition() or 0, message.offset() or 0
        if (error := message.error()) is not None:
            place = self._places[number] if number < self.partitions else None
            if error.code() == KafkaError._PARTITION_EOF and place is not None:
                self._note_end(place, offset)
                return
            raise_unless_soon_over(error, self._settings, self.topic, place)
            return
        place = self._places[number]
        kind, time_ms = message.timestamp()
        if kind != TIMESTAMP_LOG_APPEND_TIME:
            raise refuse_create_time(self.topic, number, offset)
        if offset != place.world.next_offset:
            self._meet_gap(place, offset)
        value = message.value()
        read = decode(value.encode() if isinstance(value, str) else value)
        if isinstance(read, Unreadable):
            place.pass_over(offset, time_ms)
            return
        partitions, said = read
        outcome = place.fold(offset, time_ms, partitions, said, self.sender)
        is_own = said.sender[1:] == self.sender[1:]
        if is_own and outcome is Outcome.OTHER_COUNT:
            raise refuse_growth(
                self.topic, place.world.partitions or 0, self.partitions
            )
        if isinstance(said, Snapshot):
            self._note_snapshot(place, offset, partitions, said)
        due = place.pacer.is_due(offset, place.world.now_ms)
        is_valid = outcome is Outcome.VALID
        wanted = is_valid and isinstance(said, Probe) and said.wants_snapshot
        due = due and is_own and said.sender.group_id != NOBODY
        if self.is_known and (due or wanted):
            self._write_snapshot(place)
        for listener in self._listeners:
            listener.applied(number, said, outcome)

    def _note_end(self, place: Place, offset: int) -> None:
        """Note where a place ends: the end of a transaction there is no record."""
        if offset > place.world.next_offset:
            self._meet_gap(place, offset)

    def _meet_gap(self, place: Place, offset: int) -> None:
        told = (
            f"{self.topic}/{place.number} goes on with offset {offset}, and "
            f"{place.world.next_offset} comes next"
        )
        if self.is_known or offset < place.world.next_offset:
            raise Cut(told)
        # It is read anew already: all before the gap says nothing about what follows.
        telemetry.emit("log.cut", log=self.topic, error=told)
        self._gaps.add(place.number)
        place.begin_at(offset)

    def _note_snapshot(
        self, place: Place, offset: int, partitions: int, said: Snapshot
    ) -> None:
        if partitions != self.partitions:
            return
        place.pacer.written(place.world.now_ms)
        if said.partial:
            place.is_lost = True
            self._untold.discard(place.number)
            if self.is_known:
                self.lost_places.add(place.number)
        if not place.is_partial:
            return
        found = place.collector.add(offset, partitions, said)
        if found is not None and place.can_begin_with(found):
            raise ReadAnew(f"{self.topic}/{place.number} has a snapshot now")

    def _settle(self) -> None:
        """Say that the log is known, once it is."""
        if any(place.is_behind for place in self._places):
            return
        for place in self._places:
            before = place.world.partitions
            if before is not None and before != self.partitions:
                raise refuse_growth(self.topic, before, self.partitions)
        partial = [place for place in self._places if place.is_partial]
        if partial and not self._only_reads:
            for place in partial:
                self._ask_for_snapshot(place)
            return
        self.lost_places = {one.number for one in self._places if one.has_lost}
        self.is_known, self._known_id = True, self._id
        self._tell_losses()
        telemetry.emit(
            "log.read",
            log=self.topic,
            records=sum(place.folded for place in self._places),
            snapshots=sum(place.is_restored for place in self._places),
        )
        for listener in self._listeners:
            listener.known()

    def _tell_losses(self) -> None:
        """Let those who start later know that positions were lost with another log.

        It tells it again until the log says so: nobody else may know it.
        """
        for place in self._places:
            is_told = place.is_telling or place.number not in self._untold
            if not is_told and not self._only_reads:
                self._tell_loss(place)

    def _tell_loss(self, place: Place) -> None:
        def fail() -> None:
            place.is_telling = False

        def write(sent: Sent) -> None:
            if sent.error is None:
                self._write_snapshot(place, fail)
            else:
                fail()

        place.is_telling = True
        # A snapshot has a record before it.
        self.send(Probe(self.prober), place=place.number, then=write)

    def _ask_for_snapshot(self, place: Place) -> None:
        """Ask those who know more. If nobody answers, nobody is left who does."""
        asked = place.asked
        # Each of them asks: other runs of the client take one that does not for a sign
        # that this run has begun.
        probe = Probe(self.prober, wants_snapshot=True)
        if asked is None or asked.error is not None:
            place.asked_ms = None
            place.asked = self.send(probe, place=place.number, then=place.note_asked)
        elif place.asked_ms is not None and not place.has_guessed:
            waited = place.world.now_ms - place.asked_ms
            if waited > 2 * self.interval * 1000:
                place.has_guessed = True
                # If it is not in the log, those who know more were cut off, too.
                self._write_snapshot(place, place.ask_again)
            elif place.note_probe(self.interval / 3):
                self.send(probe, place=place.number)

    def _forget(self, why: Exception) -> None:
        """Forget all worlds, and tell so."""
        self._close()
        with self.lock:
            was_known, self.is_known = self.is_known, False
            if was_known:
                self._read_to = {
                    one.number: one.world.next_offset for one in self._places
                }
            error = UnavailableError(
                f"the coordination log {self.topic!r} must be read anew: {why}"
            )
            self._hand_over(error)
            if was_known:
                for listener in self._listeners:
                    listener.lost(str(why))
        if isinstance(why, Cut):
            telemetry.emit("log.cut", log=self.topic, error=str(why))

    def _hand_over(self, error: Exception) -> None:
        """End what was sent and not read back, but the claims of batches."""
        for place in self._places:
            read_to = place.world.next_offset
            self._adrift += [
                (sent, place.number, read_to, error) for sent in place.hand_over(error)
            ]

    def _close(self) -> None:
        consumer, self._opened = self._opened, None
        if consumer is not None:
            consumer.close()
