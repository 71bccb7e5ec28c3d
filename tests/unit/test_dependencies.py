"""pyproject declares every package that the library imports, some in an extra."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest

from jobs_lib import extras

ROOT = Path(__file__).parents[2]
FOLDERS = ("jobs_lib", "spark_bridge", "migrations")
OURS = {"jobs_lib", "spark_bridge"}
NAMES = {"opentelemetry": "opentelemetry-api"}
"""Packages whose name differs from the name of their module."""
ALONE = (
    "jobs_lib/cli/coordination.py",
    "jobs_lib/coordination/",
    "jobs_lib/kafka/",
    "jobs_lib/operating/coordination/",
)
"""What works without the extra ``postgres``, which all other files may use."""
EXTRAS = {
    "jobs_lib/devstack": {"devstack"},
    "jobs_lib/django.py": {"django"},
    "jobs_lib/schemas": {"avro"},
    "jobs_lib/jobs/context.py": {"otel"},
    "jobs_lib/service/metrics.py": {"metrics"},
    "jobs_lib/telemetry/metrics.py": {"metrics"},
    "jobs_lib/testing": {"testing"},
    "jobs_lib/web": {"web"},
    "spark_bridge": {"spark"},
}
"""The extras that a folder or file may use beyond the required packages."""
DRIVERS = {"alembic", "psycopg", "psycopg_pool", "sqlalchemy"}
OF_OURS = re.compile(r"jobs-lib\[([\w,]+)\]")

with (ROOT / "pyproject.toml").open("rb") as opened:
    PROJECT = tomllib.load(opened)["project"]


def packages(requirements: list[str]) -> set[str]:
    """Return the names of required packages, as an import spells them."""
    found = {re.split(r"[\[<>=!~; ]", one)[0] for one in requirements}
    return {name.lower().replace("-", "_") for name in found}


def expand(extra: str) -> set[str]:
    """Return the packages of an extra, with those of the extras that it includes."""
    found: set[str] = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        if included := OF_OURS.fullmatch(requirement):
            for one in included[1].split(","):
                found |= expand(one)
        else:
            found |= packages([requirement])
    return found


def find_imports(source: str) -> set[str]:
    """The third-party packages that a module imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - OURS


FILES = sorted(
    file.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for file in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_everything_that_is_imported_is_declared(folder):
    missing = {}
    for file in FILES:
        if not file.startswith(f"{folder}/"):
            continue
        known = packages(PROJECT["dependencies"])
        if not file.startswith(ALONE):
            known |= expand("postgres")
        for place, used in EXTRAS.items():
            if f"{file}/".startswith(f"{place}/"):
                for extra in used:
                    known |= expand(extra)
        found = find_imports((ROOT / file).read_text(encoding="utf-8"))
        wanted = {NAMES.get(one, one).replace("-", "_") for one in found}
        if undeclared := wanted - known:
            missing[file] = undeclared
    assert not missing


def test_imports_are_found_inside_functions_too():
    source = "import os, numpy.linalg\ndef f():\n    from rich.table import Table\n"
    assert find_imports(source) == {"numpy", "rich"}
    assert find_imports("from . import a\nfrom jobs_lib import App\n") == set()


def test_an_app_depends_on_psycopg_without_a_bundled_libpq():
    wanted = PROJECT["optional-dependencies"]["postgres"]
    of_psycopg = [one for one in wanted if one.startswith("psycopg")]
    assert of_psycopg
    assert not [one for one in of_psycopg if "[" in one or "binary" in one]


def test_only_coordination_is_installed_without_a_driver():
    assert not DRIVERS & packages(PROJECT["dependencies"])
    assert expand("postgres") == DRIVERS == set(extras.DRIVERS)
    without = {
        extra
        for extra in PROJECT["optional-dependencies"]
        if not expand(extra) >= DRIVERS
    }
    assert without == {"coordination"}


def test_the_extra_of_coordination_names_what_its_modules_import():
    found: set[str] = set()
    for file in FILES:
        if file.startswith("jobs_lib/coordination/"):
            found |= find_imports((ROOT / file).read_text(encoding="utf-8"))
    assert expand("coordination") == found
    assert found <= packages(PROJECT["dependencies"])


def test_each_package_has_one_lowest_version():
    lowest = defaultdict(set)
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in chain.from_iterable(groups):
        if found := re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\d.]+)", requirement):
            lowest[found[1]].add(found[2])
    # Only the highest bound is tested: a lower one would be an untested promise.
    assert {name: of for name, of in lowest.items() if len(of) > 1} == {}
