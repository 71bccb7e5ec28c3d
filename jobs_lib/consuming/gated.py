"""The partitions of one consumer whose next records wait for other groups.

Blocks end at the gate (see :mod:`jobs_lib.consuming.gate`). A partition whose first
record has to wait is held: no thread takes it until an answer of Kafka opens the gate.
Each answer is compared once with all of them, so a thousand held partitions cost
nothing between two answers.

The records of a held partition stay in memory for some seconds: a group commits about
once a second, and to fetch them again each time would cost more. Then they are dropped,
and the partition is paused in Kafka, so that others flow and nothing grows.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.consuming.gate import Gate, Held
from jobs_lib.kafka.dependencies import REFRESHES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import Message

    from jobs_lib.consuming.progress import Progress
    from jobs_lib.consuming.queues import Queues
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.kafka.dependencies import Answers
    from jobs_lib.kafka.member import Partition
    from jobs_lib.kafka.positions import Positions

_KEEP_SECONDS = 5.0
"""How long the records of a held partition stay in memory."""
_TELL_SECONDS = 5.0
"""How long a partition may be held before an event reports it."""
_TELL_PAUSE = 10.0
"""Seconds between two events of closed gates."""
_LOOK_SECONDS = 0.5


class Gated:
    """Holds partitions of one group while their next records wait for others."""

    def __init__(
        self,
        group: str,
        declared: Iterable[Subscription],
        queues: Queues,
        positions: Positions,
        refresh: float,
    ) -> None:
        """Prepare.

        Args:
            group: the consumer group.
            declared: what it reads, and what each topic waits for.
            queues: its partitions.
            positions: says how far other groups are, every ``refresh`` seconds.
            refresh: seconds between two answers.
        """
        self._group = group
        self._gates = {one.topic: Gate(one.topic, one.after) for one in declared}
        self._queues = queues
        self._positions = positions
        self._within = REFRESHES * refresh
        self._looked_at = 0.0
        self._told: set[Partition] = set()
        """Those of which it was told that they wait, and that still do."""
        self._told_at = -_TELL_PAUSE
        self._closed_at: float | None = None
        """When the first of them was held; None if none was told."""
        positions.listen(self.judge)

    def cut(self, progress: Progress, block: list[Message]) -> list[Message]:
        """Cut a block where its records have to wait; the caller holds the lock.

        A partition whose first record has to wait is held.

        Raises:
            RecordError: the first record does not say what it waits for.
        """
        gate = self._gates[progress.partition[0]]
        if not block or not gate.after:
            return block
        before, progress.held = progress.held, None
        answers = self._ask(gate)
        count = gate.count_open(block, answers)
        if count:
            return block if count == len(block) else block[:count]
        places = gate.locate(block[0])
        if (wait := gate.find_wait(places, answers)) is not None:
            is_same = before is not None and before.places == places
            since = before.since if before and is_same else time.monotonic()
            progress.held = Held(places, wait, since)
        return []

    def judge(self) -> None:
        """Let the held partitions go on whose gate is open, once Kafka has answered.

        To ask is the question for the next answer, so none becomes too old.
        """
        changed = self._queues.changed
        with changed:
            answers = {topic: self._ask(gate) for topic, gate in self._gates.items()}
            for progress in self._queues.partitions.values():
                if (held := progress.held) is None:
                    continue
                topic = progress.partition[0]
                wait = self._gates[topic].find_wait(held.places, answers[topic])
                if wait is not None:
                    held.wait = wait
                    continue
                progress.held = None
                self._queues.refill(progress)
                changed.notify_all()

    def look(self) -> None:
        """Free the memory of partitions that wait for long, and tell of them.

        Workers call it again and again, also when idle. It asks Kafka anew where a
        round of questions has failed.
        """
        with self._queues.changed:
            now = time.monotonic()
            if now < self._looked_at + _LOOK_SECONDS:
                return
            self._looked_at = now
            for gate in self._gates.values():
                self._ask(gate)
            waiting: dict[Partition, Held] = {}
            for partition, progress in self._queues.partitions.items():
                held = progress.held
                if held is None or progress.leaving:
                    continue
                if now > held.since + _TELL_SECONDS:
                    waiting[partition] = held
                # What the log may not have any more is not asked for again.
                is_there = progress.range is None
                is_idle = bool(progress.waiting) and not progress.busy
                if is_there and is_idle and now > held.since + _KEEP_SECONDS:
                    self._queues.pause(progress)
            events = [*self._find_events(waiting, now)]
        for event, fields in events:
            telemetry.emit(event, group=self._group, **fields)

    def _find_events(
        self, waiting: dict[Partition, Held], now: float
    ) -> Iterable[tuple[str, dict[str, object]]]:
        """Find what is to be told: one event for all partitions."""
        self._told &= waiting.keys()
        if self._closed_at is not None and not self._told:
            yield "gate.opened", {"seconds": round(now - self._closed_at, 1)}
            self._closed_at = None
        if waiting.keys() <= self._told or now < self._told_at + _TELL_PAUSE:
            return
        partition = min(waiting, key=lambda one: waiting[one].since)
        longest = waiting[partition]
        if self._closed_at is None:
            self._closed_at = longest.since
        self._told, self._told_at = set(waiting), now
        yield (
            "gate.closed",
            {
                "count": len(waiting),
                "origin": f"{partition[0]}/{partition[1]}",
                "after": longest.wait.dependency.group,
                "seconds": round(now - longest.since, 1),
                "reason": longest.wait.explain(),
            },
        )

    def _ask(self, gate: Gate) -> Answers:
        return {
            one: self._positions.ask_handled(one.group, one.topic, within=self._within)
            for one in gate.after
        }
