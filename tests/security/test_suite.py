"""The tests of the database, with a service that has the rights of its kind only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROLE

HERE = Path(__file__).parents[2]
FILES = [
    *(f"integration/test_{name}.py" for name in ("attempts", "rate")),
    *(f"ownership/test_{name}.py" for name in ("sharing", "repartition")),
    *(f"operating/test_{name}.py" for name in ("cancel", "discarded", "pauses")),
]


@pytest.mark.timeout(1_200)
@pytest.mark.slow
@pytest.mark.guarantee("FS10", "O8")
def test_a_service_passes_the_tests_of_the_database_with_its_own_rights():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(f"tests/{name}" for name in FILES)],
        cwd=HERE,
        env={**os.environ, ROLE: "service"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4_000:]
