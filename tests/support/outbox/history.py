"""The rows that were committed to the outbox, in the order of their commits.

PostgreSQL returns them by logical decoding. Its plugin `pgoutput` gives the length of
each column, so no value can be mistaken for another one, and the place of each
transaction in the log.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

_AT_ONCE = 20_000
# The microseconds count from 2000-01-01; this is that day in seconds since 1970.
_EPOCH = 946_684_800


@dataclass(frozen=True)
class Row:
    """A committed row of the outbox."""

    id: int
    topic: str
    key: str | None
    value: bytes | None
    version: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    entity: str | None = None
    """The entity whose state the relay reads; the value is unknown here."""
    shard: int = 0
    at: float = 0.0
    """The time of its commit, in seconds."""
    lsn: int = 0
    """The place in the log where its transaction ends: the order of commits."""
    xid: int = 0


class Slot:
    """Reads every insert into the outbox that is committed after the slot was made."""

    def __init__(self, url: str, schema: str = "jobs_lib") -> None:
        self._url = url
        self._name = f"judge_{uuid4().hex[:12]}"
        self._seen = 0
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                f"create publication {self._name} for table {schema}.outbox"
                " with (publish = 'insert')"
            )
            connection.execute(
                "select pg_create_logical_replication_slot(%s, 'pgoutput')",
                (self._name,),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("select pg_drop_replication_slot(%s)", (self._name,))

    def read(self) -> list[Row]:
        """Read the rows since the last call; each comes once, even after a crash."""
        rows: list[Row] = []
        with psycopg.connect(self._url, autocommit=True) as connection:
            while True:
                changes = connection.execute(
                    "select data from pg_logical_slot_get_binary_changes("
                    "%s, null, %s, 'proto_version', '1', 'publication_names', %s)",
                    (self._name, _AT_ONCE, self._name),
                ).fetchall()
                if not changes:
                    return rows
                # After a crash a slot repeats all rows since a checkpoint.
                found = [r for r in decode(d for (d,) in changes) if r.lsn > self._seen]
                rows += found
                self._seen = max([self._seen, *(row.lsn for row in found)])


def decode(messages: Iterator[bytes]) -> Iterator[Row]:
    """Decode the rows in messages of `pgoutput`."""
    names: dict[int, list[str]] = {}
    lsn = xid = 0
    at = 0.0
    for message in messages:
        kind, rest = message[:1], _Bytes(message[1:])
        if kind == b"B":
            lsn, microseconds, xid = rest.take(">QqI")
            at = microseconds / 1e6 + _EPOCH
        elif kind == b"R":
            (relation,) = rest.take(">I")
            names[relation] = _read_columns(rest)
        elif kind == b"I":
            relation, _ = rest.take(">Ic")
            columns = dict(zip(names[relation], _read_values(rest), strict=True))
            yield _make_row(columns, at=at, lsn=lsn, xid=xid)


def _make_row(columns: dict[str, bytes | None], **place: Any) -> Row:
    text = {
        name: None if value is None else value.decode()
        for name, value in columns.items()
    }
    value, headers, version = text["value"], text["headers"], text["version"]
    return Row(
        id=int(text["id"] or ""),
        topic=text["topic"] or "",
        key=text["key"],
        # The server writes bytes as \x and two digits for each.
        value=None if value is None else bytes.fromhex(value[2:]),
        version=None if version is None else int(version),
        headers=json.loads(headers) if headers else {},
        entity=text["entity"],
        shard=int(text["shard"] or ""),
        **place,
    )


def _read_columns(rest: _Bytes) -> list[str]:
    rest.text()
    rest.text()
    _, count = rest.take(">cH")
    columns = []
    for _ in range(count):
        rest.take(">B")
        columns.append(rest.text())
        rest.take(">Ii")
    return columns


def _read_values(rest: _Bytes) -> list[bytes | None]:
    (count,) = rest.take(">H")
    values: list[bytes | None] = []
    for _ in range(count):
        (kind,) = rest.take(">c")
        # "u" is a large value that did not change; an insert has none.
        assert kind in (b"n", b"t"), kind
        values.append(None if kind == b"n" else rest.bytes(*rest.take(">I")))
    return values


class _Bytes:
    """A message that is read from its start."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return found

    def bytes(self, length: int) -> bytes:
        self._at += length
        return self._data[self._at - length : self._at]

    def text(self) -> str:
        end = self._data.index(b"\0", self._at)
        found = self._data[self._at : end].decode()
        self._at = end + 1
        return found
