"""A fresh clone needs an empty home, Python and make, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.guarantee("U2")
def test_make_test_needs_python_and_make_only(tmp_path):
    clone, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        # The machine decides how pip reaches its index.
        if name.startswith("PIP_")
    }
    done = subprocess.run(
        ["make", "test", f"PYTHON={sys._base_executable}"],  # type: ignore[attr-defined]
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
        env={
            **kept,
            "HOME": str(home),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            # Continuous integration runs all tests; here it is enough that the run
            # works. It is made twice if an older PostgreSQL is installed, which may
            # choose other plans.
            "PYTEST_ADDOPTS": "tests/unit --deselect=tests/integration",
        },
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    assert (clone / "build" / "junit.xml").is_file()
    assert " passed in " in done.stdout.splitlines()[-1]
