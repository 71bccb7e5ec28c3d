"""The sessions that wait for locks, as PostgreSQL shows them."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.server import Server

_EVERY = 0.02
_QUERY = """
select count(*), count(*) filter (
    where wait_event_type = 'Lock'
    -- Two that make a table longer at once, for microseconds.
    and wait_event <> 'extend'
), (
    select string_agg(concat_ws(' ', l.locktype, l.mode, l.relation::regclass), ', ')
    from pg_locks l where not l.granted and l.pid = any (array_agg(a.pid))
)
from pg_stat_activity a
where application_name like 'jobs_lib executor%' and state = 'active'
-- Claims, by a comment in their text. Completions do wait, for a take-over to commit.
and query like '%is being taken over is skipped%'
"""


@contextlib.contextmanager
def watch_locks(
    server: Server, tell: Callable[[str], None]
) -> Iterator[dict[str, int]]:
    """Count meanwhile the samples, and the claims in them: running, and waiting.

    It prints what claims wait for.
    """
    found = {"samples": 0, "running": 0, "claims": 0}
    stop = threading.Event()

    def watch() -> None:
        with server.connect() as connection:
            while not stop.wait(_EVERY):
                row = connection.execute(_QUERY).fetchone()
                assert row is not None
                found["samples"] += 1
                found["running"] += row[0]
                found["claims"] += row[1]
                if row[1]:
                    tell(f"{row[1]} claims wait: {row[2]}")

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
