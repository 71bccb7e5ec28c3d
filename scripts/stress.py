"""Run tests many times beside busy processes, as `make stress` does.

A test that passes on an idle machine may still count on being quick. Busy processes
take the cores from it at any point, so a test that depends on time fails. Each run has
a seed of its own, which also gives the order of the tests. The first run that
fails is the last; its output and its seed are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
LARGEST_SEED = 2**32 - 1

# A busy process ends by itself when its parent has gone, so none outlives a SIGKILL of
# the parent. It ignores Ctrl-C, which reaches it too: the parent ends it then.
BUSY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


def main() -> int:
    """Run the tests; return the exit status of the first run that failed, else 0."""
    parser = argparse.ArgumentParser(
        description="Run tests many times beside busy processes.",
        epilog="pytest gets all other arguments: files, -k, -n and so on.",
        allow_abbrev=False,
    )
    parser.add_argument("--times", type=int, default=20, help="how many runs")
    parser.add_argument("--busy", type=int, default=8, help="how many busy processes")
    options, tests = parser.parse_known_args()
    if not tests:
        parser.error('name the tests: make stress TESTS="tests/unit/test_links.py"')
    signal.signal(signal.SIGTERM, _leave)
    try:
        with busy(options.busy):
            return stress(tests, options.times)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run this number of busy processes inside the block."""
    command = [sys.executable, "-S", "-c", BUSY, str(os.getpid())]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(subprocess.Popen(command))  # noqa: PERF401 - ended if one fails
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def stress(tests: list[str], times: int) -> int:
    """Run the tests until a run fails, at most ``times``; return its status, else 0."""
    for passed in range(times):
        seed = random.randint(0, LARGEST_SEED)
        repeat = ["pytest", f"--randomly-seed={seed}", *tests]
        began = time.monotonic()
        status, output = run([sys.executable, "-m", *repeat])
        told = f"with seed {seed} in {time.monotonic() - began:.1f} s"
        if status != 0:
            print(output)
            print(f"Run {passed + 1} failed {told}: {' '.join(repeat)}")
            print(f"{passed} of {times} runs passed.")
            return status
        print(f"Run {passed + 1} passed {told}.", flush=True)
    print(f"{times} of {times} runs passed.")
    return 0


def run(command: list[str]) -> tuple[int, str]:
    """Run a command; return its exit status and its output."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # A session of its own keeps Ctrl-C from reaching pytest twice: the second one
        # would interrupt pytest while it stops its servers.
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait()
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
                child.wait()
        output.seek(0)
        return status, output.read()


def _leave(number: int, _: object) -> NoReturn:
    # As on Ctrl-C, the way out ends the running processes.
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
