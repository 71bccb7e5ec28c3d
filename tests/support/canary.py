"""A value of a record or payload, and a watch over all places that must not hold it."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUE = "ada-lovelace-canary"
"""The value that tests use where nobody may read a value anywhere."""


class _Watch(logging.Handler):
    """Keeps the records of all loggers that hold the value."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.found: list[str] = []
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if VALUE in text:
            self.found.append(text)


@contextlib.contextmanager
def watching_logs() -> Iterator[None]:
    """Fail at the end if a record of a log held the value."""
    watch = _Watch()
    logging.getLogger().addHandler(watch)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(watch)
    assert not watch.found, watch.found


@contextlib.contextmanager
def watching_events() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Collect all events meanwhile; fail at the end if one of them held the value."""
    events: list[tuple[str, dict[str, Any]]] = []
    stop = telemetry.listen(lambda event, fields: events.append((event, fields)))
    try:
        yield events
    finally:
        stop()
    assert VALUE not in str(events)
