"""A process that asks for positions all the time: `… -m tests.support.asking`.

It takes the brokers' address, a topic and a group, and writes a line for each answer of
Kafka, and for each failed round.
"""

from __future__ import annotations

import sys
import time
from typing import NoReturn

from jobs_lib import telemetry
from jobs_lib.kafka.positions import Positions
from jobs_lib.settings import load_settings

_PAUSE = 0.001


def main() -> NoReturn:
    """Ask until a signal ends the process."""
    servers, topic, group = sys.argv[1:]
    settings = load_settings(kafka_bootstrap_servers=servers)
    telemetry.listen(lambda *_: print("failed", flush=True), only=["loop.failed"])
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
