"""The verdict on a relay: a function of what was committed and of what arrived.

The rules are exact. The rows of a key have the places 0, 1, 2, … in the order of their
commits; the records of a key are a sequence of places.

- A record goes to the next place, or back to an earlier one. Where rows are merged, it
  may also skip some places.
- A step back is a *replay*. It is not longer than a block. After it the sequence
  continues and passes every state again before it ends.
- The last record is the last row's.
- A record is a *repeat* if the key was already at its place, or past it. There are no
  more repeats than the faults of the run explain; without a fault there are none.

Where rows are merged, a replay need not stop at the states that were sent the first
time. Two swapped records could hide there while faults last, and nowhere else. Topics
that merge nothing take the same path through the relay, and there nothing can hide.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from jobs_lib.partitioner import choose_partition

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from tests.support.outbox.history import Row
    from tests.support.records import Seen

_SHOWN = 20


class Violation(NamedTuple):
    """A fault, and the invariant that it breaks."""

    invariant: str
    what: str


@dataclass
class Verdict:
    """The findings of the judge."""

    violations: list[Violation] = field(default_factory=list)
    rows: int = 0
    """How many rows were committed."""
    records: int = 0
    merged: int = 0
    """How many rows have no record because a later row of their key replaces them."""
    repeats: int = 0
    late: int = 0
    """How many rows have a lower id than a row that was committed before."""
    tombstones: int = 0
    """How many records have no value."""
    delays: list[float] = field(default_factory=list)
    """The seconds from each commit to the time of its record, in rising order."""

    @property
    def broken(self) -> set[str]:
        """The invariants that do not hold."""
        return {violation.invariant for violation in self.violations}

    def delay(self, share: float) -> float:
        """The delay that this share of the records does not exceed."""
        return self.delays[int(share * (len(self.delays) - 1))] if self.delays else 0.0

    def __str__(self) -> str:
        """The first violations and the counts, for people."""
        told = [f"{v.invariant}: {v.what}" for v in self.violations[:_SHOWN]]
        if len(self.violations) > _SHOWN:
            told.append(f"… {len(self.violations)} in all")
        told.append(
            f"{self.rows} rows, {self.records} records, {self.merged} merged,"
            f" {self.repeats} repeats, {self.late} late, {self.tombstones} tombstones,"
            f" delay p50 {self.delay(0.5):.3f} s, p99 {self.delay(0.99):.3f} s"
        )
        return "\n".join(told)


def judge(
    rows: Iterable[Row],
    topics: Mapping[str, Sequence[Seen]],
    *,
    merging: Collection[str] = (),
    partitions: Mapping[str, int] | None = None,
    block: int = 0,
    repeats: int = 0,
    left: Collection[int] = (),
) -> Verdict:
    """Compare what was committed with what arrived.

    Args:
        rows: every committed row, in the order of commits. A row that comes again under
            its id was held and released; its first place counts.
        topics: all records of each topic, in the order of their offsets.
        merging: topics in which the last of several rows may replace all of them.
        partitions: the number of partitions of each topic, if that is to be checked.
        block: the rows in a block; a replay may go back this far at most.
        repeats: how many repeats the faults of the run explain.
        left: ids that may lack a record, since they are held.
    """
    known: dict[int, Row] = {}
    for row in rows:
        known.setdefault(row.id, row)
    verdict = Verdict(rows=len(known), late=_count_late(known.values()))
    places: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for row in known.values():
        if row.key is not None:
            places[row.topic, row.key].append(row.id)
    sent: defaultdict[tuple[str, str], list[Seen]] = defaultdict(list)
    keyless: set[int] = set()
    for topic, records in topics.items():
        verdict.records += len(records)
        for record in records:
            faults = [*_check_record(topic, record, known, partitions or {})]
            verdict.violations += faults
            if any(fault.invariant == "I19" for fault in faults):
                continue
            row = known[read_id(record)]
            verdict.tombstones += record.value is None
            if row.key is not None:
                sent[topic, row.key].append(record)
            else:
                verdict.repeats += row.id in keyless
                keyless.add(row.id)
    arrived = keyless.copy()
    for (topic, key), ids in places.items():
        by_key = _Key(topic, key, ids, sent[topic, key], topic in merging, block)
        arrived |= by_key.arrived
        by_key.judge(verdict, {*left})
    _judge_whole(verdict, known, topics, arrived, repeats, {*left})
    return verdict


def _judge_whole(
    verdict: Verdict,
    known: Mapping[int, Row],
    topics: Mapping[str, Sequence[Seen]],
    arrived: set[int],
    repeats: int,
    left: set[int],
) -> None:
    for row in known.values():
        if row.key is None and row.id not in arrived | left:
            lost = Violation("I18", f"row {row.id} of {row.topic} has no record")
            verdict.violations.append(lost)
    if verdict.repeats > repeats:
        verdict.violations.append(
            Violation("I21", f"{verdict.repeats} repeats, and {repeats} are explained")
        )
    first: dict[int, float] = {}
    for record in (record for records in topics.values() for record in records):
        row_id = read_id(record)
        if row_id in known:
            first.setdefault(row_id, record.at - known[row_id].at)
    verdict.delays = sorted(first.values())


class _Key:
    """The rows of one key, and its records."""

    def __init__(
        self,
        topic: str,
        key: str,
        ids: list[int],
        records: list[Seen],
        merging: bool,
        block: int,
    ) -> None:
        self._name = f"{topic} {key!r}"
        self._ids = ids
        self._records = records
        self._merging = merging
        self._block = block
        place = {row_id: n for n, row_id in enumerate(ids)}
        self._sent = [place[read_id(record)] for record in records]
        self.arrived = {ids[n] for n in self._sent}

    def judge(self, verdict: Verdict, left: set[int]) -> None:
        """Add the findings to the verdict."""
        verdict.violations += self._find_lost(verdict, left)
        verdict.violations += self._find_disorder(left)
        verdict.violations += self._find_decreases()
        highest = -1
        for n in self._sent:
            verdict.repeats += n <= highest
            highest = max(highest, n)

    def _find_lost(self, verdict: Verdict, left: set[int]) -> Iterator[Violation]:
        highest = max(self._sent, default=-1)
        for n, row_id in enumerate(self._ids):
            if row_id in self.arrived or row_id in left:
                continue
            if self._merging and n < highest:
                verdict.merged += 1
            else:
                yield Violation("I18", f"row {row_id} of {self._name} has no record")

    def _find_disorder(self, left: set[int]) -> Iterator[Violation]:
        for before, n in pairwise([-1, *self._sent]):
            if n > before + 1 and not self._merging:
                yield Violation(
                    "I20",
                    f"of {self._name} row {self._ids[n]} came {n - before - 1} too"
                    f" early, after {self._ids[before] if before >= 0 else 'nothing'}",
                )
            if n <= before and before - n >= max(1, self._block):
                yield Violation(
                    "I21",
                    f"{self._name} went back by {before - n + 1} rows to"
                    f" {self._ids[n]}, and a block has {self._block}",
                )
        last = max((n for n, i in enumerate(self._ids) if i not in left), default=-1)
        if self._sent and self._sent[-1] != last:
            yield Violation(
                "I20",
                f"{self._name} ends with row {self._ids[self._sent[-1]]}, not with"
                f" {self._ids[last]}",
            )
        if len({record.partition for record in self._records}) > 1:
            yield Violation("I20", f"{self._name} lies in several partitions")

    def _find_decreases(self) -> Iterator[Violation]:
        """Find decreases of the version, as a consumer sees it that skips repeats."""
        highest, version = -1, 0
        for n, record in zip(self._sent, self._records, strict=True):
            if n <= highest:
                continue
            highest = n
            found = int(record.headers.get("ce_version", version))
            if found < version:
                yield Violation(
                    "I26", f"{self._name} fell from version {version} to {found}"
                )
            version = max(version, found)


def _check_record(
    topic: str, record: Seen, known: Mapping[int, Row], partitions: Mapping[str, int]
) -> Iterator[Violation]:
    """Find the faults of a single record."""
    name = f"record {record.partition}/{record.offset} of {topic}"
    row = known.get(read_id(record))
    if row is None:
        found = record.headers.get("ce_id")
        yield Violation("I19", f"{name}: no row {found} was committed")
        return
    expected: dict[str, object] = {"topic": row.topic, "key": row.key or ""}
    told: dict[str, object] = {"topic": topic, "key": record.key}
    if row.entity is None:
        expected |= {"value": row.value} if row.value is not None else {}
        told |= {"value": record.value} if row.value is not None else {}
        if row.value is None and record.value is not None:
            yield Violation("I19", f"{name}: row {row.id} is a tombstone")
    if row.version is not None:
        expected["ce_version"] = str(row.version)
    expected |= row.headers
    told |= {n: record.headers.get(n) for n in expected if n not in told}
    if wrong := [n for n in expected if expected[n] != told[n]]:
        yield Violation("I19", f"{name}: {', '.join(wrong)} are not row {row.id}'s")
    count = partitions.get(topic)
    if count and row.key is not None:
        right = choose_partition(row.key, count)
        if record.partition != right:
            yield Violation("I18", f"{name}: its key belongs to partition {right}")


def read_id(record: Seen) -> int:
    """The id of the row that a record was made of; -1 if it names none."""
    found, _, _ = record.headers.get("ce_id", "").partition("-")
    return int(found) if found.isdecimal() else -1


def _count_late(rows: Iterable[Row]) -> int:
    highest: dict[int, int] = {}
    late = 0
    for row in rows:
        late += row.id < highest.get(row.shard, 0)
        highest[row.shard] = max(highest.get(row.shard, 0), row.id)
    return late


def find_missing(counters: Mapping[str, int]) -> list[Violation]:
    """Find faults that a run should inject and did not: such a run proves nothing."""
    return [
        Violation("I39", f"{name}: not once")
        for name, count in counters.items()
        if count <= 0
    ]
