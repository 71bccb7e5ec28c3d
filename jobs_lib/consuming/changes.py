"""What a block of records does to the keys of a read model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from jobs_lib.consuming.handler import decode
from jobs_lib.consuming.record import (
    REEXPORT,
    Record,
    describe,
    read_cause,
    read_version,
)
from jobs_lib.consuming.subscription import BlockError
from jobs_lib.errors import RecordError
from jobs_lib.kafka.timestamps import LATEST_MS, read_milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from confluent_kafka import Message

    from jobs_lib.consuming.keys import KeyReader
    from jobs_lib.schemas.codec import Decoder

Change: TypeAlias = "tuple[Any, int | None, Any, int, int]"
"""(key, version, row, offset, timestamp in Kafka in milliseconds) of a record. The row
is None if the key is to have none. A block has thousands: a class would be slow."""
Kind: TypeAlias = "tuple[bool, tuple[str, ...] | None]"
"""Whether changes have a version, and the columns of their rows, if they have rows."""
_Read: TypeAlias = "tuple[int | None, int, Message, Any]"
"""(version, index in the block, message, value)"""


@dataclass
class Changes:
    """The changes of a block, of one partition."""

    partition: int
    records: dict[Any, Record[Any, Any]] = field(default_factory=dict)
    """The last record of each key, where they are kept. It is the one before if the
    last one is a re-export of the same version: that one tells nothing new."""
    versions: dict[Any, list[tuple[int, int]]] = field(default_factory=dict)
    """By key the versions of all its records, each with the record's offset, where they
    are kept."""
    waves: list[list[Change]] = field(default_factory=list)
    """Each has a key once. A key has more than one change if the effect of the later
    one depends on the one before; then it is in a later wave."""
    left: Changes | None = None
    """Those that are left to another group."""

    def leave(self, offset: int) -> Changes:
        """Leave the changes of the records from this offset on to another group."""
        if all(one[3] < offset for wave in self.waves for one in wave):
            return self
        before = [[one for one in wave if one[3] < offset] for wave in self.waves]
        behind = [[one for one in wave if one[3] >= offset] for wave in self.waves]
        left = Changes(self.partition, waves=[wave for wave in behind if wave])
        return replace(self, waves=[wave for wave in before if wave], left=left)

    @cached_property
    def kinds(self) -> list[tuple[Kind, list[Change]]]:
        """The changes by their kind, in the order in which they are to be written."""
        found: list[tuple[Kind, list[Change]]] = []
        for wave in self.waves:
            kinds: dict[Kind, list[Change]] = {}
            for change in wave:
                _, version, row, _, _ = change
                kind = version is not None, None if row is None else tuple(row)
                if kind not in kinds:
                    kinds[kind] = []
                kinds[kind].append(change)
            found += kinds.items()
        return found


def read_changes(
    messages: Sequence[Message],
    decoder: Decoder,
    read_key: KeyReader,
    row_of: Callable[[Record[Any, Any]], Mapping[str, Any] | None],
    highest: int | None,
    *,
    keeps_records: bool = False,
    keeps_versions: bool = False,
) -> Changes:
    """Read the records of a block, of one partition.

    Args:
        messages: the records.
        decoder: reads the values.
        read_key: reads the keys.
        row_of: makes a row of a record.
        highest: the highest offset to go on from that the partition ever had.
        keeps_records: whether the last record of each key is kept, too.
        keeps_versions: whether the versions of all records are kept, too.

    Raises:
        BlockError: a record cannot be read, or ``row_of`` has failed or returned
            something else.
    """
    # Only the newest records of each key matter. The others get neither a record nor a
    # row: a block has thousands.
    newest: dict[Any, _Read] = {}
    # Of keys that have more than one such record, all of them.
    chains: dict[Any, list[_Read]] = {}
    # Of keys whose newest record only repeats another one, that one.
    repeated: dict[Any, _Read] = {}
    versions: dict[Any, list[tuple[int, int]]] = {}
    index = 0
    try:
        for index, message in enumerate(messages):
            value = decode(message, decoder)
            key = read_key(message)
            version = read_version(message, strict=True)
            read = version, index, message, value
            known = newest.get(key)
            if known is not None and keeps_records:
                _note_repeated(repeated, key, known, read)
            if known is None:
                newest[key] = read
            elif version is None:
                newest[key] = read
                chains.pop(key, None)
            else:
                chain = chains.get(key) or [known]
                _add(chain, read)
                newest[key] = chain[-1]
                if len(chain) > 1:
                    chains[key] = chain
                else:
                    chains.pop(key, None)
            if keeps_versions and version is not None:
                offset = message.offset() or 0
                versions.setdefault(key, []).append((version, offset))
        if None in newest:
            _, index, message, _ = newest[None]
            raise _refuse_keyless(message)
        changes = Changes(messages[0].partition() or 0, versions=versions)
        waves = [newest | {key: chain[0] for key, chain in chains.items()}]
        while chains := {key: chain[1:] for key, chain in chains.items() if chain[1:]}:
            waves.append({key: chain[0] for key, chain in chains.items()})
        for reads in waves:
            made: list[Change] = []
            changes.waves.append(made)
            for key, (version, place, message, value) in reads.items():
                index, row = place, None
                if value is not None:
                    row = row_of(Record(message, key, value, highest))
                    # Almost every row is a dict, which is the quicker question.
                    if row is not None and type(row) is not dict:
                        check_row(row)
                _, milliseconds = message.timestamp()
                # Almost every time is within the bounds, likewise.
                if not 0 <= milliseconds <= LATEST_MS:
                    milliseconds = read_milliseconds(message)
                offset = message.offset() or 0
                made.append((key, version, row, offset, milliseconds))
        if keeps_records:
            changes.records = {
                key: Record(message, key, value, highest)
                for key, (_, _, message, value) in (newest | repeated).items()
            }
    except BaseException as error:
        raise BlockError(index, error) from error
    return changes


def check_row(row: object) -> None:
    """Check what a read model's function has returned.

    Raises:
        RecordError: it is no mapping.
    """
    if not isinstance(row, Mapping):
        raise RecordError(
            f"the read model's function has returned the type {type(row).__name__}: "
            "return a mapping of columns, or of tables if there are several, or None "
            "for no row"
        )


def _add(chain: list[_Read], new: _Read) -> None:
    """Add a record with a version to the newest ones of its key."""
    version, _, _, value = new
    last_version, _, _, last_value = chain[-1]
    if last_version is None:
        chain.append(new)
    elif last_version < version:  # type: ignore[operator]
        # Those with versions go; one without, before them, has an effect of its own.
        del chain[int(chain[0][0] is None) :]
        chain.append(new)
    elif last_version == version:
        # A tombstone and a state may have the same version, and the effect of a state
        # depends on the tombstone before it.
        if (last_value is None) is (value is None):
            chain.pop()
        chain.append(new)


def _note_repeated(
    repeated: dict[Any, _Read], key: Any, known: _Read, new: _Read
) -> None:
    """Note the newest record of a key if the next one is only a re-export of it."""
    version, _, message, value = new
    known_version, _, known_message, known_value = known
    if version is None or known_version is None:
        # Without versions nothing but the bytes says that both have one state.
        is_newer = True
        is_same = version is known_version and message.value() == known_message.value()
    else:
        is_newer = version > known_version
        is_same = version == known_version and (value is None) is (known_value is None)
    if is_same and read_cause(message) == REEXPORT:
        if read_cause(known_message) != REEXPORT:
            repeated[key] = known
    elif is_same or is_newer:
        repeated.pop(key, None)


def _refuse_keyless(message: Message) -> RecordError:
    return RecordError(
        f"the record at {describe(message)} has no key: a read model has rows for "
        "each key"
    )


class Missing(NamedTuple):
    """Records that were never read, by the versions of the others.

    Attributes:
        number: how many they are.
        offset: of the first record behind such a gap.
        before: the version before that gap.
        after: the version of that record.
    """

    number: int
    offset: int
    before: int
    after: int


def find_missing(changes: Changes, known: Mapping[Any, int]) -> Missing | None:
    """Find gaps in versions that should grow by one; None if there are none.

    A key that is not known yet may begin with any version.

    Args:
        changes: of a block, with the versions of all records.
        known: the highest version of each key before the block.
    """
    gaps: list[tuple[int, int, int]] = []
    number = 0
    for key, versions in changes.versions.items():
        last = known.get(key)
        for version, offset in versions:
            if last is not None and version > last + 1:
                number += version - last - 1
                gaps.append((offset, last, version))
            last = version if last is None else max(last, version)
    return Missing(number, *min(gaps)) if gaps else None
