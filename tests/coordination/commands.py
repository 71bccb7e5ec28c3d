"""What the tests of the commands share: a handler, and a look at a log."""

from __future__ import annotations

import json
import threading
from typing import Any

INTERVAL = 0.5
WAIT = 30.0
GROUP = "shop.mailer"


class Handler:
    """Keeps the places of the records that it gets, and may be held up."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.begun = 0
        self.may_go = threading.Event()
        self.may_go.set()

    def __call__(self, records) -> None:
        self.begun += 1
        self.may_go.wait(WAIT)
        self.seen += [(one.partition, one.offset) for one in records]


def look(run, log: str, *words: object) -> dict[str, Any]:
    """Show a log as JSON."""
    found: dict[str, Any] = json.loads(run(log, "show", "--json", *words).stdout)
    return found


def states(view: dict[str, Any]) -> list[tuple[int, str]]:
    """The partitions of a view, and the states of their holders."""
    return [(one["partition"], one["state"]) for one in view["parts"]]
