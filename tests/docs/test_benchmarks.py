"""The benchmarks of gates run as they stand: a gate that stays closed ends them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "command",
    [["benchmarks.gates"], ["benchmarks.consume", "--only", "gate"]],
    ids=lambda command: command[0],
)
def test_a_quick_benchmark_of_gates_gives_its_figures(command):
    done = subprocess.run(
        [sys.executable, "-m", *command, "--quick"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["gate_open_vs_none"] > 0
