"""A running adapter that handles jobs, and the events that it reports."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

from benchmarks.peers.peer import REPOSITORY, argv

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchmarks.peers.peer import Peer
    from benchmarks.server import Server

Row = dict[str, Any]
"""Raw figures by name."""

_END_SECONDS = 10.0


class PieceError(Exception):
    """An adapter ended or was silent when it should have reported something."""


class Worker:
    """A running adapter that handles jobs."""

    def __init__(
        self,
        server: Server,
        peer: Peer,
        settings: Mapping[str, Any],
        command: str = "work",
        **given: Any,
    ) -> None:
        self.peer = peer
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed by `end`
        self.process = subprocess.Popen(
            argv(peer, command, {**given, "settings": dict(settings)}),
            cwd=REPOSITORY,
            env=server.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._events: queue.Queue[Row | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def await_event(self, name: str, seconds: float) -> Row:
        """Wait for the next event of this name; ignore others."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._failure(f"did not say {name!r} in {seconds:g} s") from None
            if event is None:
                raise self._failure(f"ended before it said {name!r}")
            if event.get("event") == name:
                return event

    def end(self) -> None:
        """Ask the adapter to end, and make sure that it does."""
        self.process.terminate()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._events.put(json.loads(line))
        self._events.put(None)

    def _failure(self, what: str) -> PieceError:
        self._errors.seek(0)
        said = self._errors.read()[-1_000:].strip()
        return PieceError(f"{self.peer.name}: the worker {what}. {said}")


@contextlib.contextmanager
def working(
    server: Server, peer: Peer, settings: Mapping[str, Any], **given: Any
) -> Iterator[Worker]:
    """A worker that ends with the block."""
    worker = Worker(server, peer, settings, **given)
    try:
        yield worker
    finally:
        worker.end()
