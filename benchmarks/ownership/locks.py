"""Who waits for locks, as PostgreSQL shows it."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.server import Server

_EVERY = 0.02
_QUERY = """
select count(*) from pg_stat_activity
where application_name like 'jobs_lib executor%' and wait_event_type = 'Lock'
-- Two that make a table longer at once, for microseconds.
and wait_event <> 'extend'
"""


@contextlib.contextmanager
def watch_locks(server: Server) -> Iterator[dict[str, int]]:
    """Count meanwhile how many looks there were, and claims seen to wait in them."""
    found = {"samples": 0, "claims": 0}
    stop = threading.Event()

    def watch() -> None:
        with server.connect() as connection:
            while not stop.wait(_EVERY):
                row = connection.execute(_QUERY).fetchone()
                assert row is not None
                found["samples"] += 1
                found["claims"] += row[0]

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
