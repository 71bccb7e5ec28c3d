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
    thread.ended       thread, error                 another one takes its place
    thread.silent      thread, seconds               it stands still: /livez says so
    loop.blocked       seconds, stack                async handlers wait for one of them
    jobs.completed     ids                           a completion is committed
    jobs.retried       ids                           a retry is committed
    jobs.discarded     ids                           a discard is committed
    jobs.removed       ids                           superseded or cancelled
    jobs.released      ids                           cut off when the process stops
    jobs.fenced        ids                           refused, or no longer there
    jobs.dropped       ids                           claimed, and not begun in time
    jobs.unknown       type, origin, count           no handler has this type
    types.differ       pod, unknown, own             another pod's, and this one's alone
    ticks.enqueued     schedule, ticks               periodic jobs are in
    ticks.dropped      schedule, since, before       missed, and left out by rule
    payload.large      type, bytes                   the first one of a type
    block.read         shard, rows                   the relay has read rows
    block.produced     shard, rows                   in Kafka, not deleted yet
    block.deleted      shard, rows                   exactly these are gone
    rows.held          topic, key, row_id, error     refused: the key, or row, waits
    rows.let_go        topic, key, row_id            taken now, and what waited behind
    version.missing    topic, entity, row            a tombstone has none, states do
    records.applied    group, origin, count          not committed yet
    records.committed  group, origin, next_offset    model and offset are in
    record.failed      group, origin, offset, error  a handler raised
    loop.failed        loop, error, sqlstate         and goes on
    tables.busy        version, tries                a migration has given way
    transaction.old    kind, who, application,       dead rows pile up behind it;
                       state, seconds                ``who`` is its pid

Each ``error`` is text, without secrets: the type of the error and what it says. The
``sqlstate`` is PostgreSQL's, None where the server gave none, such as to whom it
refuses a connection: count ``loop.failed`` by loop and sqlstate to raise an alarm.

Listeners run in the thread that emits and must return at once. Nothing listens at
first but the standard logger ``jobs_lib``, for the events that an operator must see; of
``loop.failed`` one line in ten seconds for each loop, and of ``loop.blocked``.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from jobs_lib.masking import PlainRecords, describe, spell

Listener = Callable[[str, dict[str, Any]], None]

logger = logging.getLogger("jobs_lib")
logger.addFilter(PlainRecords())

EVENTS = frozenset(re.findall(r"^    ([a-z]+\.[a-z_]+) ", __doc__ or "", re.MULTILINE))
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
    "thread.ended": logging.ERROR,
    "thread.silent": logging.ERROR,
    "loop.blocked": logging.WARNING,
    "jobs.released": logging.WARNING,
    "jobs.fenced": logging.WARNING,
    "jobs.dropped": logging.WARNING,
    "jobs.unknown": logging.WARNING,
    "types.differ": logging.WARNING,
    "ticks.dropped": logging.WARNING,
    "payload.large": logging.WARNING,
    "record.failed": logging.ERROR,
    "version.missing": logging.WARNING,
    "loop.failed": logging.ERROR,
    "tables.busy": logging.WARNING,
    "transaction.old": logging.WARNING,
}
_TELL_ERRORS = {"loop.failed", "thread.ended"}
_RARELY = {"loop.failed", "loop.blocked"}
_LOG_PAUSE = 10.0
"""Seconds between two lines about one failing loop: an outage must not fill the log."""
_listeners: list[Listener] = []
_logged_at: dict[str, float] = {}


def emit(event: str, **fields: Any) -> None:
    """Tell every listener; a listener that raises is logged and kept."""
    if event in _TELL_ERRORS:
        error = fields["error"]
        if event == "loop.failed":
            fields["sqlstate"] = _find_state(error)
        # Not the error itself: its text, and those of its causes, may hold a secret.
        fields["error"] = describe(error)
    for listener in _listeners:
        try:
            listener(event, fields)
        # Whatever it raises, it must not end the thread that emits.
        except BaseException as error:
            if _is_interrupted(error):
                raise
            # It may fail at every event of a busy pod.
            if not _is_recent(f"listener {event}"):
                _log(logging.ERROR, "a listener failed on %s", event, exc_info=True)
    level = _LOGGED.get(event)
    if (
        level is not None
        and logger.isEnabledFor(level)
        and not _is_repeated(event, fields)
    ):
        text = " ".join(f"{key}={_short(value)}" for key, value in fields.items())
        _log(level, "%s %s", event, text, extra={"event": event})


def listened() -> bool:
    """Whether anybody listens: spares hot loops the call."""
    return bool(_listeners)


def listen(listener: Listener) -> Callable[[], None]:
    """Add a listener; returns the function that removes it."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def _log(level: int, text: str, *values: str, **more: Any) -> None:
    try:
        logger.log(level, text, *values, **more)
    # A filter or handler of the application's; there is nowhere left to tell it.
    except BaseException as error:
        if _is_interrupted(error):
            raise


def _is_interrupted(error: BaseException) -> bool:
    """Whether somebody has pressed Ctrl-C: no other thread is told so."""
    ours = threading.current_thread() is threading.main_thread()
    return ours and type(error) is KeyboardInterrupt


def _find_state(error: BaseException) -> Any:
    """The error's SQLSTATE, or its cause's."""
    try:
        state = getattr(error, "sqlstate", None)
        return state or getattr(error.__cause__, "sqlstate", None)
    except BaseException:  # of an error whose attributes are code of the application's
        return None


def _is_repeated(event: str, fields: dict[str, Any]) -> bool:
    if event not in _RARELY:
        return False
    return _is_recent(str(fields.get("loop", event)))


def _is_recent(subject: str) -> bool:
    """Whether there was a line about it a short time ago; if not, now there is."""
    now = time.monotonic()
    if now < _logged_at.get(subject, -_LOG_PAUSE) + _LOG_PAUSE:
        return True
    _logged_at[subject] = now
    return False


def _short(value: Any) -> str:
    # Not by isinstance, which asks the value, and an error may fail at that.
    if type(value) in (list, tuple, set, frozenset) and len(value) > 5:
        few = ", ".join(map(spell, list(value)[:5]))
        return f"[{few}, … {len(value)} in all]"
    return spell(value)
