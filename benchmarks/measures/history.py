"""The cost of a history of finished jobs: to write it, and to drop a day."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import pieces
from benchmarks.figures import ratio
from benchmarks.measures.drain import BOX_SECONDS
from benchmarks.measures.pickup import wait
from benchmarks.peers.peer import OURS
from benchmarks.worker import PieceError
from jobs_lib.operating import maintain
from jobs_lib.postgres.database import Database

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from benchmarks.bench import Bench, Figures
    from benchmarks.worker import Row

_OFF = {"history_days": 0}
_WITH: dict[str, Mapping[str, Any]] = {"on": {}, "off": _OFF}


def measure(bench: Bench) -> Figures:
    """Measure enqueue, pick-up and drain; only a completion writes history."""
    kinds = {"enqueue": _enqueue, "pickup": wait_with, "drain": _drain}
    found = {
        f"{kind} history {name}": partial(piece, bench, settings)
        for kind, piece in kinds.items()
        for name, settings in _WITH.items()
    }
    rows = bench.alternate(found)
    bench.server.forget()

    def figure(kind: str, name: str, key: str) -> float | None:
        return rows[f"{kind} history {name}"].median(key)

    return {
        "drain_100k_history_off_jobs_s": figure("drain", "off", "jobs_s"),
        "drain_history_on_vs_off": ratio(
            figure("drain", "on", "jobs_s"), figure("drain", "off", "jobs_s")
        ),
        "enqueue_1conn_history_off_jobs_s": figure("enqueue", "off", "jobs_s"),
        "enqueue_history_on_vs_off": ratio(
            figure("enqueue", "on", "jobs_s"), figure("enqueue", "off", "jobs_s")
        ),
        "pickup_p50_history_off_ms": figure("pickup", "off", "p50_ms"),
        "pickup_p99_history_off_ms": figure("pickup", "off", "p99_ms"),
        "pickup_history_on_vs_off": ratio(
            figure("pickup", "off", "p50_ms"), figure("pickup", "on", "p50_ms")
        ),
    }


def measure_drop(bench: Bench) -> Figures:
    """Drop a day of a million rows in the way in which a running service drops it."""
    rows = bench.alternate({"drop a day of 1M": partial(_drop, bench)})
    return {"history_drop_1m_ms": rows["drop a day of 1M"].median("ms")}


def wait_with(bench: Bench, settings: Mapping[str, Any]) -> Row:
    """Measure the pick-up under these settings."""
    return wait(bench, OURS, settings)


def _enqueue(bench: Bench, settings: Mapping[str, Any]) -> Row:
    bench.renew(OURS)
    seconds = 1 if bench.quick else 4
    return pieces.run(
        bench.server,
        OURS,
        "enqueue",
        connections=1,
        seconds=seconds,
        settings=dict(settings),
    )


def _drain(bench: Bench, settings: Mapping[str, Any]) -> Row:
    jobs = bench.size(100_000)
    bench.prepare(OURS, jobs)
    return pieces.drain(bench.server, OURS, jobs, BOX_SECONDS, settings)


_DAY = """
do $$
begin
    execute format(
        'create table jobs_lib.history_%s partition of jobs_lib.history'
        ' for values in (%L)',
        to_char(now() at time zone 'UTC' - interval '1 day', 'YYYYMMDD'),
        (now() at time zone 'UTC')::date - 1
    );
end $$
"""
_ROWS = """
insert into jobs_lib.history
    (keep_until, id, origin, type, "group", outcome, attempt, enqueued_at)
select (now() at time zone 'UTC')::date - 1, n, 'local/' || mod(n, 16), 'work',
    'g' || mod(n, 1000), 'completed', 1, now()
from generate_series(1, %s) n
"""


def _drop(bench: Bench) -> Row:
    bench.renew(OURS)
    jobs = bench.size(1_000_000)
    with bench.server.connect() as connection:
        connection.execute(_DAY)
        connection.execute(_ROWS, (jobs,))
    bench.server.settle()
    database = Database(bench.server.url)
    began = time.perf_counter()
    done = maintain(database, ())
    took = time.perf_counter() - began
    if done.dropped != 1:
        raise PieceError(f"the day was not dropped: {done}")
    return {"jobs": jobs, "ms": took * 1_000}
