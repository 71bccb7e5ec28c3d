"""A limiter: of a type, no more jobs run at once than this process has slots for."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from jobs_lib.executor.batch import Batch, ignore
from jobs_lib.executor.lane import Lane
from jobs_lib.executor.limiting.slots import note_asked, note_released
from jobs_lib.executor.limiting.turn import FEW, Line, Turn
from jobs_lib.jobs.limit import NAMELESS

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from jobs_lib.executor.batch import Reader
    from jobs_lib.executor.claiming.passed import Passed
    from jobs_lib.executor.lane import ClaimedJob, Finished, Item
    from jobs_lib.executor.limiting.slots import Slots
    from jobs_lib.executor.running.workers import WorkerPool

_LEAST, _MANY = 2, 2_000
"""Jobs of one value that may wait here: if they end slowly, and if they end quickly."""
_QUICK = 5_000
"""Jobs a second from which jobs count as quick: more workers would run no more."""
_CHECK_PAUSE, _BUSY_PAUSE = 0.01, 0.05
"""Seconds between two searches for lines that need more slots; the second one is for
quick jobs, which may have thousands of lines."""
_IDLE_PAUSE = 0.25
"""Seconds between two searches for slots that no job needs."""


class Limiter:
    """Stands before the workers: jobs wait here until there is a slot for them.

    All dispatchers of a section share it; one of them asks for the slots.

    Args:
        workers: run the jobs.
        slots: makes the statements about slots.
        is_async: whether the jobs' handler is async.
    """

    def __init__(self, workers: WorkerPool, slots: Slots, *, is_async: bool) -> None:
        self._workers = workers
        self._slots = slots
        self._passed: list[Passed] = []
        self._finished: list[Finished] = []
        self._is_async = is_async
        self._lines: dict[str, Line] = {}
        self._lacking: dict[str, Line] = {}
        """Lines with jobs that wait for another turn."""
        self._lock = threading.Lock()
        self._idle_at = 0.0
        self._check_at = math.inf
        self._busy, self._seen_at, self._seen = False, 0.0, 0
        self._asked: dict[str, int] = {}
        self._idle: dict[str, int] = {}
        """Slots that the last statements release; ``_asked`` are those they ask for."""

    def serve(self, finished: Finished, passed: Passed) -> None:
        """Also take jobs of this dispatcher; the first dispatcher asks for slots.

        Args:
            finished: collects the outcomes of its jobs.
            passed: remembers its jobs for which there was no room here.
        """
        passed.full, passed.room = self._list_full, self._find_room
        self._passed.append(passed)
        self._finished.append(finished)

    # The interface of the workers

    @property
    def size(self) -> int:
        """Jobs that may run at once."""
        return min(self._workers.size, self._slots.most)

    @property
    def idle(self) -> int:
        """Always 0: other types may need the same workers, so none are counted on."""
        return 0

    @property
    def is_starving(self) -> bool:
        """Whether no job waits that could run."""
        if not self._workers.is_starving:
            return False
        with self._lock:
            return not any(line.waiting and line.turns for line in self._lines.values())

    def count_stuck(self, finished: Finished) -> int:
        """Count the jobs that wait here while those of other values may run.

        Args:
            finished: of the dispatcher whose jobs are counted.
        """
        if not self._slots.by_value:
            return 0
        with self._lock:
            return sum(
                _find_finished(item) is finished
                for line in self._lacking.values()
                if not line.held.is_quick
                for item in line.waiting.copy()
            )

    def put(self, items: Sequence[Item], *, first: bool = False) -> None:
        """Run these as soon as there are slots, in this order for each value."""
        with self._lock:
            if self._slots.is_over:
                # Halt first: running turns must not meet jobs of another lease.
                self._halt()
            touched = self._line_up(items, first=first)
            turns = self._begin(touched)
            lacks = not all(line.turns for line in touched)
        if turns:
            self._workers.put(turns, first=first)
        if lacks:
            self._finished[0].wake()

    def take_back(self, finished: Finished) -> list[Item]:
        """Take back a dispatcher's jobs that have not begun, oldest first."""
        taken: list[Item] = []
        freed: list[Line] = []
        with self._lock:
            for line in self._lines.values():
                if line.waiting:
                    freed.append(line)
                    every = _take_all(line.waiting)
                    taken += [
                        item for item in every if _find_finished(item) is finished
                    ]
                    line.waiting.extend(
                        i for i in every if _find_finished(i) is not finished
                    )
                    # They have waited for long, so let fewer of them wait.
                    line.most = max(_LEAST, line.most // 4)
                if not line.waiting:
                    self._lacking.pop(line.value, None)
        for line in freed:
            # No job may come back that would ask for more when it ends.
            self._ask_for_more(line)
        return sorted(taken, key=_get_id)

    def cancel(self, job: ClaimedJob) -> None:
        """Cancel a running handler, if it is async."""
        self._workers.cancel(job)

    # Slots

    def prepare(self) -> Batch:
        """Make the statements about slots that are due now, with their readers."""
        if self._slots.is_barred:
            return Batch()
        with self._lock:
            if recount := self._slots.recount():
                self._halt()
                return Batch([(recount, self._read_count)])
            turns = self._choose_idle()
            self._asked = {}
            if time.monotonic() >= self._check_at:
                turns += self._check_lacking()
            holds = any(line.held.count for line in self._lines.values())
        if turns:
            self._workers.put(turns)
        statements = self._slots.prepare(self._idle, self._asked, holds=holds)
        readers: dict[str, Reader] = {
            "take_slots": self._read_taken,
            "watch_slots": self._read_watched,
        }
        return Batch((one, readers.get(one[0], ignore)) for one in statements)

    def _read_count(self, rows: list[tuple[str, int]]) -> None:
        with self._lock:
            turns = self._count(dict(rows))
        if turns:
            self._workers.put(turns)

    def _read_taken(self, rows: list[tuple[str, int]]) -> None:
        with self._lock:
            turns = self._take(dict(rows))
        if turns:
            self._workers.put(turns)

    def _read_watched(self, rows: list[tuple[str | None, int]]) -> None:
        with self._lock:
            self._note_watched(dict(rows))

    @property
    def lacks_slots(self) -> bool:
        """Whether jobs wait here for slots of other processes or of other jobs."""
        return bool(self._lacking)

    def doubt(self) -> None:
        """Commits may be lost: count the slots before any more jobs start."""
        self._slots.doubt()
        with self._lock:
            self._halt()
        self._finished[0].wake()

    def seconds_left(self) -> float:
        """The seconds until the next statement is due; infinite if none is."""
        if self._slots.is_barred:
            return math.inf
        now = time.monotonic()
        with self._lock:
            if self._slots.is_over:
                return 0.0
            seconds = max(0.0, self._check_at - now)
            if any(line.held.count for line in self._lines.values()):
                seconds = min(seconds, self._slots.seconds_left)
        return seconds

    def _check_lacking(self) -> list[Turn]:
        """Choose which slots to ask for; returns the turns that may begin meanwhile."""
        busy = self._is_busy()
        self._asked = self._slots.choose_wanted(
            (
                (value, line.held, line.ran, line.needed - line.held.count)
                for value, line in self._lacking.items()
            ),
            busy=busy,
        )
        slow = [line for line in self._lacking.values() if not line.held.is_quick]
        turns = self._begin(slow)
        helds = (line.held for line in self._lacking.values())
        due_at = min((held.asked_at + held.pause for held in helds), default=math.inf)
        pause = _BUSY_PAUSE if busy else _CHECK_PAUSE
        self._check_at = max(due_at, time.monotonic() + pause)
        return turns

    def _is_busy(self) -> bool:
        """Whether the workers end jobs as quickly as Python can."""
        now, ran = time.monotonic(), self._workers.ran
        if now - self._seen_at >= _CHECK_PAUSE:
            self._busy = ran - self._seen > _QUICK * (now - self._seen_at)
            self._seen_at, self._seen = now, ran
        return self._busy

    def _choose_idle(self) -> list[Turn]:
        """Choose slots to release; returns the turns that may still begin."""
        self._idle = {}
        now = time.monotonic()
        if now < self._idle_at:
            return []
        self._idle_at = now + _IDLE_PAUSE
        for value in [v for v, line in self._lines.items() if _is_done(line)]:
            del self._lines[value]
        chosen = self._slots.choose_idle(
            (value, line.held, line.needed) for value, line in self._lines.items()
        )
        for value, line in self._lines.items():
            count = chosen.get(value, 0)
            # A running job keeps its slot until it ends; then no other job follows.
            line.allowed = max(0, line.held.count - count)
            free = min(count, line.held.count - line.turns)
            if free > 0:
                self._idle[value] = free
                note_released(line.held, free, needed=line.needed)
        return self._begin(self._lines.values())

    def _take(self, granted: Mapping[str, int]) -> list[Turn]:
        asked = [self._lines[value] for value in self._asked if value in self._lines]
        for line in asked:
            note_asked(line.held, granted.get(line.value, 0))
            line.allowed += granted.get(line.value, 0)
        return self._begin(asked)

    def _count(self, held: Mapping[str, int]) -> list[Turn]:
        self._slots.recounted()
        for value in held:
            if value not in self._lines:
                self._lines[value] = self._make_line(value)
        for value, line in self._lines.items():
            line.held.count = line.allowed = held.get(value, 0)
            line.held.wanted, line.held.pause = 0, 0.0
        return self._begin(self._lines.values())

    def _note_watched(self, wanted: dict[str | None, int]) -> None:
        held = wanted.pop(None)
        if held != sum(line.held.count for line in self._lines.values()):
            # Others took this process for dead, such as after a change of the clock.
            self._slots.doubt()
        for value, line in self._lines.items():
            line.held.wanted = wanted.get(value, 0)
        if wanted:
            self._idle_at = 0.0

    # Turns; under the lock

    def _line_up(self, items: Sequence[Item], *, first: bool) -> Collection[Line]:
        """Put each item into the line of its value; returns the changed lines."""
        lines = self._lines
        touched: dict[str, Line] = {}
        for item in reversed(items) if first else items:
            value = item.value or NAMELESS
            line = lines.get(value)
            if line is None:
                line = lines[value] = self._make_line(value)
            if first:
                line.waiting.appendleft(item)
            else:
                line.waiting.append(item)
            touched[value] = line
        return touched.values()

    def _halt(self) -> None:
        """Let every turn end before its next job, until the slots are known again."""
        for line in self._lines.values():
            line.allowed = 0

    def _begin(self, lines: Iterable[Line]) -> list[Turn]:
        """Begin the turns that may begin now; returns them."""
        is_over, now = self._slots.is_over, time.monotonic()
        check_at, soon = self._check_at, _BUSY_PAUSE if self._busy else _CHECK_PAUSE
        turns: list[Turn] = []
        for line in lines:
            waiting, most = len(line.waiting), line.allowed
            if most > 1 and line.held.is_quick:
                # One turn runs as many jobs as several: Python runs one thread.
                most = 1
            count = 0 if is_over else max(0, min(most - line.turns, waiting))
            if count == 1:
                line.turns += 1
                turns.append(line.turn)
            elif count:
                line.turns += count
                turns += [line.turn] * count
            if waiting > count and line.value not in self._lacking:
                self._lacking[line.value] = line
                pause = soon if line.turns else 0.0
                check_at = min(check_at, now + pause)
        self._check_at = check_at
        return turns

    def _make_line(self, value: str) -> Line:
        return Line(value, self._end, is_async=self._is_async)

    def _end(self, line: Line, must: bool) -> bool:
        """End a turn: see :class:`Turn`. Called by the thread that runs it."""
        with self._lock:
            if line.waiting and not must:
                return False
            line.turns -= 1
            turns = []
            is_empty = not line.waiting
            if is_empty:
                self._lacking.pop(line.value, None)
                line.held.idle_since = time.monotonic()
            else:
                turns = self._begin([line])
        if turns:
            self._workers.put(turns)
        elif must:
            # Other processes want its slot: release it.
            self._idle_at = 0.0
            self._finished[0].wake()
        if is_empty and any(map(len, self._passed)):
            # If they were not cut off, they are quicker than they come.
            self._ask_for_more(line, 1 if must else 2)
        return True

    def _ask_for_more(self, line: Line, factor: int = 1) -> None:
        """Claim jobs of a line that were passed over: fewer wait here now.

        Args:
            line: with room for more.
            factor: how many times more of them may wait from now on.
        """
        for passed, finished in zip(self._passed, self._finished, strict=True):
            if line.value in passed.values:
                line.most = min(_MANY, line.most * factor)
                passed.hungry.add(line.value)
                finished.wake()

    # For claims

    def _list_full(self) -> list[str]:
        """The values with enough waiting jobs here."""
        with self._lock:
            return [
                value
                for value, line in self._lines.items()
                if len(line.waiting) >= line.most
            ]

    def _find_room(self, value: str) -> int:
        line = self._lines.get(value)
        return line.most - len(line.waiting) if line else FEW


def _is_done(line: Line) -> bool:
    return not (line.needed or line.held.count)


def _take_all(waiting: deque[Item]) -> list[Item]:
    taken: list[Item] = []
    while waiting:
        try:
            taken.append(waiting.popleft())
        except IndexError:  # a turn has taken it meanwhile
            break
    return taken


def _find_finished(item: Item) -> Finished:
    return item.finished if isinstance(item, Lane) else item.lane.finished


def _get_id(item: Item) -> int:
    if isinstance(item, Lane):
        return item.jobs[0].id if item.jobs else 0
    return item.id
