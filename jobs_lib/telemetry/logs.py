"""The log of the command: one rule for the library, the application and all others.

Without the command, the application sets up its own logging: the logger ``jobs_lib``
has a handler that does nothing.
"""

from __future__ import annotations

import json
import logging
import sys
from copy import copy
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from jobs_lib.masking import mask, one_line, plain_lines, spell, trace
from jobs_lib.telemetry import LoggedEvent

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
"""The attributes of every record."""
_TALKATIVE = ("jobs_lib.kafka", "alembic")
"""Loggers whose INFO lines only the authors of librdkafka and Alembic need."""


class TextFormatter(logging.Formatter):
    """Hides secrets in every library's records, and keeps each record in one line.

    Only a traceback has lines of its own, which are indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, and those of its traceback."""
        try:
            return super().format(record)
        except Exception:
            # `logging` would print the record to stderr, with its secrets.
            plain = copy(record)
            plain.msg, plain.args = _read_message(record), None
            return super().format(plain)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return one_line(mask(super().formatMessage(record)))

    def formatException(self, ei: Any) -> str:
        """The lines of a traceback."""
        return plain_lines(trace(ei[1]))


class JsonFormatter(logging.Formatter):
    """Writes each record as an object of JSON in one line, without secrets.

    The keys ``time``, ``level`` and ``logger`` come first. An event of ours has
    ``event`` and its fields, any other record ``message`` and what ``extra`` gave it,
    with an underscore behind a key that the line has already. A traceback is the text
    ``trace``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        time = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
        }
        given = vars(record)
        event, fields = given.get("event"), given.get("fields")
        # The application's records may have these attributes, too, of any type.
        if type(event) is LoggedEvent and type(fields) is dict:
            line["event"] = event
            line |= {key: _plain_field(one) for key, one in fields.items()}
            if told := given.get("trace"):
                line["trace"] = _text(told)
        else:
            line["message"] = _read_message(record)
            if record.exc_info and record.exc_info[1]:
                line["trace"] = trace(record.exc_info[1])
            for key, value in given.items():
                if key not in _STANDARD:
                    line[_find_free(line, _text(key))] = _plain(value)
        return _write(line)


def _find_free(line: dict[str, Any], key: str) -> str:
    """The key, with an underscore behind it if it is taken."""
    while key in line:
        key += "_"
    return key


def _write(line: dict[str, Any]) -> str:
    try:
        return json.dumps(line)
    except ValueError:  # Python writes no integer of thousands of digits
        return json.dumps({key: _text(value) for key, value in line.items()})


def _plain(value: Any) -> Any:
    """The value as JSON has it: a number that is none of its own is a text."""
    if type(value) in (int, bool) or (type(value) is float and isfinite(value)):
        return value
    return _text(value)


def _plain_field(value: Any) -> Any:
    """The same of an event's field, which may be a list, or missing."""
    if type(value) is list:
        return [_plain_field(one) for one in value]
    return None if value is None else _plain(value)


def _text(value: Any) -> str:
    try:
        return mask(str(value))
    except Exception:  # the code behind a value's text is the application's
        return spell(value)


def _read_message(record: logging.LogRecord) -> str:
    try:
        return mask(record.getMessage())
    except Exception:  # the arguments do not fit the text, or have none themselves
        return f"{_text(record.msg)} {_text(record.args)}"


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
