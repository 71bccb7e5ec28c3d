"""Write docs/guarantees.md: the guarantees, and the tests that show them.

The sentences are in docs/guarantees.toml. A test names the ids that it shows with
`@pytest.mark.guarantee("S9", "I8")` on its function. It names at most four, so that
each name means something.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from scripts import page

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MOST_IDS = 4

SOURCE = "docs/guarantees.toml and the marks of the tests"

HEAD = """# Guarantees

This page lists what holds, with the tests that show it. `make test` leaves out tests
marked *slow*; `make test-all` runs them too. A test with another mark is skipped
where the mark is true.
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Shown(NamedTuple):
    """A test that names guarantees."""

    path: Path
    function: Function
    ids: list[str]
    unless: str
    """Why the everyday tests may leave it out; empty if they always run it."""


def main() -> int:
    """Write the page, or check it with ``--check``; print each wrong mark."""
    with (DOCS / "guarantees.toml").open("rb") as file:
        areas = tomllib.load(file)
    known = {one for area in areas.values() for one in area["sentences"]}
    shown: defaultdict[str, list[Shown]] = defaultdict(list)
    wrong = []
    for test in marks(ROOT / "tests"):
        path, function, ids, _ = test
        place = f"{path.relative_to(ROOT)}:{function.lineno}: {function.name}"
        if len(ids) > MOST_IDS:
            wrong.append(f"{place} names {len(ids)} guarantees, {MOST_IDS} at most")
        wrong += [
            f"{place} names {one!r}: no such id" for one in ids if one not in known
        ]
        for one in ids:
            shown[one].append(test)
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    text = HEAD + left_out(shown) + "".join(sections(areas, shown))
    return page.main(DOCS / "guarantees.md", SOURCE, text)


def marks(tests: Path) -> Iterator[Shown]:
    """Each test that names guarantees, in the files below a folder."""
    for path in sorted(tests.rglob("test_*.py")):
        tree = parse(path)
        variables = imported(tree, tests.parent) | assigned(tree)
        for node in ast.walk(tree):
            if isinstance(node, Function) and (ids := named(node)):
                yield Shown(path, node, ids, unless(node, variables))


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """The names that a module assigns, with their expressions."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@cache
def assigned_in(path: Path) -> dict[str, ast.expr]:
    """The same of a module that many tests import."""
    return assigned(parse(path))


def imported(tree: ast.Module, root: Path) -> dict[str, ast.expr]:
    """The names that a module imports from the tests' own, with their expressions."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            path = root / f"{node.module.replace('.', '/')}.py"
            if node.module.startswith("tests.") and path.is_file():
                known = assigned_in(path)
                names = {alias.name: alias.asname or alias.name for alias in node.names}
                found |= {names[one]: known[one] for one in names if one in known}
    return found


def unless(function: Function, variables: Mapping[str, ast.expr]) -> str:
    """Why the everyday tests may leave a test out: it is slow, or may be skipped."""
    found = [*function.decorator_list]
    if "pytestmark" in variables:
        found.append(variables["pytestmark"])
    for mark in found:
        if isinstance(mark, ast.Name):
            mark = variables.get(mark.id, mark)
        if isinstance(mark, ast.Attribute) and mark.attr == "slow":
            return "slow"
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith(".skipif"):
            return next(
                str(ast.literal_eval(word.value))
                for word in mark.keywords
                if word.arg == "reason"
            )
    return ""


def left_out(shown: dict[str, list[Shown]]) -> str:
    """The guarantees shown only by tests that the everyday run may leave out."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for one, tests in shown.items():
        if all(test.unless for test in tests):
            for reason in sorted({test.unless for test in tests}):
                reasons[reason].append(one)
    return "".join(
        f"\nShown only by tests with the mark *{reason}*: "
        f"{', '.join(sorted(ids, key=by_number))}.\n"
        for reason, ids in sorted(reasons.items())
    )


def by_number(one: str) -> tuple[str, int]:
    """A key that sorts S9 before S10."""
    letters = one.rstrip("0123456789")
    return letters, int(one[len(letters) :])


def named(function: Function) -> list[str]:
    """The ids that a test's own decorators name."""
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
    shown: dict[str, list[Shown]],
) -> Iterator[str]:
    """A table for each area with a guarantee that a test shows."""
    for area in areas.values():
        rows = {one: text for one, text in area["sentences"].items() if one in shown}
        if not rows:
            continue
        yield f"\n## {area['title']}\n\n"
        yield "| Id | Guarantee | Shown by |\n| --- | --- | --- |\n"
        for one, sentence in rows.items():
            tests = dict.fromkeys(link(test) for test in shown[one])
            yield f"| {one} | {page.cell(sentence)} | {'<br>'.join(tests)} |\n"


def link(test: Shown) -> str:
    """A link to a test's file, without the line, which changes with every edit."""
    sentence = test.function.name.removeprefix("test_").replace("_", " ")
    place = test.path.relative_to(ROOT).as_posix()
    return f"[{sentence}](../{place})" + f" *{test.unless}*" * bool(test.unless)


if __name__ == "__main__":
    sys.exit(main())
