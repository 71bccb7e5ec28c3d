"""Files of keys and versions that cannot be read are refused, whatever is wrong."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from jobs_lib import OperatingError
from jobs_lib.operating.verification import FileSide

if TYPE_CHECKING:
    from pathlib import Path

HEAD = {"format": "jobs_lib keys 1"}
KEYS = [[n, 1, n * 7919, [[f"k{n}", 1]]] for n in range(3_000)]


def pack(*lines: object) -> bytes:
    """Make the content of a file."""
    return gzip.compress("".join(json.dumps(one) + "\n" for one in lines).encode())


WHOLE = pack(HEAD, *KEYS)


def test_a_whole_file_is_read(tmp_path: Path):
    file = tmp_path / "keys.gz"
    file.write_bytes(WHOLE)
    side = FileSide(file)
    assert side.digest()[7] == (1, 7 * 7919)
    assert side.open([7, 3_000]) == {7: {"k7": 1}, 3_000: {}}


@pytest.mark.parametrize(
    "content",
    [
        b"no keys",
        WHOLE[: len(WHOLE) // 2],
        WHOLE[:200] + bytes([WHOLE[200] ^ 0xFF]) + WHOLE[201:],
        pack({"format": "other"}),
        pack(HEAD, 5),
        pack(HEAD, [1, 2]),
        pack(HEAD, [1, 1, 7, 5]),
        pack(HEAD, [1, 1, 7, [5]]),
        b"",
    ],
    ids=[
        "other",
        "cut off",
        "flipped",
        "other format",
        "number",
        "short",
        "no keys",
        "no pairs",
        "empty",
    ],
)
def test_a_damaged_file_is_refused_with_the_command_that_writes_one(
    tmp_path: Path, content: bytes
):
    file = tmp_path / "keys.gz"
    file.write_bytes(content)
    with pytest.raises(OperatingError) as caught:
        FileSide(file)
    told = str(caught.value)
    assert "is no file of `jobs-lib readmodel keys`, or is damaged: " in told
    assert told.endswith(". Write it again")
