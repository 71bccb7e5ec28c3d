"""The demo, from the start to its summary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST_LINE = 10.0


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.guarantee("U1")
def test_the_demo_ends_with_facts_that_all_hold(tmp_path):
    begun = time.monotonic()
    demo = subprocess.Popen(
        [sys.executable, "-m", "examples.flights.demo"],
        cwd=tmp_path,  # its data, logs and report go to the working folder
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "FLIGHTS": "2000",
            # Other tests run beside it.
            "PATIENCE": "30",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert demo.stdout is not None
        first = demo.stdout.readline()
        assert "PostgreSQL and Kafka" in first
        assert time.monotonic() - begun < FIRST_LINE
        output, _ = demo.communicate(timeout=560)
    except BaseException:
        demo.send_signal(signal.SIGTERM)
        demo.wait(60)
        raise
    assert demo.returncode == 0, output
    report = json.loads((tmp_path / "build" / "demo.json").read_text())
    assert report["holds"]
    assert report["flights"] == 2_000
    assert len(report["facts"]) >= 12


@pytest.mark.parametrize(
    ("name", "text", "way_out"),
    [
        ("FLIGHTS", "many", "say all, or a number from 1000 on"),
        ("FLIGHTS", "²", "say all, or a number from 1000 on"),
        ("PATIENCE", "long", "say a whole number of seconds"),
        ("PATIENCE", "²", "say a whole number of seconds"),
    ],
)
def test_the_demo_refuses_a_number_that_is_none(tmp_path, name, text, way_out):
    demo = subprocess.run(
        [sys.executable, "-m", "examples.flights.demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), name: text},
        capture_output=True,
        text=True,
        check=False,
    )
    assert demo.returncode == 1
    assert demo.stderr == f"{name} is {text!r}: {way_out}\n"
    assert not [*tmp_path.iterdir()]
