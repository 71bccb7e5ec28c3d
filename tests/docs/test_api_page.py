"""The page of the public API names all exports of the modules; pages use no others."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib

import pytest

from tests.support.pages import ROOT, read_blocks

PAGE = "docs/api.md"
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
)


def read_names() -> dict[str, set[str]]:
    """The names that the page lists, by module."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    table = text.split("<!-- names -->")[1].split("<!-- /names -->")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", table, re.MULTILINE)
    return {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}


def find_imports(page: str) -> set[tuple[str, str]]:
    """Return the modules and names of the library that a page's code imports."""
    found: set[tuple[str, str]] = set()
    for block in read_blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
                found |= {(node.module or "", alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(a.name, "") for a in node.names if is_ours(a.name)}
    return found


def is_ours(module: str) -> bool:
    return module.split(".")[0] in {"jobs_lib", "spark_bridge"}


@pytest.mark.guarantee("U5")
@pytest.mark.parametrize("module", sorted(read_names()))
def test_the_page_names_what_a_module_exports(module):
    names = read_names()[module]
    imported = importlib.import_module(module)
    if hasattr(imported, "__all__"):
        assert names == set(imported.__all__)
    for name in names - {"__version__"}:
        exported = getattr(imported, name)
        if callable(exported):
            assert inspect.getdoc(exported), name


@pytest.mark.parametrize("page", PAGES)
def test_a_page_imports_only_what_is_public(page):
    public = read_names()
    for module, name in find_imports(page):
        whole = f"{module}.{name}"
        assert name in public.get(module, set()) or whole in public, whole


def test_the_page_lists_all_extras():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    table = text.split("<!-- extras -->")[1].split("<!-- /extras -->")[0]
    with (ROOT / "pyproject.toml").open("rb") as opened:
        extras = tomllib.load(opened)["project"]["optional-dependencies"]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    # That one is for this project's own tests.
    assert {*listed} == extras.keys() - {"dev"}
