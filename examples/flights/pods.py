"""Start the demo's processes, and end all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

SERVICE = "examples.flights.service:app"
BOARD = "examples.flights.board:app"
GRACE = 30.0
"""How many seconds a process has to end by itself."""


class Processes:
    """Python processes, each in its own group; all end with the ``with`` block."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._running: list[subprocess.Popen[bytes]] = []
        self._files = ExitStack()

    def start(
        self, name: str, *arguments: str, env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Run ``python -m <arguments>``; its output goes to ``<name>.log``."""
        log = self._files.enter_context((self.logs / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._running.append(process)
        return process

    def check(self) -> None:
        """Raise if a process has ended by itself that should go on."""
        for process in self._running:
            # The re-export's command ends with 0, and the killed pod is no longer in
            # the list.
            if process.poll() not in (None, 0):
                command = " ".join(map(str, process.args[3:]))  # type: ignore[index]
                raise SystemExit(
                    f"`{command}` ended with {process.returncode}: see {self.logs}"
                )

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process, as a crash would."""
        self._running.remove(process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """End a process as Kubernetes does; it has some seconds."""
        self._running.remove(process)
        process.terminate()
        _end(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            if process.poll() is None:
                process.terminate()
        for process in self._running:
            _end(process)
        self._files.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process that was asked to end."""
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Pod:
    """A service and the sidecar that runs its jobs, under the name of one pod."""

    def __init__(self, name: str, processes: Processes, env: dict[str, str]) -> None:
        self.name = name
        self._processes = processes
        cli = "jobs_lib.cli"
        env = {**env, "JOBS_LIB_POD": name}
        self._parts = [
            processes.start(
                f"{name}-service", cli, "run", SERVICE, "--without", "executor", env=env
            ),
            processes.start(f"{name}-sidecar", cli, "executor", SERVICE, env=env),
        ]

    def kill(self) -> None:
        """SIGKILL both processes."""
        for process in self._parts:
            self._processes.kill(process)
