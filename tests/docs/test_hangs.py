"""A test that hangs ends when its time is over, and the run goes on."""

from __future__ import annotations

import re
import tomllib
from xml.etree import ElementTree

import pytest

from tests.support.inner_runs import run_pytest
from tests.support.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
METHOD = PROJECT["tool"]["pytest"]["ini_options"]["timeout_method"]

CONFIGURATION = """
from tests.support import hangs

hangs.GRACE = {grace}
hangs.NOTICE = {notice}

def pytest_configure(config):
    config.pluginmanager.register(hangs.Hangs())
"""
START = """
import os, select, socket, subprocess, sys, threading

import psycopg, psycopg2, pytest
from confluent_kafka import Consumer

from tests.support.waiting import wait_for

SILENT = socket.create_server(("127.0.0.1", 0))
ADDRESS = f"host=127.0.0.1 port={SILENT.getsockname()[1]}"

KAFKA = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0}

@pytest.fixture
def hangs_at_first():
    threading.Event().wait()

@pytest.fixture
def hangs_at_the_end():
    yield
    threading.Event().wait()

@pytest.mark.timeout(60)
def test_before(): ...

"""
END = """
@pytest.mark.timeout(60)
def test_after(): ...
"""
SIGNAL = """
def test_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_event():
    threading.Event().wait()

def test_thread():
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    thread.join()

def test_process():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(100)"])

def test_select():
    select.select([os.pipe()[0]], [], [])

def test_psycopg():
    psycopg.connect(ADDRESS)

def test_poll():
    Consumer(KAFKA).poll(100)

def test_fixture(hangs_at_first): ...

def test_end_of_fixture(hangs_at_the_end): ...
"""
PROCESS = """
def test_psycopg2():
    psycopg2.connect(ADDRESS)

def test_consume():
    Consumer(KAFKA).consume(1, timeout=100)

def test_hangs_again_at_its_end(hangs_at_the_end):
    threading.Event().wait()
"""


@pytest.fixture
def run_tests(tmp_path):
    """A function that runs tests; it returns how each failed, and the output."""

    def run(
        tests: str, *options: str, grace: float, notice: float = 0.3
    ) -> tuple[dict[str, str], str]:
        configuration = CONFIGURATION.format(grace=grace, notice=notice)
        (tmp_path / "conftest.py").write_text(configuration, encoding="utf-8")
        file, report = tmp_path / "test_hanging.py", tmp_path / "report.xml"
        file.write_text(START + tests + END, encoding="utf-8")
        done = run_pytest(
            tmp_path,
            *options,
            "--timeout=0.5",
            f"--timeout-method={METHOD}",
            f"--junit-xml={report}",
            file.name,
            plugins="pytest_timeout,xdist.plugin",
        )
        ended: dict[str, str] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            told = [part.attrib.get("message", "") for part in case]
            name = case.attrib["name"]
            ended[name] = ended.get(name, "") + "".join(told)
        return ended, done.stdout + done.stderr

    return run


def names(tests: str) -> list[str]:
    return re.findall(r"def (test_\w+)", tests)


def test_a_signal_ends_a_test_alone(run_tests):
    ended, output = run_tests(SIGNAL, grace=60)
    assert [*ended] == ["test_before", *names(SIGNAL), "test_after"], output
    for name, message in ended.items():
        assert ("Timeout (>0.5s)" in message) == (name in names(SIGNAL)), output


def test_a_new_worker_replaces_one_that_no_signal_ends(run_tests):
    ended, output = run_tests(PROCESS, "-n", "1", grace=1.5)
    assert {*ended} == {"test_before", *names(PROCESS), "test_after"}, output
    for name in names(PROCESS):
        told = rf"worker 'gw\d' crashed while running .*{name}"
        assert re.search(told, ended.pop(name)), output
    assert {*ended.values()} == {""}, output
    # The stacks show where each test hangs.
    for name in ("test_psycopg2", "test_consume", "hangs_at_the_end"):
        assert f" in {name}\n" in output, output


WAITS = """
@pytest.mark.timeout(60)
def test_wait():
    wait_for(lambda: False, timeout=100, what="it comes")
"""


def test_a_wait_says_what_it_lacks_before_its_test_is_ended(run_tests):
    # However busy the machine is, there is time to say it.
    ended, output = run_tests(WAITS, grace=60, notice=59.8)
    assert [*ended] == ["test_before", *names(WAITS), "test_after"], output
    assert "s in vain until: it comes" in ended.pop("test_wait"), output
    assert {*ended.values()} == {""}, output


FILES = """
import os

import pytest

@pytest.mark.parametrize("number", range({tests}))
def test_one(number):
    if number == {dies_at}:
        os._exit(1)
"""

SHARED = """
from tests.support.scheduler import FileScheduler

def pytest_xdist_make_scheduler(config, log):
    return FileScheduler(config, log)
"""


@pytest.mark.parametrize("tests", [1, 2, 4])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_of_many_files_outlives_its_processes(tmp_path, tests, processes):
    """Whatever a dead process had is run once, and the test that ended it is not."""
    (tmp_path / "conftest.py").write_text(SHARED, encoding="utf-8")
    for file in range(8):
        dies_at = tests - 1 if file in (3, 4, 7) else "None"
        text = FILES.format(tests=tests, dies_at=dies_at)
        (tmp_path / f"test_{file}.py").write_text(text, encoding="utf-8")
    done = run_pytest(
        tmp_path,
        "--numprocesses",
        str(processes),
        "--dist=loadfile",
        plugins="xdist.plugin",
    )
    ends = rf"3 failed, {8 * tests - 3} passed in "
    assert re.search(ends, done.stdout), done.stdout + done.stderr


WHERE = """
import os
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", range(3))
def test_one(number):
    with Path("ran").open("a") as told:
        told.write(f"{__file__} {os.environ['PYTEST_XDIST_WORKER']}\\n")
    if number == 1 and "dies" in __file__ and not Path("died").exists():
        Path("died").touch()
        os._exit(1)
"""


def test_one_process_takes_the_whole_of_a_folder(tmp_path):
    """Another one takes the rest of it if that process ends."""
    shared = SHARED.replace("(config, log)\n", '(config, log, ["together/"])\n', 1)
    assert shared != SHARED
    (tmp_path / "conftest.py").write_text(shared, encoding="utf-8")
    (tmp_path / "together").mkdir()
    for name in ("a", "b", "c_dies", "d"):
        file = tmp_path / "together" / f"test_{name}.py"
        file.write_text(WHERE, encoding="utf-8")
    for name in ("e", "f", "g"):
        (tmp_path / f"test_{name}.py").write_text(WHERE, encoding="utf-8")
    options = ["--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"]
    done = run_pytest(tmp_path, *options, plugins="xdist.plugin")
    assert re.search(r"1 failed, 20 passed in ", done.stdout), done.stdout + done.stderr
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert len(ran) == 21
    took = [process for file, process in ran if "/together/" in file]
    # One process before the death, and one behind it.
    assert took == sorted(took, key=took.index)
    assert len({*took}) == 2
