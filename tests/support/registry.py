"""A schema registry in this process: the part of Confluent's interface that is used."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator


class StubRegistry:
    """Its schemas, and how it behaves. It compares no schemas, as real ones do."""

    def __init__(self) -> None:
        self.url = ""
        self.subjects: dict[str, list[int]] = {}
        """The ids by version, from 1 on."""
        self.texts: dict[int, str] = {}
        self.levels: dict[str, str] = {"": "BACKWARD"}
        """The level of each subject; the empty subject has the level of all others."""
        self.asked: list[str] = []
        """All requests, such as ``GET /config``."""
        self.status = 0
        """The status of every answer; 0 to answer well."""

    def add(self, subject: str, schema: Any) -> int:
        """Register a schema as the next version; return its id."""
        text = json.dumps(schema)
        ids = {known: one for one, known in self.texts.items()}
        schema_id = ids.get(text, len(self.texts) + 1)
        self.texts[schema_id] = text
        versions = self.subjects.setdefault(subject, [])
        if schema_id not in versions:
            versions.append(schema_id)
        return schema_id

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        self.asked.append(f"{method} {path}")
        if self.status:
            return self.status, {"error_code": self.status, "message": "not now"}
        match method, path.strip("/").split("/"):
            case "POST", ["subjects", subject, "versions"]:
                return 200, {"id": self.add(subject, json.loads(body["schema"]))}
            case "POST", ["subjects", subject]:
                for version, one in enumerate(self.subjects.get(subject, ()), 1):
                    if json.loads(self.texts[one]) == json.loads(body["schema"]):
                        return 200, self._version(subject, version)
            case "GET", ["subjects", subject, "versions"] if subject in self.subjects:
                return 200, [*range(1, len(self.subjects[subject]) + 1)]
            case "GET", ["subjects", subject, "versions", version]:
                return 200, self._version(subject, int(version))
            case "GET", ["schemas", "ids", number] if int(number) in self.texts:
                return 200, {"schema": self.texts[int(number)]}
            case "GET", ["config", *subject] if "".join(subject) in self.levels:
                return 200, {"compatibilityLevel": self.levels["".join(subject)]}
            case "PUT", ["config", *subject]:
                self.levels["".join(subject)] = body["compatibility"]
                return 200, body
        return 404, {"error_code": 40403, "message": "not found"}

    def _version(self, subject: str, version: int) -> dict[str, Any]:
        schema_id = self.subjects[subject][version - 1]
        return {
            "subject": subject,
            "version": version,
            "id": schema_id,
            "schema": self.texts[schema_id],
        }


@contextlib.contextmanager
def serving() -> Iterator[StubRegistry]:
    """A registry that listens on a port of its own."""
    registry = StubRegistry()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers["Content-Length"] or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            path = unquote(urlsplit(self.path).path)
            status, found = registry.answer(self.command, path, body)
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _answer

        def log_message(self, *arguments: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        registry.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()
