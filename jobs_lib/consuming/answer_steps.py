"""What is asked of a read model, and put beside it, as steps on any connection."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from jobs_lib.callers import Fetch, Pause, Statement, Statements
from jobs_lib.consuming.answer_checks import check_fits
from jobs_lib.consuming.arrays import write_array
from jobs_lib.consuming.keys import encode_key, read_written
from jobs_lib.consuming.merging import EntityState, choose_newest
from jobs_lib.errors import AnswerError
from jobs_lib.partitioner import choose_partition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from uuid import UUID

    from jobs_lib.callers import Steps
    from jobs_lib.consuming.read_model import ReadModel
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.postgres.queries import Queries
    from jobs_lib.settings import Settings

    Key = str | int | bytes | UUID

_MOST_ENTRIES = 1_000
_MOST_BYTES = 16_777_216
"""Of the entities of a read model that are kept: each search reads all of them."""
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.005, 0.1, 1.5
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SEES_OTHERS = {"read committed", "read uncommitted"}


@dataclass(frozen=True, slots=True)
class ValidSince:
    """How far a read model is.

    Attributes:
        at: the time in Kafka up to which everything is in it, in UTC; None if a
            partition has nothing in it, or nobody knows.
        offsets: by partition. All records before the offset are in it; None: no record
            is.
    """

    at: datetime | None
    offsets: Mapping[int, int | None]


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """What a read model has of a key.

    Attributes:
        version: the version.
        is_gone: whether that version has removed the key.
    """

    version: int
    is_gone: bool


class AnswerSteps:
    """The steps of the calls of ``Answers``."""

    def __init__(
        self,
        declared: Subscription,
        model: ReadModel,
        queries: Callable[[], Queries],
        settings: Callable[[], Settings],
    ) -> None:
        self._declared = declared
        self._model = model
        self._settings = settings
        self._statements = Statements(queries)
        self._composed: dict[str, Statement] = {}
        self._key_type: str | None = None
        """The type of the key's column, once it is known."""

    def read_valid_since(self, key: Key | None) -> Steps[ValidSince]:
        place = {"group": self._declared.group, "topic": self._declared.topic}
        named = {"model": self._declared.first_table, **place}
        rows = yield Fetch(self._statements["read_valid_since"], named)
        offsets = {int(n): None if at is None else int(at) for n, at, _ in rows}
        times = {int(n): None if ms is None else int(ms) for n, _, ms in rows}
        if key is not None and times:
            number = choose_partition(encode_key(key), max(times) + 1)
            offsets = {number: offsets.get(number)}
            times = {number: times.get(number)}
        known = [ms for ms in times.values() if ms is not None]
        if not known or len(known) < len(times):
            return ValidSince(None, offsets)
        return ValidSince(_EPOCH + timedelta(milliseconds=min(known)), offsets)

    def wait_for(
        self, key: str, version: int, timeout: float
    ) -> Steps[ModelVersion | None]:
        statement = yield from self._prepare("read_known", [key])
        until = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while True:
            rows = yield Fetch(statement, {**self._model.asked_as, "key": key})
            known, is_gone, isolation = rows[0]
            # Also where the version is there by now: otherwise the mistake would only
            # show while the read model is behind.
            if timeout and isolation not in _SEES_OTHERS:
                raise _refuse_isolation(isolation)
            if known is not None and int(known) >= version:
                return ModelVersion(int(known), is_gone == "true")
            left = until - time.monotonic()
            if left <= 0:
                return None
            yield Pause(min(pause, left))
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)

    def put(self, key: str, version: int, entity: str | None) -> Steps[bool]:
        statement = yield from self._prepare("put_answer", [key])
        rows = yield Fetch(
            statement,
            {
                **self._model.asked_as,
                "key": key,
                "version": str(version),
                "value": entity,
                "bytes": str(len(entity or "")),
                "group": self._declared.group,
                "topic": self._declared.topic,
                "seconds": str(self._settings().answer_seconds),
                "most": str(_MOST_ENTRIES),
                "most_bytes": str(_MOST_BYTES),
            },
        )
        return bool(rows)

    def read_newer(
        self, given: list[EntityState], keys: list[str]
    ) -> Steps[list[EntityState]]:
        statement = yield from self._prepare("read_newer", keys)
        rows = yield Fetch(
            statement,
            {
                **self._model.asked_as,
                "seconds": str(self._settings().answer_seconds),
                "keys": write_array(keys, str),
                "versions": write_array([state.version for state in given], str),
            },
        )
        own = {
            (key, str(state.version)): state
            for key, state in zip(keys, given, strict=True)
        }
        return choose_newest(
            own[key, version]
            if is_stored == "false"
            else self._read_stored(key, version, value)
            for key, version, is_stored, value in rows
        )

    def _read_stored(self, key: str, version: str, value: str | None) -> EntityState:
        entity = None if value is None else json.loads(value)
        return EntityState(
            read_written(key, self._model.key_type), int(version), entity
        )

    def _prepare(self, template: str, keys: Iterable[str]) -> Steps[Statement]:
        """Find a statement, and refuse keys that its casts would fail on.

        A statement that fails would take the caller's transaction with it.
        """
        if self._key_type is None:
            self._key_type = yield from self._find_key_type()
        for key in keys:
            check_fits(key, self._key_type, self._model.name)
        if template not in self._composed:
            query = self._model.fill_known(template, self._key_type)
            self._composed[template] = Statement(query)
        return self._composed[template]

    def _find_key_type(self) -> Steps[str]:
        table = self._model.keyed_table
        if table is None:
            return "text"
        rows = yield Fetch(
            self._statements["read_column_types"], {"table": table.identifier}
        )
        types: dict[str, str] = dict(rows)
        if table.key not in types:
            raise AnswerError(
                f"there is no table {table.name} with a column {table.key} here: "
                "create it, or give a connection to the database that has it"
            )
        return types[table.key]


def _refuse_isolation(isolation: str) -> AnswerError:
    return AnswerError(
        f"this transaction is {isolation.upper()}, and sees no change that is "
        "committed after its first statement, so it would wait in vain: wait before it "
        "begins, on a READ COMMITTED connection or with the app in the place of one"
    )
