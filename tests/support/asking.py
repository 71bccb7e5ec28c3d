"""A process that asks Kafka all the time: `python -m tests.support.asking WHAT …`.

It asks for `positions`, or as a sidecar does for the `members` of a group. Besides, it
takes the brokers' address, a topic and a group. It writes a line for each answer of
Kafka, and for each failed round.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from jobs_lib import telemetry
from jobs_lib.kafka.positions import Positions
from jobs_lib.ownership.follow import FollowSource
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from jobs_lib.settings import Settings

_PAUSE = 0.001


class Members(FollowSource):
    """The source of a sidecar, which tells of each answer."""

    def _ask(self, admin: Any) -> None:
        super()._ask(admin)
        print("answered", flush=True)


def main() -> NoReturn:
    """Ask until a signal ends the process."""
    what, servers, topic, group = sys.argv[1:]
    telemetry.listen(lambda *_: print("failed", flush=True), only=["loop.failed"])
    if what == "positions":
        ask_positions(load_settings(kafka_bootstrap_servers=servers), topic, group)
    settings = load_settings(
        kafka_bootstrap_servers=servers, follow_interval=0.01, session_timeout=1.0
    )
    Members(settings, {group: frozenset({topic})}).start(lambda: None)
    while True:
        time.sleep(60)


def ask_positions(settings: Settings, topic: str, group: str) -> NoReturn:
    """Ask for the ends of a topic and the offsets of a group, without a rest."""
    positions = Positions(settings, interval=0.01, timeout=0.5)
    positions.start()
    seen = 0.0
    while True:
        start = positions.ask_starts(topic)
        end = positions.ask_ends(topic)
        committed = positions.ask_committed(group, topic)
        if start and end and committed and committed.read_at > seen:
            seen = committed.read_at
            print("answered", end.offsets, committed.offsets, flush=True)
        time.sleep(_PAUSE)


if __name__ == "__main__":
    main()
