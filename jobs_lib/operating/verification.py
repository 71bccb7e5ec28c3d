"""Find out whether a read model has the keys and versions of its source.

Each side digests its rows by buckets of the key's hash, in its own database. Only the
buckets that differ are opened, so that little goes from one side to the other.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import psycopg
from psycopg import sql

from jobs_lib.errors import OperatingError
from jobs_lib.postgres.values import identify

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.postgres.database import Database

BUCKETS = 4_096
_AGAIN_SECONDS = 5.0
_FORMAT = "jobs_lib keys 1"


class _NoKey(Enum):
    """What a side has of a key that it lacks."""

    NO_KEY = "no key"


_NO_KEY: Final = _NoKey.NO_KEY
"""Differs from every version, and from a key without one."""
_Found = int | None | Literal[_NoKey.NO_KEY]

Versions = dict[str, int | None]
"""The version of each key."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key with another version on either side."""

    key: str
    source: int | None
    """The source's version; None if it has no such key, or no version of it."""
    model: int | None
    """The read model's, likewise."""
    what: str
    """``missing``, ``left over``, ``older`` or ``newer``: what the read model's is."""


class Side(Protocol):
    """The keys and versions of one table."""

    def digest(self) -> dict[int, tuple[int, int]]:
        """Digest each bucket that has keys: their number, and a digest."""

    def open(self, buckets: Collection[int]) -> dict[int, Versions]:
        """Read the keys of some buckets."""


class TableSide:
    """A table or view in a database.

    Args:
        database: with the table.
        rows: a query that gives the columns key and version.
    """

    def __init__(self, database: Database, rows: sql.Composable) -> None:
        self._database = database
        self._rows = rows

    @classmethod
    def of(cls, database: Database, table: str, key: str, version: str) -> TableSide:
        """The side of a table with a column for the version."""
        rows = sql.SQL("select {}::text as key, {}::bigint as version from {}").format(
            sql.Identifier(key),
            sql.Identifier(version),
            identify(table),
        )
        return cls(database, rows)

    @classmethod
    def of_model(cls, database: Database, declared: Subscription) -> TableSide:
        """The side of a read model."""
        assert declared.model is not None
        return cls(database, declared.model.list_keys())

    def digest(self) -> dict[int, tuple[int, int]]:
        """See :class:`Side`."""
        rows = self._ask("digest_buckets", {})
        _refuse_nulls({bucket: count for bucket, count, _ in rows})
        return {bucket: (count, digest) for bucket, count, digest in rows}

    def open(self, buckets: Collection[int]) -> dict[int, Versions]:
        """See :class:`Side`."""
        found: dict[int, Versions] = {bucket: {} for bucket in buckets}
        for bucket, key, version in self._ask("open_buckets", {"opened": [*buckets]}):
            if key in found[bucket]:
                raise _refuse_repeats()
            found[bucket][key] = version
        return found

    def list_buckets(self) -> list[tuple[int, int, int, list[tuple[str, int | None]]]]:
        """List all buckets: number, size, digest, and keys with their versions."""
        rows = self._ask("list_buckets", {})
        _refuse_nulls({bucket: count for bucket, count, *_ in rows})
        if any(len(dict(keys)) < count for _, count, _, keys in rows):
            raise _refuse_repeats()
        return rows

    def _ask(self, template: str, given: dict[str, Any]) -> list[tuple[Any, ...]]:
        statement = self._database.queries.fill(template, rows=self._rows)
        try:
            with self._database.connect("verify") as connection:
                cursor = connection.execute(statement, {**given, "buckets": BUCKETS})
                return cursor.fetchall()
        except (psycopg.ProgrammingError, psycopg.DataError) as error:
            raise _refuse(error) from None


