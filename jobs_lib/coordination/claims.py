"""How a member gets and keeps one partition: see PROTOCOL.md, sections 5 and 6.

These functions decide; :mod:`jobs_lib.coordination.member` sends and reads. The check
of the protocol runs the same functions through all interleavings of a small system.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    ReleasingPartition,
    Sender,
    Shared,
)
from jobs_lib.coordination.world import Outcome


class Phase(StrEnum):
    """How far a member is with a partition."""

    FREE = "free"
    """It has nothing to do with it."""
    CLAIMING = "claiming"
    """It has sent a claim."""
    CONFIRMING = "confirming"
    """Its claim was valid, and its first heartbeat is not read back."""
    HELD = "held"
    """It may process records."""


class Hold(NamedTuple):
    """What a member knows about its own claim to a partition."""

    phase: Phase = Phase.FREE
    claim: int | None = None


FREE = Hold()


def begin_claim(
    sender: Sender, shared: Shared, interval_ms: int
) -> tuple[Hold, ClaimingPartition]:
    """Claim a partition."""
    return Hold(Phase.CLAIMING), ClaimingPartition(sender, shared, interval_ms)


def keep(
    hold: Hold, sender: Sender, shared: Shared, position: int | None
) -> Heartbeat | None:
    """Say that the partition is held; None if it is not."""
    if hold.claim is None:
        return None
    return Heartbeat(sender, shared, hold.claim, position)


def claim_messages(
    hold: Hold, sender: Sender, shared: Shared, first: int | None, end: int
) -> ClaimingMessages | None:
    """Claim a batch to process it at most once; None if the partition is not held."""
    if hold.phase is not Phase.HELD or hold.claim is None:
        return None
    return ClaimingMessages(sender, shared, hold.claim, first, end)


def release(
    hold: Hold, sender: Sender, shared: Shared, position: int | None
) -> ReleasingPartition | None:
    """Let the partition go; None if it is not held."""
    if hold.claim is None:
        return None
    return ReleasingPartition(sender, shared, hold.claim, position)


def read_back(
    hold: Hold,
    message: ClaimingPartition | Heartbeat | ClaimingMessages | ReleasingPartition,
    offset: int,
    outcome: Outcome,
) -> Hold:
    """Draw the conclusion from an own record that was read back at an offset."""
    if isinstance(message, ClaimingPartition):
        if hold.phase is not Phase.CLAIMING:
            return hold  # It was given up meanwhile.
        return Hold(Phase.CONFIRMING, offset) if outcome is Outcome.VALID else FREE
    if message.claim != hold.claim:
        return hold  # It is about an older claim.
    if isinstance(message, ReleasingPartition):
        return FREE
    if outcome is Outcome.PAUSED or outcome is Outcome.NOT_NEXT:
        return hold  # Held all the same: only these records may not be processed.
    if outcome is not Outcome.VALID:
        return FREE
    return Hold(Phase.HELD, hold.claim)


def is_sure(sent_at: float, now: float, interval: float) -> bool:
    """Whether nobody else can hold a partition yet.

    Args:
        sent_at: when the last record that was read back as valid was *sent*.
        now: by the same clock of this process, in seconds.
        interval: in seconds.
    """
    return now - sent_at < interval
