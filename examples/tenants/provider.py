"""A payment provider that fails and hangs now and then, and knows idempotency keys.

    python -m examples.tenants.provider LEDGER [PORT]

It prints its address. Each registration is a line of the file LEDGER, which it reads
again when it starts.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

ROUND = 20
"""Of so many calls, those with these numbers go wrong:"""
FAILS, HANGS_UP, IS_LATE, HANGS = 3, 8, 13, 18
LATE_SECONDS, HANG_SECONDS = 0.3, 3.0


class Ledger:
    """The registrations, once for each idempotency key."""

    def __init__(self, path: Path) -> None:
        path.touch()
        lines = path.read_text(encoding="utf-8").splitlines()
        self._keys = {json.loads(line)["key"] for line in lines}
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def register(self, key: str, tenant: str) -> None:
        """Register a tenant, unless the key is known."""
        with self._lock:
            if key in self._keys:
                return
            self._file.write(json.dumps({"key": key, "tenant": tenant}) + "\n")
            self._file.flush()
            self._keys.add(key)


class Handler(BaseHTTPRequestHandler):
    """Answers one connection; several are open at once."""

    protocol_version = "HTTP/1.1"  # connections stay open between requests
    disable_nagle_algorithm = True
    ledger: Ledger
    calls = count(1)

    def do_POST(self) -> None:
        """Register a tenant: 201, unless it is a call that goes wrong."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        turn = next(self.calls) % ROUND
        if turn == FAILS:
            self._answer(500)
            return
        if turn == HANGS:
            time.sleep(HANG_SECONDS)
            self.close_connection = True
            return
        self.ledger.register(self.headers["Idempotency-Key"], body["tenant"])
        if turn == HANGS_UP:
            self.close_connection = True  # the work is done, and nobody is told
            return
        if turn == IS_LATE:
            time.sleep(LATE_SECONDS)
        self._answer(201)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log no single request."""


def main() -> None:
    """Serve until the process is ended."""
    Handler.ledger = Ledger(Path(sys.argv[1]))
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
