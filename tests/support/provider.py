"""An external provider as a real HTTP server that honours idempotency keys."""

from __future__ import annotations

import contextlib
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Provider:
    """Registers tenants; a call with a key that it knows registers nobody again."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """The tenant and the key of each call, in order."""
        self.registered: dict[str, str] = {}
        """The tenants by key."""
        self.may_answer = threading.Event()
        self.may_answer.set()
        """Until it is set, callers get no answer."""
        lock = threading.Lock()
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                tenant, key = self.path[1:], self.headers["Idempotency-Key"]
                with lock:
                    provider.calls.append((tenant, key))
                    provider.registered.setdefault(key, tenant)
                provider.may_answer.wait(60)
                # The caller may have died meanwhile.
                with contextlib.suppress(OSError):
                    self.send_response(200)
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def ledger(self) -> list[str]:
        """The registered tenants."""
        return sorted(self.registered.values())

    def close(self) -> None:
        """Answer all calls, and stop."""
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def providing() -> Iterator[Provider]:
    """A running provider."""
    provider = Provider()
    try:
        yield provider
    finally:
        provider.close()


def register(address: str, tenant: str, key: str) -> None:
    """Register a tenant, as a client of the provider does."""
    request = urllib.request.Request(
        f"{address}/{tenant}", method="POST", headers={"Idempotency-Key": key}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
