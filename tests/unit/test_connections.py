"""Connections are opened only where their isolation level is handled."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPENS = re.compile(
    r"psycopg\.(?:\w+\.)?connect\(|\w*Session\.connect\(|\w*ConnectionPool\("
    r"|create_(?:async_)?engine\("
)
KNOWN = {
    "jobs_lib/postgres/database.py": "settles the isolation of each",
    "jobs_lib/callers/pools.py": "the same, for the application's own pool",
    "jobs_lib/postgres/migrate.py": "migrations, whose engine names the isolation",
    "jobs_lib/testing/jobs.py": "the same as in db.py",
    "jobs_lib/testing/databases.py": "makes and drops databases",
    "jobs_lib/devstack/postgres.py": "makes roles and databases",
    "jobs_lib/devstack/external.py": "asks whether a server answers",
}


def test_the_database_is_opened_in_known_places_only():
    found = {
        str(path.relative_to(ROOT))
        for folder in ("jobs_lib", "spark_bridge", "migrations")
        for path in (ROOT / folder).rglob("*.py")
        if OPENS.search(path.read_text(encoding="utf-8"))
    }
    assert found == KNOWN.keys()
