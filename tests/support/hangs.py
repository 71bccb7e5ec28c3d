"""End a process if its test cannot be ended in any other way.

When the time of a test is over, pytest-timeout raises an error by a signal, so the test
fails and the run goes on. The signal interrupts waits in Python and in psycopg. It does
not interrupt C code that ignores signals, such as psycopg2 and most calls of
librdkafka: there the error waits until the call returns. Also, a test gets this signal
only once. A fixture that hangs after it does not get it again.

So some time later the process ends, with the stacks of all its threads. If several
processes share the run, its test counts as failed, and a new process takes its place.
"""

from __future__ import annotations

import faulthandler
import math
import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.waiting import end_waits_at

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

#: How many seconds the fixtures of a test have after its time limit.
GRACE = 60.0

#: How many seconds before its time limit a test says which condition it waits for.
NOTICE = 10.0


class Hangs:
    """A pytest plugin that ends the process if a test hangs for good."""

    def __init__(self) -> None:
        # During a test pytest captures all output to descriptor 2.
        self._stderr = os.dup(2)
        self._seconds: float | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, settings: Any) -> None:
        """Begin to count when pytest-timeout does."""
        self._seconds = settings.timeout + GRACE
        self._begin()

    def pytest_exception_interact(self) -> None:
        """Begin again for the fixtures: at a failure pytest stops the count."""
        self._begin()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Stop once the test and its fixtures have ended."""
        try:
            return (yield)
        finally:
            self._drop()

    def pytest_enter_pdb(self) -> None:
        """Drop the time limit of a test under a debugger."""
        self._drop()

    def _drop(self) -> None:
        self._seconds = None
        end_waits_at(math.inf)
        faulthandler.cancel_dump_traceback_later()

    def _begin(self) -> None:
        if self._seconds is not None:
            end_waits_at(time.monotonic() + self._seconds - GRACE - NOTICE)
            faulthandler.dump_traceback_later(
                self._seconds, file=self._stderr, exit=True
            )
