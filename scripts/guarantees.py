"""Write docs/guarantees.md: what holds, and the tests that show it.

The sentences are in docs/guarantees.toml. A test names the ids that it shows with
`@pytest.mark.guarantee("S9", "I8")` on its function: four at most, so that a name means
something.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from scripts import page

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MOST_IDS = 4

SOURCE = "docs/guarantees.toml and the marks of the tests"

HEAD = """# Guarantees

What holds, and the tests that show it. `make test` runs them all but those marked
`slow`, which `make test-all` runs too.
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    """Write the page, or check it; name what is wrong with the marks."""
    with (DOCS / "guarantees.toml").open("rb") as file:
        areas = tomllib.load(file)
    known = {one for area in areas.values() for one in area["sentences"]}
    shown: defaultdict[str, list[tuple[Path, str]]] = defaultdict(list)
    wrong = []
    for path, function, ids in marks(ROOT / "tests"):
        place = f"{path.relative_to(ROOT)}:{function.lineno}: {function.name}"
        if len(ids) > MOST_IDS:
            wrong.append(f"{place} names {len(ids)} guarantees, {MOST_IDS} at most")
        wrong += [
            f"{place} names {one!r}: no such id" for one in ids if one not in known
        ]
        for one in ids:
            shown[one].append((path, function.name))
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    text = HEAD + "".join(sections(areas, shown))
    return page.main(DOCS / "guarantees.md", SOURCE, text)


def marks(tests: Path) -> Iterator[tuple[Path, Function, list[str]]]:
    """Each marked test with the ids that it names."""
    for path in sorted(tests.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for node in ast.walk(tree):
            if isinstance(node, Function) and (ids := named(node)):
                yield path, node, ids


def named(function: Function) -> list[str]:
    """The ids on a test's own decorators."""
    return [
        str(argument.value)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Attribute)
        and decorator.func.attr == "guarantee"
        for argument in decorator.args
        if isinstance(argument, ast.Constant)
    ]


def sections(
    areas: dict[str, dict[str, dict[str, str]]],
    shown: dict[str, list[tuple[Path, str]]],
) -> Iterator[str]:
    """A table for each area of which a test shows something."""
    for area in areas.values():
        rows = {one: text for one, text in area["sentences"].items() if one in shown}
        if not rows:
            continue
        yield f"\n## {area['title']}\n\n"
        yield "| Id | Guarantee | Shown by |\n| --- | --- | --- |\n"
        for one, sentence in rows.items():
            tests = dict.fromkeys(link(*test) for test in shown[one])
            yield f"| {one} | {page.cell(sentence)} | {'<br>'.join(tests)} |\n"


def link(path: Path, function: str) -> str:
    """A test as a link; without its line, which changes with every edit."""
    sentence = function.removeprefix("test_").replace("_", " ")
    return f"[{sentence}](../{path.relative_to(ROOT).as_posix()})"


if __name__ == "__main__":
    sys.exit(main())
