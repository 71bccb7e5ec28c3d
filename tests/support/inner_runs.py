"""Run pytest in a folder of a test, apart from the run that the test belongs to."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.pages import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def run_pytest(
    folder: Path, *options: str, plugins: str
) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder with these plugins, and no others.

    The tests and their conftest.py may import from `tests.support`. The exit status is
    for the caller to check.
    """
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": plugins,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
