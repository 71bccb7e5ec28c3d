"""What a member holds, as those see it who work with that. Any thread may ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.coordination import claims
from jobs_lib.coordination.claims import Phase
from jobs_lib.coordination.names import check_position
from jobs_lib.coordination.patience import read_clock

if TYPE_CHECKING:
    from jobs_lib.coordination.kept import Kept
    from jobs_lib.coordination.log import Log
    from jobs_lib.coordination.messages import Sender, Shared
    from jobs_lib.coordination.writer import Sent


class Holdings:
    """The partitions that a member claims or holds.

    Args:
        log: says who holds what.
        sender: the member.
        interval: in seconds.
    """

    def __init__(self, log: Log, sender: Sender, interval: float) -> None:
        self.log = log
        self.sender = sender
        self.interval = interval
        self._kept: dict[Shared, Kept] = {}

    def list_held(self) -> dict[Shared, int | None]:
        """List what is held now, with the positions."""
        with self.log.lock:
            return {
                shared: one.position
                for shared, one in self._kept.items()
                if one.hold.phase is Phase.HELD
            }

    def is_held(self, shared: Shared) -> bool:
        """Whether a partition is held, as far as this member knows."""
        with self.log.lock:
            kept = self._kept.get(shared)
            return kept is not None and kept.hold.phase is Phase.HELD

    def is_sure(self, shared: Shared) -> bool:
        """Whether nobody else can hold a partition yet."""
        with self.log.lock:
            kept = self._kept.get(shared)
            return (
                kept is not None
                and kept.hold.phase is Phase.HELD
                and claims.is_sure(kept.sure_at, read_clock(), self.interval)
            )

    def has_ousted(self, shared: Shared) -> bool:
        """Whether what is held was taken from a holder that had become stale."""
        with self.log.lock:
            kept = self._kept.get(shared)
            return kept is not None and kept.has_ousted

    def set_position(
        self, shared: Shared, position: int, *, at_once: bool = False
    ) -> None:
        """Say that all before a position is processed; the next heartbeat tells it.

        A position is the caller's: nobody compares it with what Kafka has. One below
        the known position says nothing new.

        Args:
            shared: the partition.
            position: the offset of the next record.
            at_once: whether that heartbeat is sent now.

        Raises:
            ConfigurationError: it is no integer from 0 to 2**63 - 1.
        """
        position = check_position(position)
        with self.log.lock:
            if (kept := self._kept.get(shared)) is not None:
                kept.position = max(position, kept.position or 0)
                if at_once and not kept.is_releasing:
                    self._send_heartbeat(shared, kept)

    def release(self, shared: Shared) -> None:
        """Release a partition that is to be left, with the position set last."""
        with self.log.lock:
            kept = self._kept.get(shared)
            # It may have been lost, and be held anew: that is another holding.
            if kept is None or kept.is_releasing or not kept.is_leaving:
                return
            message = claims.release(kept.hold, self.sender, shared, kept.position)
            if message is not None:
                kept.is_releasing = True
                self.log.send(message, then=self._read_back)

    def claim_messages(
        self, shared: Shared, first: int | None, end: int
    ) -> Sent | None:
        """Claim a batch, to process it at most once; None if it is not held.

        Args:
            shared: the partition.
            first: the position that the log knows; None if it knows none.
            end: the offset behind the batch.

        Raises:
            ConfigurationError: one of them is no integer from 0 to 2**63 - 1.
        """
        first = None if first is None else check_position(first)
        end = check_position(end)
        with self.log.lock:
            kept = self._kept.get(shared)
            if kept is None or kept.is_releasing:
                return None
            message = claims.claim_messages(kept.hold, self.sender, shared, first, end)
            if message is None:
                return None
            # If it is refused, it keeps nothing: heartbeats must not wait for it.
            return self.log.send(message, then=self._read_back)

    def _send_heartbeat(self, shared: Shared, kept: Kept) -> None:
        message = claims.keep(kept.hold, self.sender, shared, kept.position)
        if message is not None:
            kept.sent_at = read_clock()
            self.log.send(message, then=self._read_back)

    def _read_back(self, sent: Sent) -> None:
        """Draw the conclusion from an own record; called with the log's lock held."""
        raise NotImplementedError
