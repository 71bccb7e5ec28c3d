"""The tests of the database run with a role that has only the rights of its kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROLE

HERE = Path(__file__).parents[2]
CHANGES_TOPICS = "test_an_apps_enqueues_and_transactions_share_its_connections"
FILES = {
    "service": [
        *(f"integration/test_{name}.py" for name in ("attempts", "rate")),
        *(f"ownership/test_{name}.py" for name in ("sharing", "repartition")),
        *(f"operating/test_{name}.py" for name in ("cancel", "discarded", "pauses")),
    ],
    # These test drivers, hooks and SQL.
    "enqueue": [
        *(f"integration/test_{name}.py" for name in ("enqueue_middleware", "callers")),
        *(f"integration/test_enqueue{name}.py" for name in ("", "_many", "_sql")),
        *(f"integration/test_send_{name}.py" for name in ("many", "sql")),
        f"--deselect=tests/integration/test_callers.py::{CHANGES_TOPICS}",
    ],
}
"""The files by kind. In every other file a reader lacks the rights for most tests."""


@pytest.mark.timeout(1_200)
@pytest.mark.slow
@pytest.mark.guarantee("FS10", "O8")
@pytest.mark.parametrize("kind", FILES)
def test_a_role_passes_the_tests_of_the_database_with_its_own_rights(kind):
    given = [one if one[0] == "-" else f"tests/{one}" for one in FILES[kind]]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *given],
        cwd=HERE,
        env={**os.environ, ROLE: kind},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4_000:]
