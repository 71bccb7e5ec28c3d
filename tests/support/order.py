"""Start the longest files first, so that no process waits at the end.

Processes that share a run take it file by file. If one of them began a file of two
minutes when nothing is left for the others, all would wait for it. xdist starts files
with many tests first. By that order such a file comes late, since it has few tests.

The list is `long_tests` of `[tool.jobs_lib]` in pyproject.toml. The order of all other
files is random.
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    Item = TypeVar("Item", bound=pytest.Item)


def read_long_files(pyproject: Path) -> list[str]:
    """The paths of the longest files from the project's root, the longest first."""
    tool = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]
    files: list[str] = tool["jobs_lib"]["long_tests"]
    return files


def start_long_first(items: Sequence[Item], files: list[str]) -> list[Item]:
    """The same tests: those of these files first, the others in their given order."""
    places = {file: place for place, file in enumerate(files)}
    return sorted(
        items, key=lambda item: places.get(item.nodeid.split("::")[0], len(places))
    )
