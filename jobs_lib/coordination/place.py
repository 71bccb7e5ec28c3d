"""One partition of the log, as a reader has it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jobs_lib.coordination.messages import ClaimingMessages
from jobs_lib.coordination.patience import read_clock
from jobs_lib.coordination.snapshots import Collector, Pacer
from jobs_lib.coordination.world import World

if TYPE_CHECKING:
    from jobs_lib.coordination.messages import Message, Sender
    from jobs_lib.coordination.snapshots import Found
    from jobs_lib.coordination.world import Outcome
    from jobs_lib.coordination.writer import Sent


class Place:
    """A world, and the own records that are to be read back there."""

    def __init__(
        self, number: int, start: int, target: int, asked_at: float = -math.inf
    ) -> None:
        self.number = number
        self.world = World(number)
        self.world.next_offset = start
        self.begins_at = start
        """The offset behind the last one of which nothing is known."""
        self.target = target
        """The end that it had when the reader began."""
        self.current_at = asked_at
        """When, by this machine's clock, all that was read here stood in the log and
        no more did: when that end was asked for, and then when the newest own record
        was sent that was read back."""
        self.catching_up: Sent | None = None
        """The probe whose reading back makes it current."""
        self.is_partial = False
        """Whether the log said something before it that this reader does not know."""
        self.is_lost = False
        """Whether a snapshot says so of its writer, or another log was here before."""
        self.is_telling = False
        """Whether a snapshot is on its way that says that positions were lost."""
        self.is_restored = False
        """Whether it began with a snapshot."""
        self.folded = 0
        self.collector = Collector()
        self.pacer = Pacer()
        self.asked: Sent | None = None
        """The probe that wants a snapshot."""
        self.asked_ms: int | None = None
        """The time of the log at it."""
        self.has_guessed = False
        """Whether a snapshot was written without knowing the beginning."""
        self.unacknowledged: set[Sent] = set()
        self._waiting: dict[int, Sent] = {}
        """The acknowledged ones that are not folded yet, by offset."""
        self._own: dict[int, tuple[Message, Outcome]] = {}
        """What own records did that are not acknowledged yet, by offset."""
        self._undecided: dict[Sent, Exception] = {}
        """Claims of batches that were not acknowledged in time, with the reason. They
        may be in the log all the same, and their records must not be lost then."""
        self._moved_at = 0.0
        """When the last record was folded, or a probe was sent."""

    @property
    def has_lost(self) -> bool:
        """Whether a partition without a position may have had one."""
        return self.is_partial or self.is_lost

    @property
    def is_behind(self) -> bool:
        """Whether it was not read up to the end that it had at first."""
        return self.world.next_offset < self.target

    def restore(self, snapshot: Found) -> None:
        """Begin behind a snapshot."""
        self.world = snapshot.restore(self.number)
        self.pacer.written(self.world.now_ms)
        self.is_partial, self.is_restored = False, True
        self.is_lost = snapshot.is_partial

    def begin_at(self, offset: int) -> None:
        """Begin with a later record: those before it say nothing any more."""
        self.world = World(self.number)
        self.world.next_offset = offset
        self.collector = Collector()
        self.begins_at = offset
        self.is_partial = True

    def can_begin_with(self, snapshot: Found) -> bool:
        """Whether all records behind a snapshot are there."""
        return snapshot.as_of + 1 >= self.begins_at

    def fold(
        self, offset: int, time_ms: int, partitions: int, said: Message, own: Sender
    ) -> Outcome:
        """Apply a record, and read it back if it is an own one."""
        outcome = self.world.fold(offset, time_ms, partitions, said)
        self._note_move()
        if said.sender[1:] == own[1:]:
            sent = self._waiting.pop(offset, None) or self._find_undecided(said)
            if sent is not None:
                self._end(sent, offset, outcome)
            elif self.unacknowledged:
                self._own[offset] = said, outcome
        return outcome

    def pass_over(self, offset: int, time_ms: int) -> None:
        """Pass over a record that nobody can read."""
        self.world.pass_over(offset, time_ms)
        self._note_move()

    def acknowledge(self, sent: Sent, offset: int) -> None:
        """Note the offset of an own record, which may be folded already."""
        self.unacknowledged.discard(sent)
        sent.offset = offset
        _, outcome = self._own.pop(offset, (None, None))
        self._forget_own()
        if outcome is not None:
            self._end(sent, offset, outcome)
        elif offset >= self.world.next_offset:
            # What was folded already, such as a snapshot, nobody waits for.
            self._waiting[offset] = sent

    def give_up(self, sent: Sent, error: Exception) -> None:
        """Note that an own record will not be acknowledged.

        A claim of a batch ends once the log tells whether it is in: its batch belongs
        to this member then, and to nobody else. All others end at once.
        """
        self.unacknowledged.discard(sent)
        if not isinstance(sent.message, ClaimingMessages):
            sent.end(None, error)
        else:
            for offset, (said, outcome) in self._own.items():
                if said == sent.message:
                    self._end(sent, offset, outcome)
                    break
            else:
                self._undecided[sent] = error
        self._forget_own()

    def fail(self, error: Exception) -> None:
        """Fail all own records that were not read back."""
        for sent in self._take_pending():
            sent.end(None, error)

    def hand_over(self, error: Exception) -> list[Sent]:
        """Fail all own records likewise, but the claims of batches; return those.

        They may be in the log, and it tells once it was read anew: see :meth:`adopt`.
        What was read here already is not left to that reader, who may begin behind it.
        """
        told = {
            said: (offset, outcome) for offset, (said, outcome) in self._own.items()
        }
        pending = self._take_pending()
        for sent in pending:
            if not isinstance(sent.message, ClaimingMessages):
                sent.end(None, error)
            elif sent.message in told:
                sent.offset, outcome = told[sent.message]
                sent.end(outcome)
        return [sent for sent in pending if not sent.is_done]

    def adopt(self, sent: Sent, read_to: int, error: Exception) -> None:
        """Look for a claim of a batch that the reader before this one has not met.

        Args:
            sent: the claim.
            read_to: the offset up to which that one had read.
            error: ends the claim if it may stand where this reader has not read.
        """
        if self.world.next_offset <= read_to:
            self._undecided[sent] = error
        else:
            sent.end(None, error)

    def _take_pending(self) -> list[Sent]:
        pending = [*self.unacknowledged, *self._waiting.values(), *self._undecided]
        self.unacknowledged.clear()
        self._waiting.clear()
        self._undecided.clear()
        self._own.clear()
        return list(dict.fromkeys(pending))

    def note_asked(self, sent: Sent) -> None:
        """Note the time of the log at the probe that wants a snapshot."""
        if sent.error is None:
            self.asked_ms = self.world.now_ms

    def ask_again(self) -> None:
        """Ask for a snapshot anew: the one that was written is not in the log."""
        self.asked, self.has_guessed = None, False

    def note_probe(self, quiet: float) -> bool:
        """Whether nothing has moved for some seconds; a probe is sent then."""
        now = read_clock()
        if now - self._moved_at < quiet:
            return False
        self._moved_at = now
        return True

    def _find_undecided(self, said: Message) -> Sent | None:
        return next((one for one in self._undecided if one.message == said), None)

    def _end(self, sent: Sent, offset: int, outcome: Outcome) -> None:
        """End an own record that was read back."""
        self._undecided.pop(sent, None)
        self.current_at = max(self.current_at, sent.sent_at)
        sent.offset = offset
        sent.end(outcome)
        # The client keeps the order: what was sent before it would have come before it.
        for one in [one for one in self._undecided if one.sent_at < sent.sent_at]:
            one.is_absent = True
            one.end(None, self._undecided.pop(one))

    def _forget_own(self) -> None:
        if not self.unacknowledged:
            # Those whose acknowledgements were lost: nobody asks for them.
            self._own.clear()

    def _note_move(self) -> None:
        self.folded += 1
        self._moved_at = read_clock()