class FileSide:
    """The keys and versions that the other side has written into a file."""

    def __init__(self, path: Path) -> None:
        """Read a file of :func:`write_keys`.

        Raises:
            OperatingError: it is none, or is damaged.
        """
        try:
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                if json.loads(next(lines, "null")) != {"format": _FORMAT}:
                    raise ValueError("it begins otherwise")
                self._buckets: dict[int, tuple[int, int, Versions]] = {
                    bucket: (count, digest, dict(keys))
                    for bucket, count, digest, keys in map(json.loads, lines)
                }
        except (OSError, EOFError, zlib.error, TypeError, ValueError) as error:
            raise OperatingError(
                f"{path} is no file of `jobs-lib readmodel keys`, or is damaged: "
                f"{error}. Write it again"
            ) from None

    def digest(self) -> dict[int, tuple[int, int]]:
        """See :class:`Side`."""
        _refuse_nulls({bucket: count for bucket, (count, *_) in self._buckets.items()})
        return {
            bucket: (count, digest)
            for bucket, (count, digest, _) in self._buckets.items()
        }

    def open(self, buckets: Collection[int]) -> dict[int, Versions]:
        """See :class:`Side`."""
        return {
            bucket: self._buckets[bucket][2] if bucket in self._buckets else {}
            for bucket in buckets
        }


def write_keys(side: TableSide, path: Path) -> int:
    """Write the keys of a side into a file for the other side; returns their number.

    Raises:
        OperatingError: the table has not these columns, or a key that is NULL or has
            several rows, or the file cannot be written.
    """
    with _writing(path):
        # Before the table is read, which may take long. What is there stays until then.
        path.open("ab").close()
    buckets = side.list_buckets()
    with _writing(path), gzip.open(path, "wt", encoding="utf-8") as lines:
        lines.write(json.dumps({"format": _FORMAT}) + "\n")
        for bucket in buckets:
            lines.write(json.dumps(bucket) + "\n")
    return sum(count for _, count, *_ in buckets)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OperatingError(
            f"{path} cannot be written: {error.strerror or error}. Name a file in a "
            "folder that is there and has room"
        ) from None


def verify(
    source: Side, model: Side, *, pause: float = _AGAIN_SECONDS
) -> list[Difference]:
    """Find the keys whose versions differ, by key.

    Changes are on their way all the time, so it asks twice: a key differs if it does so
    both times, and the read model has not moved meanwhile.

    Args:
        source: of the owner.
        model: the read model.
        pause: seconds between the two questions.

    Raises:
        OperatingError: a table has not these columns, or a key that is NULL or has
            several rows.
        UnavailableError: a database does not answer.
    """
    first = _compare(source, model)
    if not first:
        return []
    time.sleep(pause)
    second = _compare(source, model)
    return [
        _tell(key, *versions)
        for key, versions in sorted(second.items())
        if key in first and first[key][1] == versions[1]
    ]


def _compare(source: Side, model: Side) -> dict[str, tuple[_Found, _Found]]:
    ours, theirs = model.digest(), source.digest()
    differ = [
        bucket for bucket in ours | theirs if ours.get(bucket) != theirs.get(bucket)
    ]
    if not differ:
        return {}
    opened, others = model.open(differ), source.open(differ)
    found = {}
    for bucket in differ:
        has, wants = opened[bucket], others[bucket]
        for key in has.keys() | wants.keys():
            versions = wants.get(key, _NO_KEY), has.get(key, _NO_KEY)
            if versions[0] != versions[1]:
                found[key] = versions
    return found


def _tell(key: str, source: _Found, model: _Found) -> Difference:
    """Tell how the sides differ in a key."""
    if model is _NO_KEY:
        return Difference(key, None if source is _NO_KEY else source, None, "missing")
    if source is _NO_KEY:
        return Difference(key, None, model, "left over")
    # Every version is newer than none.
    is_older = model is None or (source is not None and model < source)
    return Difference(key, source, model, "older" if is_older else "newer")


def _refuse_nulls(counts: Mapping[int | None, int]) -> None:
    """Refuse rows that are in no bucket: nobody could name them."""
    if count := counts.get(None):
        raise OperatingError(
            f"{count} rows have NULL as their key, which names nothing: give a column "
            "with --key that is never NULL, or a view with --table that leaves these "
            "rows out"
        )


def _refuse_repeats() -> OperatingError:
    return OperatingError(
        "several rows have the same key, so that nobody knows which version it has: "
        "give a column with --key that is unique, or a view with --table that has each "
        "key once"
    )


def _refuse(error: psycopg.Error) -> OperatingError:
    return OperatingError(
        f"the keys and versions cannot be read: {error.diag.message_primary or error}. "
        "Name a table or view with --table, and its columns with --key and --version"
    )
