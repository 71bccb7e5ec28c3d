"""A sleep that other threads end, at the points where their steps interleave."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

from jobs_lib.db import Database
from jobs_lib.wakeup import Wakeup


@pytest.fixture
def wakeup():
    """A sleep without a connection for hints."""
    # Nothing is asked of the database where nobody listens.
    with contextlib.closing(Wakeup(Database("dbname=none", "any"), None)) as w:
        yield w


def test_what_is_set_while_the_sleeper_wakes_costs_no_later_call(
    wakeup, wait_for, monkeypatch
):
    def read(descriptor: int, size: int) -> bytes:
        wakeup.set()  # another thread, just now
        return os_read(descriptor, size)

    os_read = os.read
    wakeup.set()
    with monkeypatch.context() as patched:
        patched.setattr(os, "read", read)
        wakeup.wait(60)

    sleeper = threading.Thread(target=wakeup.wait, args=(60,), daemon=True)
    sleeper.start()
    wakeup.set()
    wait_for(lambda: not sleeper.is_alive(), timeout=10, what="the sleep ends")
