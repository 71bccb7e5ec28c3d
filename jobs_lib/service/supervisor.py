"""Several processes that share the origins, or the shards, of one pod.

Python runs one thread at a time: handlers that compute need a process for each core,
and a relay with very much to send needs two. The parent starts the children, passes
signals on, and restarts a child that ends. A child stops when its parent is gone,
because the pipe between them ends.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from jobs_lib import telemetry
from jobs_lib.backoff import RECONNECT
from jobs_lib.masking import describe

if TYPE_CHECKING:
    from collections.abc import Callable

SHARE = "JOBS_LIB_SHARE"
"""The variable that gives a child its share of the origins, such as ``2/4``."""
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
"""The signals that end a process, in order or at once."""
REFUSED = 2
"""The exit code of a process whose start is refused: a person must change something."""
CUT_OFF = 3
"""The exit code of a process that stopped before all running jobs had ended."""
FAILED = 4
"""The exit code of a process that failed by itself: a person must change something."""
_TICK = 0.2
_KILLED = 128
"""A shell adds this to the number of the signal that ended a process."""


class Supervisor:
    """Runs the same command in several processes.

    Args:
        command: the command line.
        count: how many processes.
        ends: whether the command ends by itself when its work is done. Otherwise a
            child that ends is started again, since it has reached a limit.
    """

    def __init__(self, command: list[str], count: int, *, ends: bool = False) -> None:
        self._command = command
        self._ends = ends
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._count = count
        self._failures = 0
        self._is_stopping = False
        # The numbers of the signals received. A handler runs between any two steps
        # of this thread, so it takes no lock and does not touch the children.
        self._asked, self._ask = os.pipe()

    def run(self) -> int:
        """Run until a signal comes, or the work is done; return the worst exit code.

        A child that failed by itself, or whose start was refused, would fail again, so
        the others stop as well.
        A child killed by a signal has the exit code 128 plus the signal's number.

        The first SIGTERM or SIGINT asks the children to stop in order, the second one
        and SIGQUIT to stop at once.
        """
        for number in STOPPING:
            signal.signal(number, self._note)
        for share in range(1, self._count + 1):
            if self._is_asked(0):
                break
            self._start(share)
        while not (self._is_stopping or self._is_done()):
            self._revive_patiently()
            self._pass_on(_TICK)
        while any(child.poll() is None for child in self._children.values()):
            self._pass_on(_TICK)
        codes = (child.wait() for child in self._children.values())
        return max((_KILLED - code if code < 0 else code for code in codes), default=0)

    def _start(self, share: int) -> None:
        # The child inherits that these are blocked, until it can end in order.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            # The pipe's other end is never written to: it ends when this process does.
            self._children[share] = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                # A terminal's Ctrl-C goes to the parent alone, which passes it on: a
                # child that got it twice would stop at once.
                process_group=0,
                env={**os.environ, SHARE: f"{share}/{self._count}"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _revive_patiently(self) -> None:
        try:
            self._revive()
        except OSError as error:
            # The machine may have no more processes for a while. The others go on, and
            # the dead child is found again.
            self._failures += 1
            telemetry.logger.error("a process cannot be started: %s", describe(error))
            self._is_asked(RECONNECT.delay(self._failures))

    def _revive(self) -> None:
        for share, child in self._children.items():
            code = child.poll()
            if code is None or (code == 0 and self._ends):
                continue
            if code == 0:
                # It reached its limit, logged that, and left nothing behind.
                self._start(share)
                continue
            if code in (REFUSED, FAILED) or (code > 0 and self._ends):
                # It has logged the reason.
                self._stop(signal.SIGTERM)
                return
            self._failures += 1
            telemetry.logger.error(
                "process %d of %d died with exit code %d",
                share,
                self._count,
                code,
            )
            if not self._is_asked(RECONNECT.delay(self._failures)):
                self._start(share)
            return

    def _is_done(self) -> bool:
        """Whether all children have ended their work, if it has an end."""
        return self._ends and all(one.poll() == 0 for one in self._children.values())

    def _note(self, number: int, _: object) -> None:
        os.write(self._ask, bytes([number]))

    def _is_asked(self, seconds: float) -> bool:
        """Wait for a signal; return whether one has come."""
        poll = select.poll()
        poll.register(self._asked, select.POLLIN)
        return bool(poll.poll(seconds * 1_000))

    def _pass_on(self, seconds: float) -> None:
        """Wait for a signal, and pass on those that have come."""
        if self._is_asked(seconds):
            for number in os.read(self._asked, select.PIPE_BUF):
                self._stop(number)

    def _stop(self, number: int) -> None:
        self._is_stopping = True
        for child in self._children.values():
            child.send_signal(number)


def end_while_loading(code: int = 0) -> None:
    """End in order on a signal during the app's import: nothing has begun.

    Args:
        code: the exit code. 0 says that nothing is left to do.
    """
    for number in STOPPING:
        signal.signal(number, lambda *_: sys.exit(code))
    # The parent of several processes blocked the signals that came before.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    # Python takes its handlers away before it clears its modules. A signal that came
    # then would kill a process that has ended already, and hide its exit code.
    atexit.register(_ignore_signals)


def _ignore_signals() -> None:
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def read_share() -> tuple[int, int] | None:
    """This process's share, and of how many; None if it has no such parent."""
    share = os.environ.get(SHARE)
    if not share:
        return None
    index, _, count = share.partition("/")
    return int(index), int(count)


def stop_with_parent(stop: Callable[[], None]) -> None:
    """Call ``stop`` when the parent process is gone."""

    def watch() -> None:
        # Not by sys.stdin: a waiting thread holds its lock until the process ends.
        os.read(0, 1)
        stop()

    threading.Thread(target=watch, name="jobs_lib parent", daemon=True).start()
