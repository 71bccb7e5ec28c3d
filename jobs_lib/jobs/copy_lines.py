"""Jobs as lines of COPY's text format, in blocks."""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from jobs_lib.jobs.options import PRIORITIES
from jobs_lib.postgres.values import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib.jobs.options import Options

_ROWS = 1_000


def copy_prefix(type_name: str) -> Callable[[str, str | None], bytes]:
    """Make the function that writes the columns before a payload."""

    @cache
    def prefix(origin: str, group: str | None) -> bytes:
        return f"{origin}\t{type_name}\t{escape(group)}\t".encode()

    return prefix


class OwnPlace(NamedTuple):
    """The place of a record that a job's row holds, as text."""

    source: str | None
    """The number of the group's partition."""
    record_offset: str | None


def copy_suffix(
    options: Options,
    state: str,
    run_at: str | None,
    headers: str | None,
    own: OwnPlace | None = None,
) -> bytes:
    """Write the columns after each payload of a call."""
    priority = PRIORITIES[options.priority]
    columns = f"\t{state}\t{escape(run_at)}\t{priority}\t{escape(headers)}"
    if own is not None:
        columns += f"\t{own.source}\t{own.record_offset}"
    return f"{columns}\n".encode()


def copy_blocks(
    prefixes: Iterator[bytes], payloads: list[bytes], suffix: bytes
) -> Iterator[bytes]:
    """Yield the lines in blocks, with most of the work done for a whole block."""
    remaining = iter(payloads)
    while some := list(islice(remaining, _ROWS)):
        # JSON has no raw tab or newline; backslashes are COPY's own escape.
        if b"\\" in b"".join(some):
            some = [payload.replace(b"\\", b"\\\\") for payload in some]
        # The payloads come first: zip must not take a prefix that it cannot use.
        lines = [
            prefix + payload for payload, prefix in zip(some, prefixes, strict=False)
        ]
        yield suffix.join([*lines, b""])
