"""Run the code in the pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read_blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language; ``page`` is a path from the root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def write_modules(page: str, folder: Path) -> list[str]:
    """Write the blocks that start with ``# name.py`` into a folder; return them."""
    written = []
    for block in read_blocks(page, "python"):
        if match := re.match(r"# (\w+\.py)\n", block):
            (folder / match[1]).write_text(block, encoding="utf-8")
            written.append(match[1])
    return written
