"""What members follow in the check of the protocol: the real rules, and wrong ones.

Each wrong one differs from the real rules in one way that looks harmless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs_lib.coordination.messages import (
    ClaimingMessages,
    Heartbeat,
    Message,
    ReleasingPartition,
    Sender,
    Shared,
)
from jobs_lib.coordination.world import Entry, Freshness, Outcome, World

if TYPE_CHECKING:
    from collections.abc import Callable

OWN_CLOCK_AHEAD_MS = 1_000


@dataclass(frozen=True)
class Rules:
    """What the world and the members do."""

    world: Callable[[int], World] = World
    reads_claim_back: bool = True
    reads_first_heartbeat_back: bool = True
    asks_whether_sure: bool = True
    processes_before_reading_back: bool = False
    """At most once, the well-known steps: a batch is announced, found in the log, and
    committed by a heartbeat that nobody reads back."""


class LatestWins(World):
    """A claim beats another that has no heartbeat yet."""

    def judge(self, sender: Sender, shared: Shared) -> Outcome:
        holding = self.find(shared).holding
        if holding is not None and not holding.confirmed:
            return Outcome.VALID
        return super().judge(sender, shared)


class StaleAtOne(World):
    """Others take a holding over when it is not fresh."""

    def judge(self, sender: Sender, shared: Shared) -> Outcome:
        holding = self.find(shared).holding
        if (
            holding is not None
            and holding.find_freshness(self.now_ms) is not Freshness.FRESH
        ):
            return Outcome.VALID
        return super().judge(sender, shared)


class OwnClock(World):
    """Others ask a clock of their own, which is ahead of the brokers'."""

    def judge(self, sender: Sender, shared: Shared) -> Outcome:
        told, self.now_ms = self.now_ms, self.now_ms + OWN_CLOCK_AHEAD_MS
        try:
            return super().judge(sender, shared)
        finally:
            self.now_ms = told


class FreshRestart(World):
    """A client that restarts takes its partition over at once."""

    def judge(self, sender: Sender, shared: Shared) -> Outcome:
        holding = self.find(shared).holding
        if holding is not None and holding.client_id == sender.client_id:
            return Outcome.VALID
        return super().judge(sender, shared)


class AnyClaim(World):
    """A record of the holder's client counts, whatever claim it is about."""

    def fold(
        self, offset: int, time_ms: int, partitions: int, message: Message
    ) -> Outcome:
        if isinstance(message, Heartbeat | ClaimingMessages | ReleasingPartition):
            holding = self.find(message.shared).holding
            sender = message.sender
            if holding is not None and holding.client_id == sender.client_id:
                sender = sender._replace(instance_id=holding.instance_id)
                message = message._replace(sender=sender, claim=holding.claim)
        return super().fold(offset, time_ms, partitions, message)


class AnnouncedOnly(World):
    """A batch that is claimed does not move the position: a heartbeat does."""

    def fold(
        self, offset: int, time_ms: int, partitions: int, message: Message
    ) -> Outcome:
        outcome = super().fold(offset, time_ms, partitions, message)
        if isinstance(message, ClaimingMessages) and outcome is Outcome.VALID:
            entry = self.entries[message.shared]
            self.entries[message.shared] = Entry(message.first, entry.holding)
        return outcome


REAL = Rules()
