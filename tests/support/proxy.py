"""A TCP proxy in front of a server that disturbs connections as networks do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_RESET = struct.pack("ii", 1, 0)
_BLOCK = 65_536
_READY = b"Z\x00\x00\x00\x05I"
"""How PostgreSQL's answer ends, to the login and to a statement in autocommit mode."""


class Proxy:
    """Passes bytes both ways, a thread for each connection.

    - `hold()`: every connection, also a new one, stays open and passes nothing on;
    - `mute(n)`: the same on each connection, once the server has answered ``n`` times;
      the first answer is to the login;
    - `half_open()`: the same, and the server believes that its clients are gone;
    - `reset()`: cuts all connections with a TCP reset, and accepts new ones;
    - `release()`: back to normal; it cuts the connections that were held;
    - `freeze()`: keeps all bytes on their way, on every connection, also a new one;
    - `thaw()`: delivers them, late and complete;
    - `turn(url)`: cuts all connections, and leads new ones to another server;
    - `swallow(text)`: on a connection whose client has sent ``text``, it drops the
      server's answer, and cuts the connection. Once. It can hold all others from then.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._held = threading.Event()
        self._half = threading.Event()
        self._answers: int | None = None
        self._flows = threading.Event()
        self._flows.set()
        self._swallow: bytes | None = None
        self._holds = False
        self.swallowed = threading.Event()
        """Set once an answer has been dropped."""
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @classmethod
    def before(cls, url: str) -> Proxy:
        """A proxy before the server at a URL."""
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        return cls(parts.hostname, parts.port)

    def url(self, url: str) -> str:
        """The same URL, through the proxy."""
        parts = urlsplit(url)
        return parts._replace(
            netloc=parts.netloc.replace(f":{parts.port}", f":{self.port}")
        ).geturl()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        # While a thread waits there, a close alone would accept one more connection.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def hold(self) -> None:
        """Pass nothing more on, in either direction."""
        self._held.set()

    def mute(self, answers: int | None) -> None:
        """Pass that many answers on to each new connection, and nothing after them.

        Args:
            answers: their number; None for all.
        """
        self._answers = answers

    def half_open(self) -> None:
        """Close the server's side of all connections, and leave the clients' open."""
        self._half.set()
        self.hold()

    def release(self) -> None:
        """Serve new connections, and cut the held ones."""
        self._held.clear()
        self._half.clear()
        self.mute(None)
        self.reset()

    def freeze(self) -> None:
        """Keep all bytes, and cut nothing."""
        self._flows.clear()

    def thaw(self) -> None:
        """Deliver the bytes that were kept, and all that follow."""
        self._flows.set()

    def restore(self) -> None:
        """Undo all that a test has done, and cut the connections that it left."""
        self._swallow = None
        self.thaw()
        self.release()

    def reset(self) -> None:
        """Cut all connections."""
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    # This wakes the connection's thread, which closes it.
                    one.shutdown(socket.SHUT_RD)
            self._open.clear()

    def turn(self, url: str) -> None:
        """Lead to the server at ``url`` from now on; every client must reconnect."""
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        self._target = (parts.hostname, parts.port)
        self.reset()

    def swallow(self, text: str, *, hold: bool = False) -> None:
        """Drop the answer to the next request that contains this text.

        Args:
            text: to look for.
            hold: whether to hold all connections then, before the client can ask again.
        """
        self.swallowed.clear()
        self._swallow, self._holds = text.encode(), hold

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                # A client may close its connection before it is accepted: keep serving
                # others.
                if self._listener.fileno() < 0:
                    return
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection(self._target) as server,
        ):
            with self._lock:
                self._open |= {client, server}
            try:
                self._pass(client, server)
            finally:
                with self._lock:
                    self._open -= {client, server}

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        """Pass bytes until one side ends; where wanted, close with a reset."""
        cutting = False
        left = self._answers
        ends = [client, server]
        while not self._closed:
            if not self._flows.wait(0.1):
                continue
            ready = cast("list[socket.socket]", wait(ends, 0.1))
            if not self._flows.is_set():
                continue
            if self._half.is_set() and server in ends:
                ends.remove(server)
                server.close()
                continue
            for one in ready:
                data = one.recv(_BLOCK)
                # On a busy machine, bytes can still arrive here after a reset.
                if not data or one not in self._open:
                    return
                if self._held.is_set() or left == 0:
                    continue
                if one is client:
                    if self._swallow and self._swallow in data:
                        self._swallow, cutting = None, True
                    server.sendall(data)
                elif cutting:
                    # The server has answered, so it has done its work.
                    if self._holds:
                        self.hold()
                    self.swallowed.set()
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    return
                else:
                    client.sendall(data)
                    if left is not None and data.endswith(_READY):
                        left -= 1
