"""An orchestrator's questions to a process: is it alive, is it ready, its metrics.

``/livez`` never asks a server: an outage of the database must not restart the pods.
"""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from jobs_lib import telemetry
from jobs_lib.addresses import LAST_PORT
from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

NO_METRICS = (
    "metrics need the extra: pip install 'jobs-lib[metrics]', and JOBS_LIB_METRICS "
    "must not be false"
)
_TEXT = "text/plain; charset=utf-8"
_STOP_WITHIN = 2.0
_TICK = 0.1
_AT_ONCE = 32
"""Clients served at the same time; a thread waits for each."""
_HEARD_FOR = 5.0
"""Seconds after which a silent client is disconnected."""


class Probes:
    """Answers ``/livez`` and ``/readyz`` from a thread of its own."""

    def __init__(
        self,
        port: int,
        find_unready: Callable[[], str | None],
        find_silent: Callable[[], list[str]] = list,
        render: Callable[[], tuple[str, bytes]] | None = None,
    ) -> None:
        """Take the port.

        Args:
            port: on all addresses, IPv6 too, because the node sends the questions.
            find_unready: finds why ``/readyz`` answers 503; None lets it answer 200.
            find_silent: finds threads that stand still; then ``/livez`` answers 503.
            render: makes the content type and the text of ``/metrics``; None if there
                are no metrics.

        Raises:
            ConfigurationError: the port is taken, or there is no such port.
        """
        if port > LAST_PORT:
            raise ConfigurationError(
                f"there is no port {port} for the probes: each process of a pod uses "
                f"the next one, up to {LAST_PORT}. Set JOBS_LIB_PROBES_PORT to a lower "
                "one"
            )
        try:
            listener = _listen(port)
        except OSError as error:
            raise ConfigurationError(
                f"port {port} for the probes is not available: {error.strerror}. Set "
                "JOBS_LIB_PROBES_PORT to another one"
            ) from None
        self._server = _Server(listener, find_unready, find_silent, render)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_TICK,),
            name="jobs_lib probes",
            daemon=True,
        )

    def start(self) -> None:
        """Start to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering, and free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(_STOP_WITHIN)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """A thread for each client, so that a silent one does not delay the others."""

    daemon_threads = True

    def __init__(
        self,
        listener: socket.socket,
        find_unready: Callable[[], str | None],
        find_silent: Callable[[], list[str]],
        render: Callable[[], tuple[str, bytes]] | None,
    ) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()  # the base class has made one, for IPv4 alone
        self.socket = listener
        self.find_unready = find_unready
        self.find_silent = find_silent
        self.render = render
        self._free = threading.BoundedSemaphore(_AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client, unless too many are served already."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            # The process may have no more threads for a while: nobody serves this one.
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The same, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that goes away in the middle."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "jobs_lib"
    sys_version = ""
    timeout = _HEARD_FOR

    def do_GET(self) -> None:
        """Answer."""
        path = self.path.partition("?")[0]
        try:
            status, content_type, body = self._find_answer(path)
        except Exception as error:
            telemetry.emit("loop.failed", loop="probes", error=error)
            # A process that cannot tell whether it is ready is not.
            status = 503 if path == "/readyz" else 500
            content_type, body = _TEXT, b"it failed to find out"
        self._send(status, content_type, body)

    do_HEAD = do_GET

    def _find_answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        if path == "/metrics" and self.server.render is not None:
            return 200, *self.server.render()
        status, text = self._find_text(path)
        return status, _TEXT, text.encode()

    def _find_text(self, path: str) -> tuple[int, str]:
        if path == "/livez":
            silent = self.server.find_silent()
            told = f"these threads stand still: {', '.join(silent)}"
            return (503, told) if silent else (200, "live")
        if path == "/readyz":
            why = self.server.find_unready()
            return (200, "ready") if why is None else (503, why)
        if path == "/metrics":
            return 404, NO_METRICS
        return 404, "there are /livez, /readyz and /metrics"

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: an orchestrator asks each second."""


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True
            )
        except OSError:
            # IPv6 is switched off, or the port is taken: the next line finds out which.
            pass
    return socket.create_server(("", port))
