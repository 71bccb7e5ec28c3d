"""A consumer that shares partitions over a coordination log, without a database.

See PROTOCOL.md, section 6. One thread fetches records and calls the handler. The
member's own threads keep what is held.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Self

from confluent_kafka import KafkaException

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT, Retry
from jobs_lib.coordination.intake import Intake, report_lost
from jobs_lib.coordination.member import BEATS, Member
from jobs_lib.coordination.options import Delivery, Start, check_options
from jobs_lib.coordination.part import Part
from jobs_lib.coordination.patience import PIECE, Patience, read_clock
from jobs_lib.coordination.record import Record
from jobs_lib.coordination.world import Outcome
from jobs_lib.errors import JobsError, UnavailableError
from jobs_lib.kafka.places import read_ends
from jobs_lib.masking import describe
from jobs_lib.returned import refuse_lazy
from jobs_lib.signals import handle_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from confluent_kafka import Message

    from jobs_lib.coordination.messages import Shared
    from jobs_lib.coordination.writer import Sent
    from jobs_lib.settings import Settings

_RETRY = Retry(first=0.2, cap=30.0)
_UNSURE_SECONDS = 0.02
_TURN_SECONDS = 0.01
"""A turn begins no batch after these: other partitions wait, and records arrive."""
_AWAITED = "To await something, call `asyncio.run` in it"
_END_SECONDS = 2.0
"""For the end of a partition: all others wait meanwhile."""
_LOOK_SECONDS = 0.2
"""Who waits for a claim of a batch looks so often whether it should end or leave."""
_ANSWER_SECONDS = 10.0
"""After these, and two intervals, a claim that was not read back is worth a report."""


class Consumer:
    """Handles the records of topics, whose partitions its group shares.

    Use it as a context manager, or call :meth:`run`, or :meth:`start` and :meth:`stop`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        log: str,
        group: str,
        client_id: str,
        topics: Collection[str],
        handle: Callable[[list[Record]], object],
        delivery: Delivery = "at_least_once",
        batch: int = 100,
        interval: float = 10.0,
        start: Start = "earliest",
        retry: Retry = _RETRY,
    ) -> None:
        """Check what is given; no connection is made yet.

        Args:
            settings: where Kafka is.
            log: the name of the coordination log in Kafka.
            group: the group's name, with a namespace: ``shop.mailer``.
            client_id: the process's name, the same after a restart.
            topics: those to read. All consumers of a group name the same ones.
            handle: called with a list of records of one partition, in their order.
            delivery: ``at_least_once`` repeats a batch whose handler fails, and what a
                killed process has not told yet; ``at_most_once`` loses the batch.
            batch: the most records of a call.
            interval: seconds; after two of them without a sign of life, others take
                over what a process has held.
            start: where a partition begins that the group has never read.
            retry: how long a partition waits after its handler has failed.

        Raises:
            ConfigurationError: a value cannot be used.
        """
        check_options(handle, delivery, batch, start, retry)
        self.group = group
        self.delivery: Delivery = delivery
        self.batch = batch
        self.member = Member(
            settings,
            log=log,
            group=group,
            client_id=client_id,
            topics=topics,
            listener=self,
            interval=interval,
            is_busy=self._is_busy,
        )
        self._settings = settings
        self._handle = handle
        self._start = start
        self._retry = retry
        self._intake = Intake(settings, group, self._work)
        self._ended = threading.Event()
        self._stopping = threading.Lock()
        self._worker: int | None = None
        """The thread that gives partitions their turns, while it does so."""
        self._doubtful: tuple[tuple[Part, Sent, list[Message]], ...] = ()
        """Claims of batches whose partitions are lost or left, and of which nobody
        knows yet whether they are in the log. Replaced under the intake's lock."""
        self._reader = self._intake.reader
        self.pulses = [*self.member.pulses, self._reader.pulse]
        """Of all its threads, for a check of their liveness."""

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    def run(self) -> None:
        """Work until SIGTERM, SIGINT or :meth:`stop`.

        Raises:
            FencedError: another process has this client's name.
            JobsError: as :meth:`jobs_lib.coordination.member.Member.start`.
        """
        in_main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGTERM, signal.SIGINT) if in_main else ()
        restore = handle_signals(signals, lambda _: self._ask_to_stop())
        try:
            self._start_unless_ended()
            # The system may hand a signal to another thread, as when the process was
            # stopped before. Python handles it once this one looks.
            while not self._ended.wait(PIECE):
                pass
        finally:
            self.stop()
            restore()
        if self.member.error is not None:
            raise self.member.error

    def start(self) -> None:
        """Join the group, and begin.

        Raises:
            FencedError: another process has this client's name.
            JobsError: as :meth:`jobs_lib.coordination.member.Member.start`.
        """
        self.member.start()
        try:
            self._reader.start()
        except BaseException:
            # It would go on to hold what nobody reads.
            self.member.stop()
            raise
        at_most = self.delivery == "at_most_once"
        telemetry.emit(
            "consumer.started",
            group=self.group,
            delivery=self.delivery,
            batch=self.batch,
            per_record=1 / self.batch if at_most else 0.0,
            per_second=BEATS / self.member.interval,
        )

    def _ask_to_stop(self) -> None:
        self._ended.set()
        # It may still start, and wait for another run of its name, or for Kafka.
        self.member.ask_to_stop()

    def _start_unless_ended(self) -> None:
        try:
            self.start()
        except JobsError:
            # Who is told to end while it starts has nothing to complain of.
            if not self._ended.is_set():
                raise

    def stop(self) -> None:
        """Finish the running batch, release all, and end.

        What the handler does not finish within ``shutdown_timeout`` is not released.
        Others then claim it after two intervals. A handler may call it, too: it returns
        at once then, and all ends once the handler has returned.
        """
        self._ended.set()
        if threading.get_ident() == self._worker:
            name = f"jobs_lib stop {self.group}"
            threading.Thread(target=self._stop, name=name).start()
        else:
            self._stop()

    def _stop(self) -> None:
        with self._stopping:
            until = time.monotonic() + self._settings.shutdown_timeout
            try:
                self.member.stop(self._settings.shutdown_timeout)
            finally:
                # Both wait for the same handlers.
                self._reader.stop(max(0.0, until - time.monotonic()))
                self._name_doubtful()

    # What the member calls

    def taken(self, shared: Shared, position: int | None) -> None:
        """See :class:`jobs_lib.coordination.member.HoldListener`."""
        self._intake.add(Part(shared, position))

    def leave(self, shared: Shared) -> None:
        """See :class:`jobs_lib.coordination.member.HoldListener`."""
        with self._intake.lock:
            part = self._intake.parts.get(shared)
            if part is not None:
                part.is_leaving = True
                if part is self._intake.turn:
                    return  # It is let go at the end of its turn.
        self._let_go(shared, part)

    def lost(self, shared: Shared) -> None:
        """See :class:`jobs_lib.coordination.member.HoldListener`.

        It does not wait for a batch that is processed: other partitions are to be left
        meanwhile. The member asks for that before it claims.
        """
        with self._intake.lock:
            part = self._intake.parts.get(shared)
        if part is not None:
            part.is_lost = True
            self._intake.remove(part)
            with self._intake.lock:
                if part is not self._intake.turn:
                    self._set_aside(part)

    def ended(self, error: Exception) -> None:
        """See :class:`jobs_lib.coordination.member.HoldListener`."""
        self._ended.set()

    def _is_busy(self, shared: Shared) -> bool:
        """Whether a batch of a partition is processed now, or claimed and not yet."""
        # In this order: a claim is no longer doubtful once its partition has the turn.
        if any(part.shared == shared for part, *_ in self._doubtful):
            return True
        turn = self._intake.turn
        return turn is not None and turn.shared == shared

    def _let_go(self, shared: Shared, part: Part | None) -> None:
        if part is not None:
            self._intake.remove(part)
            if self._set_aside(part):
                return  # It is released once that claim is settled.
        self.member.release(shared)

    # The thread that reads

    def _work(self) -> float:
        """Give partitions their turns; return for how long none has anything to do."""
        self._worker = threading.get_ident()
        try:
            if self._doubtful:
                self._settle_doubtful()
            self._give_turns()
        finally:
            self._worker = None
        if self._awaits_answer():
            return _UNSURE_SECONDS
        rest = self._intake.find_rest()
        return min(rest, _UNSURE_SECONDS) if self._doubtful else rest

    @property
    def _is_stopping(self) -> bool:
        """Whether no batch is begun any more."""
        return self._ended.is_set() or self._reader.is_stopping

    def _give_turns(self) -> None:
        until = time.monotonic() + _TURN_SECONDS
        while time.monotonic() < until and not self._is_stopping:
            if self._awaits_answer() or (part := self._intake.choose()) is None:
                break
            try:
                if part.is_begun:
                    self._take_turn(part)
                else:
                    self._begin(part)
            finally:
                if self._intake.end(part):
                    self._let_go(part.shared, part)
                elif part.is_lost:
                    self._set_aside(part)

    def _awaits_answer(self) -> bool:
        """Whether others wait for a claim of a partition that is gone."""
        since = read_clock() - self.member.interval
        return any(sent.sent_at > since for _, sent, _ in self._doubtful)

    def _begin(self, part: Part) -> None:
        """Read a partition, from its position or where a new one begins."""
        is_lost = part.position is None and self._may_be_lost(part)
        if is_lost and self.delivery == "at_most_once":
            part.is_standing = True
            told = (
                "the coordination log was cut or made anew, and nobody knows its "
                "position: at most once, it waits until the group's position is set"
            )
            report_lost(self.group, part, told, None, None)
            return
        if (
            part.position is None
            and self._start == "latest"
            and not self._begin_at_end(part)
        ):
            return
        if is_lost:
            telemetry.emit(
                "offset.moved",
                group=self.group,
                origin=part.origin,
                before=None,
                next_offset=part.position,
            )
        self._intake.begin(part)

    def _begin_at_end(self, part: Part) -> bool:
        """Let a partition begin at its end; return False if Kafka does not tell it.

        It then waits, and all others go on: it may have no leader, or be no more.
        """
        try:
            # What is in an open transaction comes later, too.
            ends = read_ends(
                self._settings, [part.origin], _END_SECONDS, committed=True
            )
            if part.origin not in ends:
                raise UnavailableError(
                    f"Kafka gives no end of {part.origin}, at which the group "
                    f"{self.group!r} begins: does the partition exist, and has it a "
                    "leader? It is asked for again"
                )
        except (JobsError, KafkaException) as error:
            part.failures += 1
            part.retry_at = time.monotonic() + RECONNECT.delay(part.failures)
            telemetry.emit("loop.failed", loop=f"begin {self.group}", error=error)
            return False
        part.position, part.failures = ends[part.origin], 0
        # The next holder begins there, too, and not at a later end. And at most once,
        # the log must know it before the first batch is claimed.
        self.member.set_position(part.shared, part.position, at_once=True)
        return True

    def _may_be_lost(self, part: Part) -> bool:
        """Whether the log may have had a position that nobody knows any more."""
        place = self.member.log.find_place(part.shared)
        return place in self.member.log.lost_places

    def _take_turn(self, part: Part) -> None:
        """Process batches, until it is the turn of another partition."""
        until = time.monotonic() + _TURN_SECONDS
        while messages := self._intake.peek(part, self.batch):
            if not self._process(part, messages) or time.monotonic() > until:
                return
            if part.is_leaving or part.is_lost or self._is_stopping:
                return
        self._intake.settle_range(part)

    def _process(self, part: Part, messages: list[Message]) -> bool:
        """Process a batch; return whether the partition can go on at once."""
        # Looked at last: what is held anew since it was lost is another part.
        if part.claim is None and (
            not self.member.is_sure(part.shared) or part.is_lost
        ):
            # Somebody else may hold it, or nobody can write to the log: a claim of a
            # batch would only wait. The next heartbeat that is read back tells.
            part.retry_at = time.monotonic() + _UNSURE_SECONDS
            return False
        if self.delivery == "at_least_once":
            return self._process_first(part, messages)
        return self._claim_first(part, messages)

    def _process_first(self, part: Part, messages: list[Message]) -> bool:
        """At least once: process a batch, and say so afterwards."""
        # What a handler does to its list is its own affair.
        first, end = find_range(messages)
        if (error := self._call(messages)) is None:
            part.failures = 0
            self._intake.drop(part, end)
            if not part.is_lost:
                self.member.set_position(part.shared, end)
            return True
        part.failures += 1
        part.retry_at = time.monotonic() + self._retry.delay(part.failures)
        telemetry.emit(
            "record.failed",
            group=self.group,
            origin=part.origin,
            offset=first,
            error=describe(error),
        )
        return False

    def _claim_first(self, part: Part, messages: list[Message]) -> bool:
        """At most once: claim a batch, and process it if the claim was read back."""
        part.retry_at = time.monotonic() + _UNSURE_SECONDS
        if part.claim is None:
            end = find_range(messages)[1]
            sent = self.member.claim_messages(part.shared, part.position, end)
            if sent is None:
                return False
            part.claim, part.patience = (sent, messages), None
        sent, messages = part.claim
        outcome = self._wait_for(part, sent)
        if outcome is None and sent.error is None:
            # The log will tell. Until then nothing else is claimed.
            self._note_silence(part)
            return False
        if outcome is Outcome.VALID:
            part.claim = None
            self._process_claimed(part, messages)
            return True
        if outcome is None and not self.member.is_held(part.shared):
            self._set_aside(part)
            return False
        part.claim = None
        # Who has lost it meanwhile has lost no record: others go on there.
        if outcome is not Outcome.NOT_HELD and self.member.is_held(part.shared):
            self._look_again(part)
        return False

    def _wait_for(self, part: Part, sent: Sent) -> Outcome | None:
        """Wait for what a claim of a batch did; None if that is not known.

        Mostly the log tells it at once. A process that dies loses each batch that it
        has claimed: nothing else is claimed meanwhile. Whatever has no answer for an
        interval is hardly in the log, such as where that has no leader. It holds no
        other partition up from then on.
        """
        until = sent.sent_at + self.member.interval
        with self._reader.pulse.elsewhere():
            while True:
                left = until - read_clock()
                try:
                    return sent.wait(max(0.0, min(left, _LOOK_SECONDS)))
                except JobsError as error:
                    if error is sent.error:
                        self._report_claim(error)
                        return None
                if left <= 0 or part.is_leaving or part.is_lost or self._is_stopping:
                    return None

    def _note_silence(self, part: Part) -> None:
        """Report a claim that has had no answer for long."""
        seconds = _ANSWER_SECONDS + 2 * self.member.interval
        if part.patience is None:
            part.patience = Patience(seconds, stop=PIECE)
        elif part.patience.is_over:
            part.patience = None
            told = (
                f"a claim of a batch of {part.origin} was not read back within "
                f"{seconds:g} s: the partition waits until the log tells whether it is "
                "in"
            )
            self._report_claim(UnavailableError(told))

    def _report_claim(self, error: JobsError) -> None:
        telemetry.emit("loop.failed", loop=f"claim {self.group}", error=error)

    def _process_claimed(self, part: Part, messages: list[Message]) -> None:
        first, end = find_range(messages)
        self._intake.drop(part, end)
        part.retry_at = 0.0
        if (error := self._call(messages)) is not None:
            self._skip(part, first, len(messages), error)

    def _look_again(self, part: Part) -> None:
        """Go on at the position that the log tells: a claim may have come late."""
        position = self.member.log.find(part.shared).position
        if position is None and part.position is not None:
            # The heartbeat that has told it is not in the log.
            self.member.set_position(part.shared, part.position, at_once=True)
        elif position is not None and position != part.position:
            before = part.position
            self._intake.drop(part, position)
            if before is not None and position > before:
                told = JobsError("the claim of it was in the log, and not read back")
                self._skip(part, before, position - before, told)

    def _set_aside(self, part: Part) -> bool:
        """Remember the claim of a partition that is lost or left, if it has one.

        Returns whether it has one. The log will tell whether that was valid.
        """
        with self._intake.lock:
            claim, part.claim = part.claim, None
            if claim is not None:
                self._doubtful = (*self._doubtful, (part, *claim))
        return claim is not None

    def _settle_doubtful(self) -> None:
        """Process what was claimed for good, name what is lost, and release the rest.

        A batch whose claim was valid is this process's, whoever holds the partition by
        now: nobody else will process it.
        """
        for one in self._doubtful:
            part, sent, messages = one
            if not self._is_decided(sent):
                continue
            with self._intake.lock:
                self._intake.turn = part
                self._doubtful = tuple(x for x in self._doubtful if x is not one)
            try:
                if sent.outcome is Outcome.VALID:
                    self._process_claimed(part, messages)
                else:
                    self._name_loss(part, sent, messages)
            finally:
                if self._intake.end(part):
                    self.member.release(part.shared)

    def _name_doubtful(self) -> None:
        """Name what may be lost at the end: nobody reads the log any more."""
        with self._intake.lock:
            doubtful, self._doubtful = self._doubtful, ()
        for one in doubtful:
            self._name_loss(*one)

    def _name_loss(self, part: Part, sent: Sent, messages: list[Message]) -> None:
        if (told := self._find_loss(part, sent, messages)) is not None:
            first = find_range(messages)[0]
            self._skip(part, first, len(messages), JobsError(told))

    def _is_decided(self, sent: Sent) -> bool:
        """Whether the log says all that it will ever say about a claim."""
        is_unknown = sent.outcome is None and not sent.is_absent
        return sent.is_done and (self.member.log.is_known or not is_unknown)

    def _find_loss(self, part: Part, sent: Sent, messages: list[Message]) -> str | None:
        """Find why a batch is lost that was claimed; None if others process it."""
        if sent.outcome is Outcome.VALID:
            return "its claim was in the log, and the process has ended since"
        if sent.outcome is not None or sent.is_absent:
            return None
        if self._is_decided(sent):
            position = self.member.log.find(part.shared).position
            if position is not None and position <= find_range(messages)[0]:
                return None
        return "nobody knows whether its claim is in the log: it may be lost"

    def _skip(self, part: Part, offset: int, count: int, error: BaseException) -> None:
        telemetry.emit(
            "record.skipped",
            group=self.group,
            origin=part.origin,
            offset=offset,
            error=describe(error),
            count=count,
        )

    def _call(self, messages: list[Message]) -> BaseException | None:
        """Call the handler; return its error."""
        records = [Record(one) for one in messages]
        with self._reader.pulse.elsewhere():
            try:
                left = self._handle(records)
                if left is not None:
                    refuse_lazy(left, f"the handler of {self.group!r}", _AWAITED)
            # Nobody would notice a thread that had ended.
            except BaseException as error:
                return error
        return None


def find_range(messages: Sequence[Message]) -> tuple[int, int]:
    """Return the offset of the first one, and the offset behind the last one."""
    first, last = messages[0].offset(), messages[-1].offset()
    assert first is not None
    assert last is not None
    return first, last + 1
