"""Count the bytes that go over a server's connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from typing import Self

_BLOCK = 65_536


class Wire:
    """Passes connections on to the server of a URL, and counts the bytes both ways."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = parts.hostname, parts.port
        self._listener = socket.create_server(("127.0.0.1", 0))
        user = parts.netloc.rpartition("@")[0]
        port = self._listener.getsockname()[1]
        here = f"{user}@127.0.0.1:{port}" if user else f"127.0.0.1:{port}"
        self.url = urlunsplit(parts._replace(netloc=here))
        """The same database, through here."""
        self._lock = threading.Lock()
        self.count = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_BLOCK):
                with self._lock:
                    self.count += len(data)
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        # The other thread closes the other end: that one is its source.
        source.close()
