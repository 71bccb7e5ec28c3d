"""The processes of the demo: each service, and its API if it has one."""

from __future__ import annotations

import os
import random
import signal
import socket
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

    from examples.flights.pods import Processes


PORTS = range(10_000, 32_000)
"""Below those that kernels give to clients, and to servers that ask for any port."""


class Port:
    """A port that stays ours while no server listens at it."""

    def __init__(self) -> None:
        while True:
            self.number = random.choice(PORTS)
            with socket.socket() as alone, suppress(OSError):
                # This fails if anybody has the port.
                alone.bind(("127.0.0.1", self.number))
                break
        self._socket = socket.socket()
        # With this option, the server can bind to it as well.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", self.number))

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.number}"

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


class Service:
    """One service: a process of `jobs-lib run`, and one of uvicorn for its API."""

    def __init__(
        self,
        name: str,
        processes: Processes,
        env: Mapping[str, str],
        port: Port | None = None,
    ) -> None:
        self.name = name
        self._processes = processes
        self._env = dict(env)
        self._port = port
        self._logs = count(1)
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start its processes; nobody waits until they are ready."""
        self._running = [self.start_worker()]
        if self._port is not None:
            api = ["uvicorn", f"examples.payments.{self.name}:web"]
            port = ["--port", str(self._port.number), "--no-access-log"]
            self._running.append(self._start(*api, *port))

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start one more process that handles records."""
        return self._start("jobs_lib.cli", "run", f"examples.payments.{self.name}:app")

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """End one of its processes in peace."""
        self._processes.stop(process)

    def kill(self) -> None:
        """SIGKILL all its processes."""
        for process in self._running:
            self._processes.kill(process)
        self._running.clear()

    def pause(self) -> None:
        """SIGSTOP the process that handles records. The API goes on."""
        os.killpg(self._running[0].pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT it."""
        os.killpg(self._running[0].pid, signal.SIGCONT)

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        name = f"{self.name}-{next(self._logs)}"
        return self._processes.start(name, *arguments, env=self._env)
