"""The keys of two sides are compared, whatever versions they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs_lib.operating.verification import Difference, Versions, verify

if TYPE_CHECKING:
    from collections.abc import Collection


class Held:
    """A side with all its keys in one bucket."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    def digest(self) -> dict[int, tuple[int, int]]:
        """Digest the bucket."""
        return {7: (len(self._versions), hash(tuple(self._versions.items())))}

    def open(self, buckets: Collection[int]) -> dict[int, Versions]:
        """Return the keys."""
        return dict.fromkeys(buckets, self._versions)


@pytest.mark.parametrize("version", [-1, 0])
def test_a_key_of_one_side_is_found_whatever_its_version_is(version):
    has, lacks = Held({"k": version, "a": 1}), Held({"a": 1})
    missing = Difference("k", version, None, "missing")
    assert verify(has, lacks, pause=0) == [missing]
    left_over = Difference("k", None, version, "left over")
    assert verify(lacks, has, pause=0) == [left_over]
