"""A process that consumes over a coordination log, and ends or stands still where told.

It writes a line for each batch that its handler gets: `handled PARTITION FIRST END
CLAIM`, with the claim by which it holds the partition.
`at={"claimed": 2}` with `by="kill"` or `by="stop"` sends itself that signal when it
comes to the step for the second time, after the line `at STEP`. `clock` is a file that
says by how many seconds the time of day is wrong for the process; it may change.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs_lib.coordination.consumer import Consumer
from jobs_lib.settings import Settings
from tests.support.signals import strike

if TYPE_CHECKING:
    from confluent_kafka import Message

    from jobs_lib.coordination.messages import Shared
    from jobs_lib.coordination.part import Part
    from jobs_lib.coordination.record import Record
    from jobs_lib.coordination.world import Outcome
    from jobs_lib.coordination.writer import Sent

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Staged(Consumer):
    """A consumer that comes to named steps."""

    def __init__(self, settings: Settings, at: dict[str, int], by: str, **more: Any):
        super().__init__(settings, **more)
        self._at = at
        self._signal = SIGNALS[by]
        self._counts: Counter[str] = Counter()
        self._claims: dict[Shared, int | None] = {}
        self.claim: int | None = None
        """By which the partition is held of which a batch is processed."""

    def step(self, name: str) -> None:
        """Come to a step."""
        self._counts[name] += 1
        if self._at.get(name) == self._counts[name]:
            say(f"at {name}")
            strike(self._signal)

    def taken(self, shared: Shared, position: int | None) -> None:
        self.step("taken")
        with self.member.log.lock:
            kept = self.member._kept.get(shared)
            self._claims[shared] = None if kept is None else kept.hold.claim
        say(f"taken {shared.partition}")
        super().taken(shared, position)

    def leave(self, shared: Shared) -> None:
        self.step("leaving")
        super().leave(shared)
        say(f"left {shared.partition}")

    def lost(self, shared: Shared) -> None:
        say(f"lost {shared.partition}")
        super().lost(shared)

    def _process(self, part: Part, messages: list[Message]) -> bool:
        self.step("fetched")
        self.claim = vars(part).setdefault("held_by", self._claims[part.shared])
        can_go_on = super()._process(part, messages)
        self.step("processed")
        return can_go_on

    def _claim_first(self, part: Part, messages: list[Message]) -> bool:
        self.step("claiming")
        return super()._claim_first(part, messages)

    def _wait_for(self, sent: Sent) -> Outcome | None:
        self.step("claim sent")
        try:
            return super()._wait_for(sent)
        finally:
            self.step("claim read back")


_saying = threading.Lock()


def say(text: str) -> None:
    """Write a line at once."""
    with _saying:
        print(text, flush=True)


def turn_clock(file: Path) -> None:
    """Let the time of day be wrong, for Python, by the seconds that a file says now.

    Members read clocks of elapsed time alone, which nobody can set. So this shows that
    none of them judges by the time of day. `datetime` reads the real clock on, and so
    does Kafka's client: under libfaketime that hangs.
    """
    read_seconds, read_nanoseconds = time.time, time.time_ns
    read_any = time.clock_gettime

    def find_shift() -> int:
        return int(file.read_text(encoding="ascii") or 0)

    def read_clock(clock: int) -> float:
        return read_any(clock) + (find_shift() if clock == time.CLOCK_REALTIME else 0)

    vars(time)["time"] = lambda: read_seconds() + find_shift()
    vars(time)["time_ns"] = lambda: read_nanoseconds() + find_shift() * 1_000_000_000
    vars(time)["clock_gettime"] = read_clock


def main() -> None:
    """Run a consumer with the options of the first argument, as JSON."""
    given = json.loads(sys.argv[1])
    if (clock := given.pop("clock", None)) is not None:
        turn_clock(Path(clock))
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    settings = Settings(kafka_bootstrap_servers=given.pop("servers"))
    seconds = given.pop("seconds", 0.0)

    def handle(records: list[Record]) -> None:
        consumer.step("handling")
        first, end = records[0].offset, records[-1].offset + 1
        say(f"handled {records[0].partition} {first} {end} {consumer.claim or 0}")
        time.sleep(seconds)
        consumer.step("handled")

    consumer = Staged(
        settings, given.pop("at", {}), given.pop("by", "kill"), **given, handle=handle
    )
    say(f"instance {consumer.member.sender.instance_id}")
    consumer.run()
    say("ended")


if __name__ == "__main__":
    main()
