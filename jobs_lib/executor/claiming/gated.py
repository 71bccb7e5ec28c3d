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

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from jobs_lib.executor.batch import Batch
from jobs_lib.postgres.values import int_array, text_array

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

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
        if not (self._behind and active) or wanted.count(active) > _ENOUGH:
            return Batch()
        chosen = [*islice(self._behind, _PARTITIONS)]
        asked = {number: self._open_to[number] for number in chosen}
        parameters = {
            "sources": int_array(chosen),
            "lows": int_array(self._marks[number][0] for number in chosen),
            "low_ids": int_array(self._marks[number][1] for number in chosen),
            "ends": int_array(asked.values()),
            "limit": _READ // len(chosen),
            "origins": text_array([*active]),
            "cursors": int_array(one.at for one in active.values()),
            "highs": int_array(one.levels[1] for one in active.values()),
            "batches": int_array(one.levels[-1] for one in active.values()),
            "types": self._types,
        }
        reader = partial(self._read_opened, asked, wanted)
        return Batch([(("find_opened", parameters), reader)])

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
