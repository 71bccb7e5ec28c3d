"""Which run of a client goes on when two are at work: PROTOCOL.md, section 5.

A run is one process of a client, from its start to its end. Two runs read the same
log, and come to the same conclusion by it: one of them goes on, and the other ends.
Nothing here knows Kafka, a clock or a thread.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs_lib.coordination.messages import Probe


class Verdict(StrEnum):
    """What a run should do."""

    GO_ON = "go on"
    WAIT = "claim nothing, until the claims on their way are read back"
    IS_REFUSED = "end: an earlier run is at work"
    IS_REPLACED = "end: a later run is at work"


class Runs:
    """What a run of a client knows about the other runs of it.

    Args:
        instance_id: of this run.
        interval_ms: for how long it lets an earlier run answer.
    """

    def __init__(self, instance_id: str, interval_ms: int) -> None:
        self._own = instance_id
        self._interval_ms = interval_ms
        self._read_ms = 0
        """The time of the log at the last probe that was noted."""
        self._until_ms: int | None = None
        """Until when an earlier run may answer; None before this one has begun."""
        self._earlier: set[str] = set()
        self._later: dict[str, int | None] = {}
        """Until when a later run waits for an answer; None once it has had its own."""
        self._answered: set[str] = set()
        """Earlier runs that are at work."""
        self._missed: set[str] = set()
        """Later runs that were answered too late."""
        self._ousted: set[str] = set()
        """Runs from which this one has taken a partition."""
        self._ousted_by: set[str] = set()
        """Runs that have taken a partition from this one."""

    @property
    def owes_answer(self) -> bool:
        """Whether a later run has begun, and this one has not answered yet."""
        return any(until is not None for until in self._later.values())

    def note_probe(self, probe: Probe, now_ms: int) -> None:
        """Note a probe of the client in its home, in the order of the log.

        Args:
            probe: of this run or another one. One that wants a snapshot says nothing,
                also of a run that has begun: a run may ask for one before it begins.
            now_ms: the time of the log there.
        """
        if probe.wants_snapshot:
            return
        instance_id, interval_ms = probe.sender.instance_id, probe.interval_ms
        if now_ms < self._read_ms:
            return  # The log is read anew.
        self._read_ms = now_ms
        if instance_id == self._own:
            self._note_own(now_ms, interval_ms)
        elif self._until_ms is None:
            self._earlier.add(instance_id)
        elif instance_id in self._later:
            return
        elif interval_ms is not None and instance_id not in self._earlier:
            self._later[instance_id] = now_ms + interval_ms
        elif now_ms < self._until_ms:
            self._answered.add(instance_id)

    def note_claim(self, instance_id: str, holder: str) -> None:
        """Note a valid claim of the client to what another run of it has held."""
        if instance_id == self._own:
            self._ousted.add(holder)
        elif holder == self._own:
            self._ousted_by.add(instance_id)

    def judge(self, *, is_claiming: bool) -> Verdict:
        """Say what this run should do.

        Args:
            is_claiming: whether the fate of one of its claims is not known yet.
        """
        # If each has taken a partition from the other, the later one goes on. Both know
        # that: the order of their claims, at two places of the log, nobody knows.
        earlier = self._earlier | self._answered
        if self._ousted_by - earlier:
            return Verdict.IS_REPLACED
        if self._ousted_by - self._ousted:
            return Verdict.WAIT if is_claiming else Verdict.IS_REPLACED
        # A run that has lost a partition to this one ends, whatever was answered.
        if not (self._answered | self._missed) - self._ousted:
            return Verdict.GO_ON
        if is_claiming:
            return Verdict.WAIT
        is_refused = bool(self._answered - self._ousted)
        return Verdict.IS_REFUSED if is_refused else Verdict.IS_REPLACED

    def _note_own(self, now_ms: int, interval_ms: int | None) -> None:
        if self._until_ms is None:
            if interval_ms is not None:
                self._until_ms = now_ms + self._interval_ms
            return
        for instance_id, until_ms in self._later.items():
            if until_ms is not None:
                if now_ms >= until_ms:
                    self._missed.add(instance_id)
                self._later[instance_id] = None
