"""Write the tables of events and metrics in docs/observe.md."""

from __future__ import annotations

import argparse
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.service.metrics import describe_all
from scripts.page import cell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PAGE = Path(__file__).parents[1] / "docs" / "observe.md"
EVENTS = ("Event", "Fields", "When")
METRICS = ("Metric", "Kind", "Labels", "What it is")


def main() -> int:
    """Write the tables, or check them with ``--check``."""
    parser = argparse.ArgumentParser(description="Write the tables of observe.md.")
    parser.add_argument("--check", action="store_true", help="only compare")
    found = PAGE.read_text(encoding="utf-8")
    wanted = replace(found, "events", EVENTS, read_events(telemetry.__doc__ or ""))
    wanted = replace(wanted, "metrics", METRICS, read_metrics())
    if parser.parse_args().check:
        if found != wanted:
            sys.stderr.write(f"{PAGE} is out of date: run `make docs`\n")
        return int(found != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


def replace(
    text: str, name: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]
) -> str:
    """Put a table between the marks of that name; return the new text."""
    lines = [head, ("---",) * len(head), *rows]
    table = "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)
    marks = re.compile(f"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return marks.sub(lambda found: f"{found[1]}{table}{found[2]}", text)


def read_events(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, fields and occasion of each event in the table of a docstring."""
    _, rule, rest = re.split(r"^( {4}-[- ]+)$", text, maxsplit=1, flags=re.MULTILINE)
    starts = [at + 1 for at, pair in enumerate(pairwise(rule)) if pair == (" ", "-")]
    rows: list[list[str]] = []
    for line in rest.strip("\n").partition("\n\n")[0].splitlines():
        ends = [*starts[1:], None]
        parts = [line[a:b].strip() for a, b in zip(starts, ends, strict=True)]
        if parts[0]:
            rows.append(parts)
        else:
            rows[-1] = [f"{a} {b}" for a, b in zip(rows[-1], parts, strict=True)]
    for name, fields, when in rows:
        yield quote([name]), quote(fields.split(",")), when.replace("``", "`")


def read_metrics() -> Iterator[tuple[str, ...]]:
    """Name, kind, labels and meaning of each metric."""
    for name, kind, labels, text in describe_all():
        yield quote([name]), kind, quote(labels), text


def quote(names: Iterable[str]) -> str:
    """The names as code."""
    return ", ".join(f"`{name.strip()}`" for name in names if name.strip())


if __name__ == "__main__":
    sys.exit(main())
