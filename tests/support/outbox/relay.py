"""A relay in a process of its own: it prints what it does, and stops where it should.

A signal can strike it at two points. At ``full`` a block is with the producer: Kafka
has not acknowledged it, and nothing has asked for the commit. At ``sent`` the block is
in Kafka, and its rows are not deleted. SIGUSR1 makes it die at ``sent``. After SIGUSR2
the signal that its start names hits it at ``full``. Each strikes the next block, once.
Without a signal the first block is struck, if the start says so. At ``sent`` a block is
struck only if some of its records must come twice: where rows are merged, a newer row
may replace all rows that are sent again.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import threading
import time
from typing import Any

from confluent_kafka import Producer

from jobs_lib import telemetry
from jobs_lib.kafka import client
from jobs_lib.service.service import Service
from tests.support.apps import make_app
from tests.support.say import say
from tests.support.signals import strike

_FENCED = ("(_FENCED)", "(PRODUCER_FENCED)", "(INVALID_PRODUCER_EPOCH)")
"""The ends of Kafka's errors for a producer that another one has replaced."""
_TOLD = {"block.read", "block.produced", "block.deleted"}
_armed: dict[str, signal.Signals] = {}
_merging: set[str] = set()


class Block(threading.local):
    """The block that a thread sends."""

    repeats = False
    """Whether it has a record that no other can replace."""


_block = Block()


def strike_at(point: str, told: object) -> None:
    """Send this process its signal, if it is due at this point."""
    number = _armed.pop(point, None)
    if number is not None:
        say(f"struck {point} {told}")
        strike(number)


class Struck(Producer):
    """A producer that can be struck before it commits."""

    def begin_transaction(self, *args: Any) -> None:
        """Begin with a block whose records are still unknown."""
        _block.repeats = False
        super().begin_transaction(*args)

    def produce(self, topic: str, *args: Any, **options: Any) -> None:
        """Send a record, and note whether another one can replace it."""
        _block.repeats |= topic not in _merging
        super().produce(topic, *args, **options)

    def commit_transaction(self, *args: Any) -> None:
        """Commit, unless a signal strikes here."""
        if len(self):
            strike_at("full", len(self))
        super().commit_transaction(*args)


def listen(event: str, fields: dict[str, Any]) -> None:
    """Print the blocks, the fences, and what the relay leaves to others."""
    if event == "process.started":
        # From here on the relay survives any outage.
        say("started")
    if event in _TOLD:
        ids = ",".join(map(str, fields["rows"]))
        say(f"{time.time():.3f} {event} shard={fields['shard']} rows={ids}")
    if event in {"rows.held", "rows.let_go", "origins.lost"}:
        say(f"{time.time():.3f} {event} {fields}")
    if event == "block.produced":
        say(f"sent {fields['shard']} {len(fields['rows'])}")
        if _block.repeats:
            strike_at("sent", len(fields["rows"]))
    if event == "role.left":
        say(f"left {fields['role']}")
    if event == "loop.failed":
        error = fields["error"]
        if any(name in error for name in _FENCED):
            say("fenced by kafka")
        elif error.startswith("FencedError"):
            say("fenced by postgresql")
        else:
            say(f"failed {fields['loop']}: {error}")


def main() -> None:
    """Run until a signal stops it."""
    given = json.loads(sys.argv[1])
    _merging.update(given.pop("merging"))
    topics = given.pop("topics")
    for point, name in given.pop("strikes").items():
        _armed[point] = signal.Signals[name]
    at_full = signal.Signals[given.pop("at_full")]
    signal.signal(signal.SIGUSR1, lambda *_: _armed.setdefault("sent", signal.SIGKILL))
    signal.signal(signal.SIGUSR2, lambda *_: _armed.setdefault("full", at_full))
    faulthandler.register(signal.SIGHUP, all_threads=True)
    client.Producer = Struck  # type: ignore[attr-defined]
    telemetry.listen(listen)
    url = given.pop("url")
    app = make_app(given.pop("database_url", url), **given)
    for name in topics:
        app.topic(name, merge=name in _merging)
    service = Service(app, ["relay"])
    sys.exit(service.run())


if __name__ == "__main__":
    main()
