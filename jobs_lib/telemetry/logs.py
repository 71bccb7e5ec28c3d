"""The log of the command: one rule for the library, the application and all others.

Without the command, the application sets up its own logging: the logger ``jobs_lib``
has a handler that does nothing.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from jobs_lib.masking import mask, one_line, plain_lines, trace

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_STANDARD = {
    *vars(logging.makeLogRecord({})),
    *("message", "asctime", "taskName", "event", "fields", "trace"),
}
"""The attributes of every record, and our own, which are written separately."""
_TALKATIVE = ("jobs_lib.kafka", "alembic")
"""Loggers whose INFO lines only the authors of librdkafka and Alembic need."""


class TextFormatter(logging.Formatter):
    """Hides secrets in every library's records, and keeps each record in one line.

    Only a traceback has lines of its own, which are indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return one_line(mask(super().formatMessage(record)))

    def formatException(self, ei: Any) -> str:
        """The lines of a traceback."""
        return plain_lines(trace(ei[1]))


class JsonFormatter(logging.Formatter):
    """Writes each record as an object of JSON in one line, without secrets.

    The keys ``time``, ``level`` and ``logger`` come first. An event of ours has
    ``event`` and its fields, any other record ``message`` and what ``extra`` gave it.
    A traceback is the text ``trace``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
        }
        if event := getattr(record, "event", None):
            line |= {"event": event, **record.__dict__.get("fields", {})}
        else:
            line["message"] = mask(record.getMessage())
            line |= {
                key: value if type(value) in (int, float, bool) else mask(str(value))
                for key, value in vars(record).items()
                if key not in _STANDARD
            }
        if told := getattr(record, "trace", None):
            line["trace"] = mask(told)
        elif record.exc_info and record.exc_info[1]:
            line["trace"] = trace(record.exc_info[1])
        return json.dumps(line, default=str)


def set_up_logging(
    level: str = "info", form: str = "text", *, verbose: bool = False, app: bool = True
) -> None:
    """Log to stderr, unless the root logger has a handler already.

    Args:
        level: of all loggers, one of :data:`LEVELS`.
        form: one of :data:`FORMATS`.
        verbose: whether to log the start and the end of each job, too.
        app: whether an application runs in this process: without one, other libraries
            log only from WARNING on.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(_TEXT))
    chosen = level.upper()
    logging.basicConfig(handlers=[handler], level=chosen if app else logging.WARNING)
    logging.getLogger("jobs_lib").setLevel(logging.DEBUG if verbose else chosen)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
