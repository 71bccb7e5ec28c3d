"""A Python process for tests of crashes, in its own group, with its output."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import IO, TYPE_CHECKING

from tests.support.clock import clear_faketime
from tests.support.expectations import watch
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]

# The watchdog beside the worker holds the read end of a pipe. Only we have the other
# end. When pytest dies, however it dies, the watchdog kills the worker's group. It
# starts first, and `exec` gives its number to the worker: this is the number that the
# watchdog kills.
_GUARDED = """
exec 3<&0 </dev/null
( read -r _ <&3; kill -s KILL -- -$$ ) >/dev/null 2>&1 &
exec 3<&-
exec "$@"
"""


class Worker:
    """A running Python process. Made by the fixture ``run_process``."""

    def __init__(self, *args: str, env: Mapping[str, str] | None = None) -> None:
        """Start ``python *args`` in the project's root."""
        #: The lines that it has written to its standard output.
        self.lines: list[str] = []
        #: The lines that it has written to its standard error.
        self.errors: list[str] = []
        reader, writer = os.pipe()
        self._pipe: int | None = writer
        try:
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", _GUARDED, "sh", sys.executable, *args],
                stdin=reader,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "PYTHONFAULTHANDLER": "1",
                    "PYTHONPATH": str(ROOT),
                    **(env or {}),
                },
                start_new_session=True,
            )
        finally:
            os.close(reader)
        self.pid = self._child.pid
        self._collectors = [
            self._collect(self._child.stdout, self.lines),
            self._collect(self._child.stderr, self.errors),
        ]

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._child.poll() is None

    @property
    def output(self) -> str:
        """All its output, for messages."""
        return "\n".join(["--- stdout", *self.lines, "--- stderr", *self.errors])

    def wait_for_line(self, pattern: str, *, timeout: float = 60.0) -> re.Match[str]:
        """Wait for a line on stdout that contains the pattern.

        The test fails if the process ends without such a line, or the time is over.
        """
        __tracebackhide__ = True
        wanted = re.compile(pattern)

        def found() -> re.Match[str] | bool:
            ended = not self.running
            if ended:
                self._drain()
            matches = (wanted.search(line) for line in list(self.lines))
            return next((match for match in matches if match), None) or ended

        result = wait_for(
            found,
            timeout=timeout,
            what=lambda: f"process {self.pid} writes {pattern!r}\n{self.output}",
        )
        if isinstance(result, bool):
            raise AssertionError(
                f"process {self.pid} ended with {self._child.returncode} before it "
                f"wrote {pattern!r}\n{self.output}"
            )
        return result

    def signal(self, number: Signals) -> None:
        """Send a signal to the process alone."""
        if self.running:
            self._child.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP the process and its children."""
        self._signal_group(SIGSTOP)

    def resume(self) -> None:
        """SIGCONT the process and its children."""
        self._signal_group(SIGCONT)

    def wait(self, *, timeout: float = 60.0) -> int:
        """Wait for its end and return its exit code; minus the signal if killed."""
        __tracebackhide__ = True
        wait_for(
            lambda: not self.running,
            timeout=timeout,
            what=lambda: f"process {self.pid} ends\n{self.output}",
        )
        self._drain()
        return int(self._child.returncode)

    def kill(self) -> None:
        """SIGKILL the process and its children, and wait for its end."""
        self._signal_group(SIGKILL)
        self._child.wait()
        self._drain()

    def close(self) -> None:
        """Kill what is left of it, and release pipes and threads."""
        self.kill()
        clear_faketime(self.pid)
        watch.read([*self.lines, *self.errors])
        for stream in (self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _signal_group(self, number: Signals) -> None:
        # The watchdog is in the group, too, so the group's number is ours until it
        # ends.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _drain(self) -> None:
        # A child that outlives the process may hold the pipes open: do not wait for
        # ever.
        for collector in self._collectors:
            collector.join(timeout=1)

    @staticmethod
    def _collect(stream: IO[str] | None, lines: list[str]) -> threading.Thread:
        assert stream is not None

        def collect() -> None:
            # The pipe is closed while a grandchild keeps its reader waiting.
            with contextlib.suppress(ValueError):
                for line in stream:
                    lines.append(line.rstrip("\n"))  # noqa: PERF401 - seen at once

        collector = threading.Thread(target=collect, daemon=True)
        collector.start()
        return collector
