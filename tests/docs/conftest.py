"""What tests of installed packages share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder]
    subprocess.run([*build, ROOT], check=True)
    (built,) = folder.glob("jobs_lib-*.whl")
    return Path(built)
