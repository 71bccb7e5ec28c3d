"""A server process is ended with all its children."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from jobs_lib.devstack.process import ServerProcess, start_of
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

# A process with much memory is not gone at once when it is killed.
_SERVER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import time
kept = b"x" * 800_000_000
print("ready", flush=True)
time.sleep(600)
'''], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_kill_returns_when_the_children_have_ended_too(tmp_path: Path):
    log = tmp_path / "log"
    server = ServerProcess.guarded([sys.executable, "-c", _SERVER], log=log, env={})
    try:
        wait_for(lambda: log.read_text().endswith("\n"), what="its child is there")
        child = int(log.read_text())
        assert start_of(child) is not None
    finally:
        server.kill()
    assert start_of(child) is None
    assert not server.alive()
