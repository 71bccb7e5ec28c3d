"""The library opens its database in one way, so that every setting applies."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("jobs_lib", "spark_bridge", "migrations")
MAKES = {"Database", "jobs_lib.postgres.database.Database", "db.Database"}
ALLOWED = {
    # Spark's tasks have no settings, only what `Database.of` made in another process.
    "spark_bridge/loader.py",
}


def find_made(source: str) -> list[int]:
    """The lines that make a database from its URL, and not from the settings."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKES
    ]


def test_the_library_makes_its_database_of_the_settings_alone():
    found = {
        f"{file.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if str(file.relative_to(ROOT)) not in ALLOWED
        for line in find_made(file.read_text(encoding="utf-8"))
    }
    assert not found, "use Database.of(settings)"


def test_a_database_made_by_its_url_is_found():
    assert find_made("a = Database.of(settings)\nb = Database(url, schema)\n") == [2]
