"""Write a generated page, or check that it is up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Generated: edit {source} and run `make docs`. -->\n\n"


def main(page: Path, source: str, text: str) -> int:
    """Write the page, or compare it if ``--check`` is given; return the exit status."""
    parser = argparse.ArgumentParser(description=f"Write {page.name} from {source}.")
    parser.add_argument("--check", action="store_true", help="only compare")
    wanted = NOTE.format(source=source) + text
    if parser.parse_args().check:
        if not page.exists() or page.read_text(encoding="utf-8") != wanted:
            sys.stderr.write(f"{page} is out of date: run `make docs`\n")
            return 1
        return 0
    page.write_text(wanted, encoding="utf-8")
    return 0


def cell(text: str) -> str:
    """The text as one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
