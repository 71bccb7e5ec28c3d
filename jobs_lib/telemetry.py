"""What happens inside, as events: one list, for logs, metrics and tests.

    event              fields                        emitted when
    -----------------  ----------------------------  -------------------------
    process.started    process, pod, roles           the first heartbeat is in
    process.measured   rss_mb, jobs                  twice a second
    process.worn       rss_mb, jobs                  as much as it may use: it ends
    sessions.ended     process, sessions             a dead one's open transactions
    origins.taken      role, origins                 a take-over is committed
    origins.released   role, origins, late           nobody owns them now
    origins.lost       role, origins                 another process owns them
    role.left          role, process                 cut off: others do its work
    role.joined        role, process                 it can do it again
    jobs.claimed       count                         a claim is committed
    job.started        job                           before the handler
    job.ran            job, outcome, error           after the handler
    job.stuck          job, stack                    its time is over, and it goes on
    loop.blocked       seconds, stack                async handlers wait for one of them
    jobs.completed     ids                           a completion is committed
    jobs.retried       ids                           a retry is committed
    jobs.discarded     ids                           a discard is committed
    jobs.removed       ids                           superseded or cancelled
    jobs.released      ids                           cut off when the process stops
    jobs.fenced        ids                           refused, or no longer there
    jobs.unknown       type, origin, count           no handler has this type
    ticks.enqueued     schedule, ticks               periodic jobs are in
    ticks.dropped      schedule, since, before       missed, and left out by rule
    payload.large      type, bytes                   the first one of a type
    block.read         shard, rows                   the relay has read rows
    block.produced     shard, rows                   in Kafka, not deleted yet
    block.deleted      shard, rows                   exactly these are gone
    records.applied    group, origin, count          not committed yet
    records.committed  group, origin, next_offset    model and offset are in
    record.failed      group, origin, offset, error  a handler raised
    loop.failed        loop, error, sqlstate         and goes on
    tables.busy        version, tries                a migration has given way
    transaction.old    kind, who, application,       dead rows pile up behind it;
                       state, seconds                ``who`` is its pid

The ``sqlstate`` is PostgreSQL's, None where the server gave none, such as to whom it
refuses a connection: count ``loop.failed`` by loop and sqlstate to raise an alarm.

Listeners run in the thread that emits and must return at once. Nothing listens at
first but the standard logger ``jobs_lib``, for the events that an operator must see; of
``loop.failed`` one line in ten seconds for each loop, and of ``loop.blocked``.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

from jobs_lib.masking import mask

Listener = Callable[[str, dict[str, Any]], None]

logger = logging.getLogger("jobs_lib")

EVENTS = frozenset(re.findall(r"^    ([a-z]+\.[a-z]+) ", __doc__ or "", re.MULTILINE))
_LOGGED = {
    "process.started": logging.INFO,
    "process.worn": logging.WARNING,
    "sessions.ended": logging.WARNING,
    "origins.taken": logging.INFO,
    "origins.released": logging.INFO,
    "origins.lost": logging.WARNING,
    "role.left": logging.WARNING,
    "role.joined": logging.INFO,
    "jobs.discarded": logging.WARNING,
    "job.stuck": logging.ERROR,
    "loop.blocked": logging.WARNING,
    "jobs.released": logging.WARNING,
    "jobs.fenced": logging.WARNING,
    "jobs.unknown": logging.WARNING,
    "ticks.dropped": logging.WARNING,
    "payload.large": logging.WARNING,
    "record.failed": logging.ERROR,
    "loop.failed": logging.ERROR,
    "tables.busy": logging.WARNING,
    "transaction.old": logging.WARNING,
}
_RARELY = {"loop.failed", "loop.blocked"}
_LOG_PAUSE = 10.0
"""Seconds between two lines about one failing loop: an outage must not fill the log."""
_listeners: list[Listener] = []
_logged_at: dict[str, float] = {}


def emit(event: str, **fields: Any) -> None:
    """Tell every listener; a listener that raises is logged and kept."""
    if event == "loop.failed":
        error = fields["error"]
        state = getattr(error, "sqlstate", None)
        fields["sqlstate"] = state or getattr(error.__cause__, "sqlstate", None)
    for listener in _listeners:
        try:
            listener(event, fields)
        except Exception:
            logger.exception("a listener failed on %s", event)
    level = _LOGGED.get(event)
    if (
        level is not None
        and logger.isEnabledFor(level)
        and not _is_repeated(event, fields)
    ):
        text = " ".join(f"{key}={_short(value)}" for key, value in fields.items())
        logger.log(level, "%s %s", event, mask(text), extra={"event": event})


def listened() -> bool:
    """Whether anybody listens: spares hot loops the call."""
    return bool(_listeners)


def listen(listener: Listener) -> Callable[[], None]:
    """Add a listener; returns the function that removes it."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def _is_repeated(event: str, fields: dict[str, Any]) -> bool:
    if event not in _RARELY:
        return False
    now, loop = time.monotonic(), str(fields.get("loop", event))
    if now < _logged_at.get(loop, 0.0) + _LOG_PAUSE:
        return True
    _logged_at[loop] = now
    return False


def _short(value: object) -> str:
    if isinstance(value, list | tuple | set | frozenset) and len(value) > 5:
        few = ", ".join(map(str, list(value)[:5]))
        return f"[{few}, … {len(value)} in all]"
    return str(value)
