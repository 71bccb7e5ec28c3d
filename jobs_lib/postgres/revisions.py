"""Where the migrations lie, and which there are.

A service reads that at its start. It must not load Alembic for it, which would keep
25 MB for as long as the service runs.
"""

from __future__ import annotations

from pathlib import Path

from jobs_lib.errors import SchemaVersionError


def migrations_path() -> Path:
    """The folder of the migrations: in the installed package, or in the repository."""
    package = Path(__file__).parents[1]
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def known_versions() -> list[str]:
    """The versions of the tables that this release knows, in their order.

    This release is made for the last one. Each file is called by its version.

    Raises:
        SchemaVersionError: the migrations are not installed.
    """
    folder = migrations_path()
    found = [one.stem for one in (folder / "versions").glob("[0-9]*.py")]
    if not found:
        raise SchemaVersionError(f"no migrations lie in {folder}")
    return sorted(found)
