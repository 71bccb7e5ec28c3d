"""A process that consumes over a coordination log, and ends or stands still where told.

It writes a line for each batch that its handler gets: `handled PARTITION FIRST END
CLAIM`, with the claim by which it holds the partition. Once that has ended, it writes
`done BEGUN ENDED`, in milliseconds by the machine's clock of elapsed time. For each
heartbeat with a position it writes `told PARTITION POSITION CLAIM` when it is sent.

`at={"claimed": 2}` with `by="kill"`, `"stop"` or `"end"` sends itself that signal when
it comes to the step for the second time, after the line `at STEP`. `clock` is a file
that says by how many seconds the time of day is wrong for the process; it may change.
With `judges_by_its_own_clock` the process is wrong: it judges the others by its time of
day, and thinks that nobody else is there.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs_lib.coordination.claims import Phase
from jobs_lib.coordination.consumer import Consumer
from jobs_lib.coordination.messages import Heartbeat
from jobs_lib.coordination.patience import read_clock
from jobs_lib.coordination.shares import Attendance
from jobs_lib.coordination.world import World
from jobs_lib.settings import Settings
from tests.support.signals import strike

if TYPE_CHECKING:
    from confluent_kafka import Message as KafkaMessage

    from jobs_lib.coordination.kept import Kept
    from jobs_lib.coordination.messages import Message, Sender, Shared
    from jobs_lib.coordination.part import Part
    from jobs_lib.coordination.record import Record
    from jobs_lib.coordination.world import Outcome
    from jobs_lib.coordination.writer import Sent

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM}


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
        self._awaited: Sent | None = None
        """The claim of a batch that was waited for last."""
        self._watch_sending()

    def step(self, name: str) -> None:
        """Come to a step."""
        self._counts[name] += 1
        if self._at.get(name) == self._counts[name]:
            say(f"at {name}")
            strike(self._signal)

    def _watch_sending(self) -> None:
        send = self.member.log.send

        def note(message: Message, **more: Any) -> Sent:
            # The log's lock is held since the position was read.
            if isinstance(message, Heartbeat) and message.position is not None:
                place = message.shared.partition
                say(f"told {place} {message.position} {message.claim}")
            return send(message, **more)

        vars(self.member.log)["send"] = note
        beat = self.member._send_heartbeat

        def begin(shared: Shared, kept: Kept) -> None:
            if kept.hold.phase is Phase.CONFIRMING:
                self.step("claimed")
            beat(shared, kept)

        vars(self.member)["_send_heartbeat"] = begin

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

    def _process(self, part: Part, messages: list[KafkaMessage]) -> bool:
        self.step("fetched")
        self.claim = vars(part).setdefault("held_by", self._claims[part.shared])
        can_go_on = super()._process(part, messages)
        self.step("processed")
        return can_go_on

    def _process_claimed(self, part: Part, messages: list[KafkaMessage]) -> None:
        # The partition may be lost or left, and another one may have had its turn.
        self.claim = vars(part)["held_by"]
        super()._process_claimed(part, messages)

    def _claim_first(self, part: Part, messages: list[KafkaMessage]) -> bool:
        self.step("claiming")
        return super()._claim_first(part, messages)

    def _wait_for(self, part: Part, sent: Sent) -> Outcome | None:
        if sent is not self._awaited:
            self._awaited = sent
            self.step("claim sent")
        try:
            return super()._wait_for(part, sent)
        finally:
            if sent.is_done:
                self.step("claim read back")


_saying = threading.Lock()


def say(text: str) -> None:
    """Write a line at once."""
    with _saying:
        print(text, flush=True)


def turn_clock(file: Path) -> None:
    """Let the time of day be wrong, for Python, by the seconds that a file says now.

    Members read clocks of elapsed time alone, which nobody can set. So this shows that
    none of them judges by the time of day. `datetime` reads the real clock on: under
    libfaketime it does not.
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


def judge_by_own_clock() -> None:
    """Let this process judge the others by its own time of day: that is wrong.

    It finds nobody there who was heard lately, and wants all partitions. If it wanted
    its share alone, the others might release that before it has claimed anything.
    """
    real = World.judge

    def judge(world: World, sender: Sender, shared: Shared) -> Outcome:
        right, world.now_ms = world.now_ms, round(time.time() * 1_000)
        try:
            return real(world, sender, shared)
        finally:
            world.now_ms = right

    def list_members(attendance: Attendance) -> list[str]:
        return []

    # A method is no name to assign to.
    setattr(World, "judge", judge)  # noqa: B010
    setattr(Attendance, "list_members", list_members)  # noqa: B010


def main() -> None:
    """Run a consumer with the options of the first argument, as JSON."""
    given = json.loads(sys.argv[1])
    clock = given.pop("clock", None)
    if clock is not None and "FAKETIME_TIMESTAMP_FILE" not in os.environ:
        turn_clock(Path(clock))
    if given.pop("judges_by_its_own_clock", False):
        judge_by_own_clock()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    settings = Settings(kafka_bootstrap_servers=given.pop("servers"))
    seconds = given.pop("seconds", 0.0)

    def handle(records: list[Record]) -> None:
        consumer.step("handling")
        begun = read_clock()
        first, end = records[0].offset, records[-1].offset + 1
        say(f"handled {records[0].partition} {first} {end} {consumer.claim or 0}")
        time.sleep(seconds)
        consumer.step("handled")
        say(f"done {begun * 1_000:.0f} {read_clock() * 1_000:.0f}")

    consumer = Staged(
        settings, given.pop("at", {}), given.pop("by", "kill"), **given, handle=handle
    )
    say(f"instance {consumer.member.sender.instance_id}")
    consumer.run()
    say("ended")


if __name__ == "__main__":
    main()
