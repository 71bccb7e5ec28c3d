"""What an orchestrator asks a process: does it live, and is it ready?

``/livez`` never asks a server: an outage of the database must not restart the pods.
"""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

_STOP_WITHIN = 2.0


class Probes:
    """Answers ``/livez`` and ``/readyz`` from a thread of its own."""

    def __init__(self, port: int, is_ready: Callable[[], bool]) -> None:
        """Take the port.

        Args:
            port: on all addresses, since it is the node that asks.
            is_ready: whether ``/readyz`` answers 200, else it is 503.

        Raises:
            ConfigurationError: the port is taken, or the extra ``web`` is missing.
        """
        try:
            import uvicorn
            from starlette.applications import Starlette
            from starlette.responses import PlainTextResponse
            from starlette.routing import Route
        except ImportError as error:
            raise ConfigurationError(
                f"JOBS_LIB_PROBES_PORT needs {error.name}: pip install 'jobs-lib[web]'"
            ) from None
        try:
            self._socket = socket.create_server(("", port))
        except OSError as error:
            raise ConfigurationError(
                f"port {port} for the probes cannot be had: {error.strerror}. Set "
                "JOBS_LIB_PROBES_PORT to another one"
            ) from None

        async def livez(_: Request) -> Response:
            return PlainTextResponse("live")

        async def readyz(_: Request) -> Response:
            if is_ready():
                return PlainTextResponse("ready")
            return PlainTextResponse("starting or stopping", status_code=503)

        routes = [Route("/livez", livez), Route("/readyz", readyz)]
        # Neither the application's logging nor its signals are the server's business.
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run,
            args=([self._socket],),
            name="jobs_lib probes",
            daemon=True,
        )

    def start(self) -> None:
        """Start to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more, and give the port back."""
        self._server.should_exit = True
        self._thread.join(_STOP_WITHIN)
        self._socket.close()
