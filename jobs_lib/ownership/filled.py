"""Find the origins that hold jobs, as often as the server can bear."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jobs_lib.backoff import rest

if TYPE_CHECKING:
    import psycopg

    from jobs_lib.postgres.database import Database

_SHARE = 0.05


class FilledOrigins:
    """Asks which origins hold jobs; used by one thread.

    Under an old snapshot the query also reads all jobs that came and went. Then the
    last answer counts for a while, so that queries take a twentieth of the time.
    """

    def __init__(self, database: Database) -> None:
        self._query = database.queries["filled_origins"]
        self._found: list[str] = []
        self._rest = 0.0
        self._ask_at = 0.0

    def find(self, connection: psycopg.Connection[Any]) -> list[str]:
        """The origins that hold jobs, declared or not; perhaps of the last answer."""
        began = time.monotonic()
        if began < self._ask_at:
            return self._found
        self._found = [row[0] for row in connection.execute(self._query)]
        ended = time.monotonic()
        self._rest = rest(ended - began, _SHARE, self._rest)
        self._ask_at = ended + self._rest
        return self._found
