"""What happens inside, as events: one list, for logs, metrics and tests.

    event              fields                        emitted when
    -----------------  ----------------------------  -------------------------
    process.started    process, pod, roles           the first heartbeat is in
    process.measured   rss_mb, jobs                  twice a second
    process.worn       rss_mb, jobs                  the process has reached its limit
                                                     of memory or jobs, and ends
    sessions.ended     process, sessions             live processes have ended the
                                                     ``sessions`` of a dead one, which
                                                     held transactions open
    origins.taken      role, origins                 a take-over is committed
    origins.released   role, origins, late           the process has released these
                                                     origins; ``late``: it took longer
                                                     than the time of a hand-over
    origins.lost       role, origins                 another process owns these origins
                                                     now
    role.left          role, process                 the process does not reach a
                                                     server, and leaves its work to
                                                     others
    role.joined        role, process                 the process reaches the server, and
                                                     takes part again
    jobs.claimed       count                         a claim is committed
    job.started        job                           before the handler
    job.ran            job, outcome, error, seconds  after the handler
    job.failed         type, id, group, attempt,     a failed attempt is written, or one
                       error, outcome, retry_in,     that found a server away;
                       kind, trace                   ``retry_in`` is seconds, ``trace``
                                                     where the error came from
    job.stuck          job, stack                    the job's time is over, and its
                                                     handler goes on
    thread.ended       thread, error                 an error has ended a thread;
                                                     another one takes its place
    thread.silent      thread, seconds               a thread stands still: /livez says
                                                     so
    loop.blocked       seconds, stack                a handler blocks the event loop,
                                                     and the other async handlers wait
    jobs.completed     ids                           a completion is committed
    jobs.retried       ids                           a retry is committed
    jobs.discarded     ids                           a discard is committed
    jobs.removed       ids                           these jobs were superseded or
                                                     cancelled
    jobs.released      ids                           the process stops, and has cut
                                                     these jobs off
    jobs.fenced        ids                           another owner has the jobs, or they
                                                     are gone: nothing was written
    jobs.dropped       ids                           these jobs were claimed, and not
                                                     begun in time
    jobs.unknown       type, origin, count           no handler has this type
    jobs.waiting       types, count, origin, after,  jobs of the records of ``count``
                       seconds, reason               partitions wait for other groups;
                                                     the longest wait is named
    jobs.waited        types, seconds                none of these jobs waits any more
    types.differ       pod, unknown, own             the executor of another pod has the
                                                     types ``unknown``, which this one
                                                     lacks, and lacks the types ``own``
    ticks.enqueued     schedule, ticks               the jobs of these ticks are
                                                     enqueued
    ticks.dropped      schedule, since, before       ticks were missed, and the
                                                     schedule's rule leaves them out
    payload.large      type, bytes                   a payload has 64 KiB or more; once
                                                     for each type
    block.read         shard, rows                   the relay has read rows
    block.produced     shard, rows                   the rows are in Kafka, and not
                                                     deleted yet
    block.deleted      shard, rows                   exactly these rows are deleted
    rows.held          topic, key, row_id, error     a row cannot be sent: it waits, and
                                                     so do the later rows of its key
    rows.let_go        topic, key, row_id            a held row has left, and the rows
                                                     behind it go on
    reexport.paused    entity, group, lag, limit     this group is too far behind
    reexport.resumed   entity, group, lag, limit     the group has caught up, to half
                                                     the limit
    version.missing    topic, entity, row            a tombstone has no version, and the
                                                     states of its topic have one; once
                                                     for each topic
    records.applied    group, origin, count          the records are handled, and not
                                                     committed yet
    records.committed  group, origin, next_offset    changes and offset are committed
    done.committed     group, offsets                Kafka has these offsets of the
                                                     group ``<group>.done``
    record.failed      group, origin, offset, error  a record could not be read or
                                                     handled
    record.stuck       group, origin, offset,        the time of a record's handler is
                       seconds, limit, stack         over, and it goes on after these
                                                     ``seconds``
    record.skipped     group, origin, offset,        the first skipped record of a
                       error, count                  partition; then the last one in ten
                                                     seconds, and their ``count``
    block.failed       group, origin, count, error   these records failed together, and
                                                     went in one by one
    record.missing     group, origin, offset,        a ``gapless`` read model lacks
                       count, before, after          versions; the first gap is named
    offset.moved       group, origin, before,        somebody has set the offset, or
                       next_offset                   commits or the coordination log
                                                     were lost: the partition goes on
                                                     from there
    records.gone       group, origin, next_offset,   these records are passed over, as
                       start, count                  the topic or the declaration says
    offset.lost        group, origin, next_offset,   the partition has no record there,
                       start, end, error             and stands still
    gate.closed        group, count, origin, after,  the records of ``count`` partitions
                       seconds, reason               wait for other groups; the longest
                                                     wait is named
    gate.opened        group, seconds                none of these partitions waits any
                                                     more
    stream.stopped     topic                         the stream gets more partitions:
                                                     nobody publishes to it meanwhile
    stream.opened      topic                         the stream may be published to
                                                     again
    topic.replaced     group, origin, next_offset,   the partition's topic was deleted
                       error                         and made anew; the partition stands
                                                     still, but for a function in
                                                     Kafka's transactions
    consumer.started   group, delivery, batch,       a coordinated consumer has started:
                       per_record, per_second        what it costs in messages of the
                                                     coordination log, for a record, and
                                                     for a partition
    partition.lost     group, origin                 another member of a coordinated
                                                     group may have it now
    log.cut            log, error                    a coordination log is another one
                                                     than the one that was read: nothing
                                                     is known until it is read anew
    log.read           log, records, snapshots       the coordination log was read to
                                                     its end, and is known now
    loop.failed        loop, error, sqlstate         a loop has failed, and tries again
    tables.busy        version, tries                a migration has given way to other
                                                     transactions, and tries again
    transaction.old    kind, who, application,       a transaction is open for long, and
                       state, seconds                dead rows pile up behind it;
                                                     ``who`` is its pid

Each ``error`` is text, without secrets: the type of the error and what it says. The
``sqlstate`` is PostgreSQL's; it is None if the server gave none, for example when it
refuses a connection. To raise an alarm, count ``loop.failed`` by loop and sqlstate.

Listeners run in the thread that emits and must return at once. At first only the
standard logger ``jobs_lib`` listens, for the events that an operator must see. The
``event`` and the ``fields`` of a log record hold the same for a program. In ten seconds
the log gets at most one line of ``loop.failed`` for each loop, or one for all loops if
Kafka does not answer them; one line of ``loop.blocked``; and ten lines of
``job.failed`` for each job type and class of error, the first with a traceback.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jobs_lib.errors import ConfigurationError, JobsError
from jobs_lib.masking import PlainRecords, describe, one_line, spell

Listener = Callable[[str, dict[str, Any]], None]

logger = logging.getLogger("jobs_lib")
logger.addFilter(PlainRecords())
# An application that sets up no logging gets no log lines from us.
logger.addHandler(logging.NullHandler())

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
    "job.started": logging.DEBUG,
    "job.ran": logging.DEBUG,
    "job.failed": logging.WARNING,
    "job.stuck": logging.ERROR,
    "thread.ended": logging.ERROR,
    "thread.silent": logging.ERROR,
    "loop.blocked": logging.WARNING,
    "jobs.released": logging.WARNING,
    "jobs.fenced": logging.WARNING,
    "jobs.dropped": logging.WARNING,
    "jobs.unknown": logging.WARNING,
    "jobs.waiting": logging.WARNING,
    "jobs.waited": logging.INFO,
    "types.differ": logging.WARNING,
    "ticks.dropped": logging.WARNING,
    "payload.large": logging.WARNING,
    "record.failed": logging.ERROR,
    "record.stuck": logging.ERROR,
    "record.skipped": logging.ERROR,
    "block.failed": logging.WARNING,
    "record.missing": logging.ERROR,
    "offset.moved": logging.WARNING,
    "records.gone": logging.WARNING,
    "offset.lost": logging.ERROR,
    "gate.closed": logging.WARNING,
    "gate.opened": logging.INFO,
    "stream.stopped": logging.WARNING,
    "stream.opened": logging.INFO,
    "topic.replaced": logging.ERROR,
    "reexport.paused": logging.WARNING,
    "reexport.resumed": logging.INFO,
    "version.missing": logging.WARNING,
    "consumer.started": logging.INFO,
    "partition.lost": logging.WARNING,
    "log.cut": logging.ERROR,
    "log.read": logging.INFO,
    "loop.failed": logging.ERROR,
    "tables.busy": logging.WARNING,
    "transaction.old": logging.WARNING,
}
_TELL_ERRORS = {"loop.failed", "thread.ended"}
_EACH_JOB = {"job.started", "job.ran"}
_PAUSE = 10.0
"""Seconds in which one subject gets few lines: an outage must not fill the log."""
_MOST_LINES = {"loop.failed": 1, "loop.blocked": 1, "job.failed": 10}
_MOST_SUBJECTS = 1_000
_MOST_ITEMS = 5
_UNTOLD = {"trace", "stack", "kind"}
"""Fields that a line leaves out, because it holds them in another way."""
_OF_JOB = ("type", "id", "group", "attempt")
_LISTS = {list, tuple, set, frozenset}
_NUMBERS = {int, float, bool}
_listeners: tuple[tuple[Listener, frozenset[str]], ...] = ()
"""The listeners, each with the events that it wants. It is replaced and never changed:
an event that is under way reaches all others when one of them goes away."""
_listening = threading.RLock()
"""Held while the listeners change. Reentrant: a signal handler may listen."""
reports_each_job = False
"""Whether a listener wants the events of each single job."""
_lines: dict[str, tuple[float, int]] = {}
"""For each subject: when the count of its lines began, and the count."""
_counting = threading.RLock()
"""Reentrant: a signal handler may emit while its thread counts."""


class LoggedEvent(str):
    """The name of an event in a log record of ours.

    Other code may give its records an attribute ``event``, too, but none of this type.
    """

    __slots__ = ()


def emit(event: str, **fields: Any) -> None:
    """Call every listener; if one raises, that is logged and the listener kept."""
    subject = None
    if event in _TELL_ERRORS:
        error = fields["error"]
        # Not by isinstance, which runs code of the error.
        if issubclass(type(error), JobsError):
            subject = error.subject
        if event == "loop.failed":
            fields["sqlstate"] = _find_state(error)
        # Not the error itself: its text and those of its causes may hold a secret.
        fields["error"] = describe(error)
    for listener, wanted in _listeners:
        if event not in wanted:
            continue
        try:
            listener(event, fields)
        # No error of a listener may end the thread that emits.
        except BaseException as error:
            if _is_interrupted(error):
                raise
            # It may fail at every event of a busy pod.
            if not is_recent(f"listener {event}"):
                _log(logging.ERROR, "a listener failed on %s", event, exc_info=True)
    level = _LOGGED.get(event)
    if level is not None and logger.isEnabledFor(level):
        _tell(level, event, fields, subject)


def listened(event: str) -> bool:
    """Whether a listener wants an unlogged event: saves hot loops the call."""
    return any(event in wanted for _, wanted in _listeners)


def listen(listener: Listener, only: Iterable[str] = EVENTS) -> Callable[[], None]:
    """Call a function at each event, with its name and its fields.

    Args:
        listener: is called in the thread that emits and must return at once; its
            errors are logged.
        only: the events that it wants; by default all. Leave out ``job.started`` and
            ``job.ran`` if you can: both come once for each job.

    Returns:
        The function that removes the listener.

    Raises:
        ConfigurationError: there is no such event.
    """
    wanted = frozenset(only)
    if unknown := sorted(wanted - EVENTS):
        raise ConfigurationError(
            f"there is no event {unknown[0]!r} to listen to: the events are "
            f"{', '.join(sorted(EVENTS))}"
        )
    entry = (listener, wanted)
    with _listening:
        _set_listeners([*_listeners, entry])

    def remove() -> None:
        with _listening:
            left = [*_listeners]
            left.remove(entry)
            _set_listeners(left)

    return remove


def _set_listeners(listeners: list[tuple[Listener, frozenset[str]]]) -> None:
    global _listeners, reports_each_job
    _listeners = tuple(listeners)
    reports_each_job = any(wanted & _EACH_JOB for _, wanted in _listeners)


def _tell(level: int, event: str, fields: dict[str, Any], subject: str | None) -> None:
    """Log an event, unless there were enough lines about its subject."""
    trace = fields.get("trace") or fields.get("stack")
    told = dict(_choose_fields(fields))
    if most := _MOST_LINES.get(event):
        count = _count_line(subject or f"{event} {_name_subject(fields)}")
        if count > most:
            return
        if count > 1:
            trace = None
        if count == most > 1:
            told["more"] = f"left out for {_PAUSE:g} s"
    text = " ".join(f"{key}={_short(value)}" for key, value in told.items())
    plain = {key: _plain(value) for key, value in told.items()}
    extra = {"event": LoggedEvent(event), "fields": plain, "trace": trace}
    _log(level, "%s %s", event, text, extra=extra)


def _choose_fields(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields that a line shows; for a job, those that identify it."""
    for name, value in fields.items():
        if name == "job":
            yield from ((one, getattr(value, one)) for one in _OF_JOB)
        elif name not in _UNTOLD:
            yield name, value


