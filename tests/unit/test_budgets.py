"""The CPU time of tests is added up by folder; the longest files come first."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

from tests.support.budgets import read_cpu
from tests.support.inner_runs import run_pytest
from tests.support.order import read_long, start_long_first
from tests.support.pages import ROOT

BURN = "import time\nwhile time.process_time() < {}: pass\n{}"
CONFIGURATION = """
from tests.support.budgets import Budgets

def pytest_configure(config):
    config.addinivalue_line("markers", "slow")
    config.pluginmanager.register(Budgets({"burns": 0.1}))
"""
TESTS = {
    "burns/test_children.py": """
import subprocess, sys

def test_burns():
    code = "import time\\nwhile time.process_time() < 0.8: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
""",
    "slow/test_marked.py": """
import pytest, time

@pytest.mark.slow
def test_is_not_counted():
    until = time.process_time() + 0.8
    while time.process_time() < until: pass
""",
    "slow/test_other.py": """
def test_counts(): ...
""",
    "waits/test_waiting.py": """
import threading

def test_waits():
    threading.Event().wait(0.3)
""",
}


def test_the_cpu_of_a_child_process_counts_during_and_after_its_run(wait_for):
    # A child of the child. Others of this process may end meanwhile, and take theirs.
    # It burns more than is looked for: the system counts in ticks, and rounds down.
    inner = [sys.executable, "-c", BURN.format(0.5, "input()")]
    outer = f"import subprocess; subprocess.run({inner!r}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin
        assert child.stdout
        below = read_cpu(child.pid)
        wait_for(lambda: read_cpu(child.pid) > 0.3, timeout=60, what="it is seen")
        assert below < read_cpu(child.pid) <= read_cpu()
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"\n"
        assert read_cpu(child.pid) > 0.3
        child.stdin.write(b"\n")


def test_a_report_shows_the_cpu_of_each_folders_everyday_tests(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFIGURATION, encoding="utf-8")
    for name, text in TESTS.items():
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    shared = ("-n", "2", "--dist", "loadfile")
    done = run_pytest(tmp_path, *shared, "tests", plugins="xdist.plugin")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^(\w+) +([\d.]+) of +\d+(.*)$", done.stdout, re.MULTILINE)
    told = {folder: float(seconds) for folder, seconds, _ in lines}
    assert {*told} == {"burns", "slow", "waits"}, done.stdout
    assert told["burns"] >= 0.7
    assert told["slow"] + told["waits"] < 0.8, done.stdout
    assert [folder for folder, _, rest in lines if "too long" in rest] == ["burns"]


def test_long_files_come_first_and_the_others_keep_their_order():
    files = ["c.py", "x/2.py", "a.py", "long.py", "x/1.py", "b.py", "longer.py"]
    items = [SimpleNamespace(nodeid=f"{f}::test_{n}") for f in files for n in range(2)]
    long = ["longer.py", "x/", "long.py"]
    ordered = start_long_first(items, long)  # type: ignore[type-var]
    assert [item.nodeid for item in ordered] == [
        f"{f}::test_{n}"
        for f in ("longer.py", "x/2.py", "x/1.py", "long.py", "c.py", "a.py", "b.py")
        for n in range(2)
    ]


def test_every_file_that_is_said_to_take_long_is_there():
    for path in read_long(ROOT / "pyproject.toml"):
        there = ROOT / path
        assert there.is_dir() if path.endswith("/") else there.is_file(), path
