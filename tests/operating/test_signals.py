"""A signal ends a process, whatever its main thread does just then."""

from __future__ import annotations

import ast
import signal
import threading
from pathlib import Path

import pytest

import jobs_lib
from jobs_lib.signals import handle_signals

WITHIN = 60.0

# The main thread looks again and again whether it is to stop, and for a moment it holds
# the lock of what it looks at. Here a signal comes in that moment.
AMID = """
import os, signal, sys, threading

class Amid(threading.Event):
    was_sent = False

    def wait(self, timeout=None):
        if not self.was_sent:
            self.was_sent = True
            with self._cond:
                os.kill(os.getpid(), signal.{name})
                # In one piece: another thread may write just now.
                os.write(1, b"sent\\n")
        return super().wait(timeout)
"""
SERVICE = """
from jobs_lib import App
from jobs_lib.postgres.migrate import migrate
from jobs_lib.service.service import Service
from jobs_lib.settings import load_settings

migrate({url!r})
app = App("shop", settings=load_settings(database_url={url!r}))
app.job(name="none")(lambda job: None)
service = Service(app, ("executor",))
service._stopping = Amid()
sys.exit(service.run())
"""
HANDLED = """
from jobs_lib.signals import handle_signals

ended = Amid()

def end(number):
    os.write(1, b"handled %d\\n" % number)
    ended.set()

restore = handle_signals([signal.{name}], end)
ended.wait(30)
restore()
print("restored", signal.getsignal(signal.{name}), flush=True)
"""
FAILS = """
import logging, os, signal, threading
from jobs_lib.signals import handle_signals

logging.basicConfig()
second = threading.Event()
seen = []

def end(number):
    seen.append(number)
    if len(seen) == 1:
        raise ValueError("the first one fails")
    second.set()

handle_signals([signal.SIGTERM], end)
os.kill(os.getpid(), signal.SIGTERM)
while not seen:
    second.wait(0.01)
os.kill(os.getpid(), signal.SIGTERM)
print(second.wait(30), flush=True)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_service_stops_whatever_its_main_thread_does(run_process, database_url, name):
    script = AMID.format(name=name) + SERVICE.format(url=database_url)
    worker = run_process("-c", script)
    worker.wait_for_line("sent", timeout=WITHIN)
    assert worker.wait(timeout=WITHIN) == 0, worker.output


def test_a_signal_is_handled_in_a_thread_of_its_own(run_process):
    worker = run_process("-c", (AMID + HANDLED).format(name="SIGUSR1"))
    worker.wait_for_line(f"handled {signal.SIGUSR1.value}", timeout=WITHIN)
    worker.wait_for_line("restored 0", timeout=WITHIN)
    assert worker.wait(timeout=WITHIN) == 0, worker.output


def test_a_signal_is_handled_though_one_before_has_failed(run_process):
    worker = run_process("-c", FAILS)
    worker.wait_for_line("True", timeout=WITHIN)
    assert worker.wait(timeout=WITHIN) == 0
    assert "the first one fails" in worker.output


def test_no_thread_waits_where_no_signals_are_handled():
    before = threading.enumerate()
    handle_signals((), print)()
    assert threading.enumerate() == before


def test_no_handler_of_a_signal_takes_a_lock():
    """Whoever installs one elsewhere says here why it takes none."""
    root = Path(jobs_lib.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr == "signal"
        and isinstance(node.value, ast.Name)
        and node.value.id == "signal"
    }
    # The supervisor writes to a pipe, or ends the process. The script passes one over.
    assert found == {
        "signals.py",
        "service/supervisor.py",
        "kafka/members_process.py",
    }
