"""The demo of the payments, with all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.guarantee("K1", "K21", "I29", "I30")
def test_no_call_meets_missing_data_while_the_services_fail_by_turns(tmp_path):
    demo = subprocess.Popen(
        [sys.executable, "-m", "examples.payments.demo", "--payments", "all"],
        cwd=tmp_path,  # its data, logs and report go to the working folder
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = demo.communicate(timeout=1_700)
    except BaseException:
        demo.send_signal(signal.SIGTERM)
        demo.wait(60)
        raise
    assert demo.returncode == 0, output
    report = json.loads((tmp_path / "build" / "payments.json").read_text())
    assert report["holds"]
    assert report["payments"] == 336_776
    assert len(report["turns"]) == 10
