"""A process that asks Kafka all the time: `python -m tests.support.asking WHAT …`.

It asks for `positions`, as a sidecar does for the `members` of a group, or what each
service asks when it `starts`. Besides, it takes the brokers' address, a topic and a
group. It writes a line for each answer of Kafka, and for each failed round.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, NoReturn
from uuid import UUID

from jobs_lib import telemetry
from jobs_lib.errors import JobsError
from jobs_lib.kafka.access import Needs, check_access
from jobs_lib.kafka.positions import Positions
from jobs_lib.kafka.shared_groups import find_shared
from jobs_lib.ownership.follow import FollowSource
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from jobs_lib.settings import Settings

_PAUSE = 0.001
_OURS = UUID(int=1)


class Members(FollowSource):
    """The source of a sidecar, which tells of each answer."""

    def _ask(self) -> None:
        super()._ask()
        print("answered", flush=True)


def main() -> NoReturn:
    """Ask until a signal ends the process."""
    what, servers, topic, group = sys.argv[1:]
    telemetry.listen(lambda *_: print("failed", flush=True), only=["loop.failed"])
    if what == "positions":
        ask_positions(load_settings(kafka_bootstrap_servers=servers), topic, group)
    if what == "starts":
        ask_as_starts(load_settings(kafka_bootstrap_servers=servers), topic, group)
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


def ask_as_starts(settings: Settings, topic: str, group: str) -> NoReturn:
    """Ask what a service asks at its start, which has the group in `after`."""
    needs = Needs(reads={topic}, joins={f"{group}-own"}, follows={group})
    while True:
        try:
            check_access(settings, needs)
            assert not [*find_shared(settings, _OURS, {group: [topic]}, list)]
        except JobsError:
            print("failed", flush=True)
        else:
            print("answered", flush=True)


if __name__ == "__main__":
    main()
