"""Start the longest files and folders first, so that no process waits at the end.

Processes that share a run take it file by file. If one of them began a file of two
minutes when nothing is left for the others, all would wait for it. xdist starts files
with many tests first. By that order such a file comes late, since it has few tests.

The list is `long_tests` of `[tool.jobs_lib]` in pyproject.toml. The order of all other
files is random. A folder, with a slash at its end, goes to one process.
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    Item = TypeVar("Item", bound=pytest.Item)


def read_long(pyproject: Path) -> list[str]:
    """The paths of the longest files and folders from the project's root, in order."""
    tool = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]
    files: list[str] = tool["jobs_lib"]["long_tests"]
    return files


def start_long_first(items: Sequence[Item], long: list[str]) -> list[Item]:
    """The same tests: those of these paths first, the others in their given order."""

    def find_place(item: Item) -> int:
        places = (n for n, path in enumerate(long) if item.nodeid.startswith(path))
        return next(places, len(long))

    return sorted(items, key=find_place)


def read_folders(pyproject: Path) -> list[str]:
    """The folders among them: each goes to one process."""
    return [path for path in read_long(pyproject) if path.endswith("/")]
