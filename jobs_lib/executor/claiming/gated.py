"""The jobs of types that wait for other groups: which ones claims may take.

Claims pass over the rows whose gate is closed, and nothing is kept of them: there may
be millions. All that is kept is an offset for each partition of records. When a gate
moves on, the query ``find_opened`` finds the jobs of the records in between, by their
index, and claims ask for them by id.

No job is lost between the two. For each partition there is a mark: jobs of records
below it are open, or were found. A statement passes over rows at or above the end that
it was given, and the mark is never above that end: one thread prepares all statements
of a round with the same ends, and first lowers the marks to them.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from jobs_lib.executor.batch import Batch
from jobs_lib.executor.limiting.gate import LOOK_SECONDS, NO_GATE
from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from jobs_lib.executor.batch import Question
    from jobs_lib.executor.claiming.cursor import Cursor
    from jobs_lib.executor.claiming.wanted import WantedRows
    from jobs_lib.executor.limiting.gate import Ends, JobGate
    from jobs_lib.jobs.waiting import Source

_READ = 5_000
"""Rows that one query may read, of all partitions."""
_PARTITIONS = 200
"""Partitions that one query looks at."""
_ENOUGH = 2_000
"""While so many jobs are wanted, no more are looked for."""


class GatedRows:
    """Up to where the gates of one section are open; used by one thread."""

    def __init__(self, gate: JobGate | None, types: Collection[str]) -> None:
        """Know of no partition yet.

        Args:
            gate: of the section; None if its types wait for nobody.
            types: of the section.
        """
        self.gate = gate
        self._types = sorted(types)
        self._ends: Ends = {}
        self._sources: Mapping[int, Source] = {}
        self._open_to: dict[int, int] = {}
        """The ends by the numbers of partitions."""
        self._marks: dict[int, tuple[int, int]] = {}
        """Offset and id behind which the next jobs are looked for."""
        self._behind: dict[int, None] = {}
        """The partitions whose marks are below their ends."""
        self._given: dict[str, Any] = {}
        self._sure_at = 0.0
        """When it was asked last which jobs still wait."""
        self._seen_to: dict[int, tuple[int, int]] = {}
        """Offset and id up to which none was found, where there are more."""

    @property
    def suffix(self) -> str:
        """The suffix of queries that read gates: see ``_read_queries``."""
        return "_gated" if self.gate else ""

    def doubt(self) -> None:
        """Commits may be lost: another partition may get the number of one."""
        if self.gate is not None:
            self.gate.is_loaded = False

    def look(self) -> None:
        """Begin a round: see how far the gates are open now."""
        if self.gate is None:
            return
        self.gate.look()
        ends, sources = self.gate.find_ends(), self.gate.sources
        if self._given and sources is self._sources and _is_same(ends, self._ends):
            return
        self._ends, self._sources = ends, sources
        self._open_to = {
            number: self.gate.find_end(one, ends) for number, one in sources.items()
        }
        for number, end in self._open_to.items():
            # Until now all jobs of a new partition were passed over.
            low = min(self._marks.get(number, (0, 0)), (end, 0))
            self._marks[number] = low
            if low < (end, 0):
                self._behind[number] = None
            else:
                self._behind.pop(number, None)
        first, last = min(sources, default=1), max(sources, default=0)
        self._given = {
            "gate_first": first - 1,
            "gate_ends": int_array(
                self._open_to.get(number, 0) for number in range(first, last + 1)
            ),
        }

    def parameters(self) -> dict[str, Any]:
        """The parameters of the part ``opened``."""
        return self._given

    def note(self, origin: str, numbers: Iterable[int], offsets: Iterable[int]) -> None:
        """Note up to which offsets an origin's jobs were passed over."""
        if self.gate is not None:
            for number, offset in zip(numbers, offsets, strict=True):
                self.gate.note_waiting(origin, number, offset)

    def release(self, origins: Collection[str]) -> None:
        """Forget that jobs of origins wait: others tell it now."""
        if self.gate is not None:
            self.gate.release(origins)

    def prepare(self, active: Mapping[str, Cursor], wanted: WantedRows) -> Batch:
        """The questions that are due now.

        Args:
            active: the origins that may be claimed from. Others begin at their start
                once they may.
            wanted: gets the ids of the jobs that are found.
        """
        if self.gate is None:
            return Batch()
        if self.gate.missing or not self.gate.is_loaded:
            read = partial(self.gate.note_sources, asked=self.gate.missing.copy())
            return Batch([(("read_job_sources", {}), read)])
        questions = []
        if self._behind and active and wanted.count(active) <= _ENOUGH:
            questions.append(self._ask_opened(active, wanted))
        if unsure := self._find_unsure(self.gate, active):
            questions.append(self._ask_waiting(self.gate, active, unsure))
        return Batch(questions)

    def _find_unsure(self, gate: JobGate, active: Collection[str]) -> list[int]:
        """Find partitions of whose records jobs may wait no more, now and then."""
        now = time.monotonic()
        if now < self._sure_at + LOOK_SECONDS:
            return []
        self._sure_at = now
        unsure = gate.find_unsure(active) & self._open_to.keys()
        # Jobs of the others were seen, or have started.
        self._seen_to = {one: at for one, at in self._seen_to.items() if one in unsure}
        return sorted(unsure)[:_PARTITIONS]

    def _ask_opened(self, active: Mapping[str, Cursor], wanted: WantedRows) -> Question:
        chosen = [*islice(self._behind, _PARTITIONS)]
        asked = {number: self._open_to[number] for number in chosen}
        marks = [self._marks[number] for number in chosen]
        parameters = {
            **self._describe(active, chosen, marks, asked.values()),
            "cursors": int_array(one.at for one in active.values()),
            "highs": int_array(one.levels[1] for one in active.values()),
            "batches": int_array(one.levels[-1] for one in active.values()),
        }
        reader = partial(self._read_opened, asked, wanted)
        return ("find_opened", parameters), reader

    def _ask_waiting(
        self, gate: JobGate, active: Collection[str], chosen: Collection[int]
    ) -> Question:
        # A gate may have moved since.
        lows = [
            max((self._open_to[number], 0), self._seen_to.get(number, (0, 0)))
            for number in chosen
        ]
        parameters = self._describe(active, chosen, lows, [NO_GATE] * len(chosen))
        began, origins = time.monotonic(), frozenset(active)
        reader = partial(self._read_waiting, gate, origins, chosen, began)
        return ("find_waiting", parameters), reader

    def _describe(
        self,
        active: Iterable[str],
        chosen: Collection[int],
        lows: Collection[tuple[int, int]],
        ends: Iterable[int],
    ) -> dict[str, Any]:
        """The parameters of the part ``slice``, and which of its jobs are meant."""
        return {
            "sources": int_array(chosen),
            "lows": int_array(low for low, _ in lows),
            "low_ids": int_array(low_id for _, low_id in lows),
            "ends": int_array(ends),
            "limit": _READ // len(chosen),
            "origins": text_array([*active]),
            "types": self._types,
        }

    def _read_waiting(
        self,
        gate: JobGate,
        origins: frozenset[str],
        asked: Iterable[int],
        began: float,
        rows: list[tuple[int, bool, int | None, int]],
    ) -> None:
        seen = dict.fromkeys(asked, False)
        for number in seen:
            self._seen_to.pop(number, None)
        for number, waits, offset, job_id in rows:
            seen[number] = waits
            if not waits and offset is not None:
                # Those of others may fill a slice: it goes on behind them.
                self._seen_to[number] = offset, job_id
                del seen[number]
        gate.note_looked(origins, seen, began)

    def _read_opened(
        self,
        asked: Mapping[int, int],
        wanted: WantedRows,
        rows: list[tuple[int, int, int, str | None]],
    ) -> None:
        reached = {number: (end, 0) for number, end in asked.items()}
        for number, offset, job_id, origin in rows:
            if origin is None:
                reached[number] = offset, job_id
        for number, mark in reached.items():
            self._marks[number] = mark
            # The others have their turn first.
            self._behind.pop(number, None)
            if mark < (self._open_to[number], 0):
                self._behind[number] = None
        wanted.add({job_id: origin for _, _, job_id, origin in rows if origin})


def _is_same(ends: Ends, before: Ends) -> bool:
    """Whether no gate has moved; the objects say so, however many there are."""
    return ends.keys() == before.keys() and all(
        before[topic] is one for topic, one in ends.items()
    )
