"""The partner: a payment service that is not always there.

    python partner.py 8010

Of three calls it refuses the first with 503. For the second it does the work and hangs
up before it answers. Like any good partner, it recognizes an Idempotency-Key that it
has seen.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

done: dict[str, dict[str, dict[str, object]]] = {
    "/charges": {},
    "/refunds": {},
    "/texts": {},
}
"""The work that was done, by path and key."""
calls = dict.fromkeys(done, 0)
lock = threading.Lock()
turns = count()


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    def do_POST(self) -> None:
        """Do the requested work, once for each key."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key, turn = self.headers["Idempotency-Key"], next(turns) % 3
        with lock:
            calls[self.path] += 1
            if turn == 0:
                self.answer(503, {"error": "too busy"})
                return
            again = key in done[self.path]
            done[self.path].setdefault(key, body)
            lost = " (and the answer is lost)" if turn == 1 else ""
            print(self.path, body, "again" if again else "done", lost, flush=True)
        if turn == 1:
            self.close_connection = True  # hang up without an answer
            return
        self.answer(200, {"done": True})

    def do_GET(self) -> None:
        """Return the work done so far, and how many calls it took."""
        with lock:
            self.answer(200, {"done": done, "calls": calls})

    def answer(self, status: int, value: object) -> None:
        """Send JSON."""
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log no single request."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