def _name_subject(fields: dict[str, Any]) -> str:
    """The subject that similar lines share."""
    if "loop" in fields:
        return str(fields["loop"])
    return f"{fields.get('type')} {fields.get('kind')}"


def warn(subject: str, text: str) -> None:
    """Log a warning, unless there was a line about the subject a short time ago."""
    if not is_recent(subject):
        _log(logging.WARNING, "%s", text)


def _log(level: int, text: str, *values: str, **more: Any) -> None:
    try:
        logger.log(level, text, *values, **more)
    # A filter or handler of the application has failed: nothing can report it.
    except BaseException as error:
        if _is_interrupted(error):
            raise


def _is_interrupted(error: BaseException) -> bool:
    """Whether the user has pressed Ctrl-C: only the main thread notices."""
    ours = threading.current_thread() is threading.main_thread()
    return ours and type(error) is KeyboardInterrupt


def _find_state(error: BaseException) -> Any:
    """The error's SQLSTATE, or its cause's."""
    try:
        state = getattr(error, "sqlstate", None)
        return state or getattr(error.__cause__, "sqlstate", None)
    except BaseException:  # of an error whose attributes are code of the application's
        return None


def is_recent(subject: str) -> bool:
    """Whether there was a line about it a short time ago; if not, note one now."""
    return _count_line(subject) > 1


def _count_line(subject: str) -> int:
    """How many lines about a subject came in these seconds, including this one."""
    now = time.monotonic()
    with _counting:
        since, count = _lines.get(subject, (-_PAUSE, 0))
        if now >= since + _PAUSE:
            since, count = now, 0
            if len(_lines) >= _MOST_SUBJECTS:
                _lines.clear()
        _lines[subject] = since, count + 1
    return count + 1


def _short(value: Any) -> str:
    # Not by isinstance, which asks the value, and an error may fail at that.
    if type(value) not in _LISTS:
        return spell(value)
    # One by one: the text of a list shows its values in their Python form.
    few = ", ".join(map(spell, list(value)[:_MOST_ITEMS]))
    more = f", … {len(value)} in all" if len(value) > _MOST_ITEMS else ""
    return f"[{few}{more}]"


def _plain(value: Any) -> Any:
    """The value for a program: a number, a text, or a list of them."""
    if value is None or type(value) in _NUMBERS:
        return value
    if type(value) in _LISTS:
        few = [_plain(one) for one in list(value)[:_MOST_ITEMS]]
        left_out = len(value) > _MOST_ITEMS
        return [*few, f"… {len(value)} in all"] if left_out else few
    return one_line(spell(value))
