"""Finds states that are sent before their entity is locked.

A state that was read without a lock may be old by the time it is sent: another
transaction changes the entity and sends the newer state first, and the older one stays
the last of its key for good. The lock of the key at ``send`` comes too late for that.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from jobs_lib.callers import Fetch
from jobs_lib.outbox.topic import Topic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jobs_lib.callers import Steps
    from jobs_lib.outbox.bulk import Row

_write = Topic._write
_write_many = Topic._write_many


@contextmanager
def check_locks() -> Iterator[None]:
    """Fail each ``send`` in a transaction that has not locked the entity's table."""
    with (
        patch.object(Topic, "_write", _write_checked),
        patch.object(Topic, "_write_many", _write_many_checked),
    ):
        yield


def _write_checked(
    topic: Topic[Any],
    key: str | None,
    value: bytes | None,
    version: int | None,
    headers: Mapping[str, str] | None,
) -> Steps[int]:
    yield from _refuse_unlocked(topic, key)
    return (yield from _write(topic, key, value, version, headers))


def _write_many_checked(
    topic: Topic[Any], rows: list[Row], headers: Mapping[str, str] | None
) -> Steps[int]:
    if rows:
        yield from _refuse_unlocked(topic, rows[0].key)
    return (yield from _write_many(topic, rows, headers))


def _refuse_unlocked(topic: Topic[Any], key: str | None) -> Steps[None]:
    for table in topic.sources:
        rows = yield Fetch(topic._statements["kit_locks"], {"table": table})
        if rows and rows[0][0] == "no":
            raise AssertionError(
                f"a record of {topic.name!r} with the key {key!r} is sent by a "
                f"transaction that has locked no row of {table}: what it has read may "
                "be old. Change the row first, read it `for update`, or use "
                "send_current. (The pytest option jobs_lib_check_locks = false turns "
                "this off.)"
            )
