"""The judge of re-exports: it sees a table, and the topic as any consumer does."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.figures import count_fullest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tests.support.records import Seen


@dataclass(frozen=True)
class Sent:
    """What a topic has of one re-export."""

    records: int
    repeated: int
    """Records beyond the first one of each key."""
    fullest: int
    """The records of its fullest minute, by the broker's time of the append."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a topic, and how its re-exports were sent."""

    missing: list[str]
    """Keys of the table whose newest record is not their row."""
    alive: list[str]
    """Keys with a state in the topic that the table does not have."""
    backwards: list[str]
    """Keys with a record whose version is lower than that of an earlier one."""
    scattered: list[str]
    """Keys with records in several partitions: these have no order."""
    sent: Mapping[str, Sent] = field(default_factory=dict)
    """By the id of each re-export."""


def judge(records: Iterable[Seen], table: Mapping[str, int]) -> Verdict:
    """Compare a topic with the table that it shall show.

    Args:
        records: all of the topic, in the order of each partition. Their times are those
            of the broker.
        table: the version of each key.
    """
    newest: dict[str, Seen] = {}
    highest: dict[str, int] = {}
    backwards: set[str] = set()
    scattered: set[str] = set()
    times: dict[str, list[float]] = defaultdict(list)
    keys: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        key, version = record.key, read_version(record)
        if version is not None:
            if version < highest.get(key, version):
                backwards.add(key)
            highest[key] = max(version, highest.get(key, version))
        if key in newest and newest[key].partition != record.partition:
            scattered.add(key)
        newest[key] = record
        if (reexport := record.headers.get("ce_reexport")) is not None:
            times[reexport].append(record.at)
            keys[reexport][key] += 1
    alive = {key for key, record in newest.items() if record.value is not None}
    return Verdict(
        missing=[
            key
            for key, version in table.items()
            if key not in alive or newest[key].json["version"] != version
        ],
        alive=sorted(alive - table.keys()),
        backwards=sorted(backwards),
        scattered=sorted(scattered),
        sent={
            one: Sent(len(at), len(at) - len(keys[one]), count_fullest(sorted(at)))
            for one, at in times.items()
        },
    )


def read_version(record: Seen) -> int | None:
    """Read the version of a record; None: a tombstone without one, which ends its key.

    So is that of a change whose row was deleted before its state was read. The
    tombstone of the deletion itself follows, and has one.
    """
    if (version := record.headers.get("ce_version")) is not None:
        return int(version)
    return None if record.value is None else int(record.json["version"])
