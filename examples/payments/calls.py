"""Ask other services about payments, and count what they do not know."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from jobs_lib import App

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request


class Api:
    """The API of another service, whose address is in the environment."""

    def __init__(self, app: App, name: str) -> None:
        self._app = app
        self._name = name
        url = os.environ.get(f"{name.upper()}_URL", "")
        self._client = httpx.Client(base_url=url, timeout=5)

    def ask(self, payments: list[int]) -> dict[int, Any]:
        """Ask what the service knows of these payments, in one request.

        Unknown ones are left out, and counted in the table ``missing``.

        Raises:
            httpx.HTTPError: it does not answer; the records are tried again.
        """
        reply = self._client.post("/", json=payments)
        reply.raise_for_status()
        found = {int(payment): known for payment, known in reply.json().items()}
        if unknown := [one for one in payments if one not in found]:
            # It is a transaction of its own: it counts even if the block is undone.
            with self._app.transaction() as conn, conn.cursor() as cursor:
                cursor.executemany(
                    "insert into missing values (%s, %s)",
                    [(self._name, one) for one in unknown],
                )
        return found
