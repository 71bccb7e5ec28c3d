"""The partner: a small HTTP server that is away for a while, and slow for Honolulu.

    python -m examples.flights.partner LOG

It prints its address, and writes every arrival that it accepts to the file LOG.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SLOW_DESTINATION, SLOW_SECONDS = "HNL", 1.0
AWAY_AFTER, AWAY_SECONDS = 8.0, 5.0
"""How many seconds after the first arrival it goes away, and for how many."""


class Log:
    """The arrivals that the partner has accepted, in that order."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._keys: set[str] = set()
        self._begun: float | None = None

    def away(self) -> bool:
        """Whether the partner is away now."""
        with self._lock:
            self._begun = self._begun or time.monotonic()
            since = time.monotonic() - self._begun - AWAY_AFTER
        return 0 <= since < AWAY_SECONDS

    def accept(self, key: str, arrival: dict[str, object]) -> None:
        """Write an arrival down, unless its key is known."""
        with self._lock:
            line = {"key": key, "repeat": key in self._keys, **arrival}
            self._keys.add(key)
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


class Handler(BaseHTTPRequestHandler):
    """Answers one connection; several are open at once."""

    protocol_version = "HTTP/1.1"  # connections stay open between requests
    disable_nagle_algorithm = True
    log: Log

    def do_POST(self) -> None:
        """Accept an arrival: 204, or 503 while away."""
        arrival = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.log.away():
            self._answer(503)
            return
        if arrival["destination"] == SLOW_DESTINATION:
            time.sleep(SLOW_SECONDS)
        self.log.accept(self.headers["Idempotency-Key"], arrival)
        self._answer(204)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log no single request."""


def main() -> None:
    """Serve until the process is ended."""
    Handler.log = Log(Path(sys.argv[1]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
