"""A broker with its logs and topics, and what all measures ask of them."""

from __future__ import annotations

import sys
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from benchmarks.ownership.pods import wait_until
from jobs_lib.coordination import Log
from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.coordination.messages import Sender
from jobs_lib.devstack import KafkaBroker
from jobs_lib.devstack.kafka import FAST_JVM
from jobs_lib.kafka.client import count_partitions, create_topic, make_admin
from jobs_lib.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Figures = dict[str, float | None]
GROUP = "bench.group"
LONG = 120.0
_SESSION_MS = "6000"
_QUICK_GROUPS = {
    "group.consumer.session.timeout.ms": _SESSION_MS,
    "group.consumer.min.session.timeout.ms": _SESSION_MS,
    "group.consumer.heartbeat.interval.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "1000",
}
"""The new protocol's timeouts are the broker's, and 45 seconds by default."""


@dataclass(frozen=True)
class Stage:
    """What is measured on, and how much."""

    broker: KafkaBroker
    quick: bool = False

    def size(self, number: int, quick: int) -> int:
        """How often or how much: less in a quick run."""
        return quick if self.quick else number

    @cached_property
    def settings(self) -> Settings:
        """Settings that name the broker, and no database."""
        return Settings(kafka_bootstrap_servers=self.broker.bootstrap_servers)

    def make_topic(
        self, kind: str, partitions: int, config: Mapping[str, str] | None = None
    ) -> str:
        """Create a topic; return its name."""
        name = f"{kind}-{uuid.uuid4().hex[:8]}"
        create_topic(make_admin(self.settings), name, partitions, config or {})
        # Kafka makes it a moment later.
        wait_until(
            lambda: count_partitions(self.settings, name) == partitions, LONG, name
        )
        return name

    def make_log(self, partitions: int = 1) -> str:
        """Create a coordination log; return its name."""
        return self.make_topic("log", partitions, WANTED)

    def make_reader(self, topic: str, client_id: str = "bench", **more: Any) -> Log:
        """Make a log's reader and writer, which is not started yet."""
        sender = Sender(GROUP, client_id, uuid.uuid4().hex)
        return Log(self.settings, topic, sender, **more)


@contextmanager
def staged(quick: bool) -> Iterator[Stage]:
    """Start a broker, and end it afterwards."""
    with KafkaBroker.ephemeral(jvm=FAST_JVM, properties=_QUICK_GROUPS) as broker:
        yield Stage(broker, quick)


def tell(line: str) -> None:
    """Print a line for people, with the time."""
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)
