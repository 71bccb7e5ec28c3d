"""Ask a process how it is."""

from __future__ import annotations

import urllib.error
import urllib.request

_SECONDS = 20


def ask_probe(port: int, path: str) -> tuple[int, str]:
    """The status and the text of a probe's answer."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}{path}", timeout=_SECONDS
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
