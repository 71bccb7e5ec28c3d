"""Scaling: executors side by side on one database."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.ownership.locks import watch_locks
from benchmarks.ownership.pods import deployed, wait_until

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.worker import Row

_COUNTS = (1, 2, 4)


def measure(bench: Bench) -> Figures:
    """Jobs per second of 1, 2 and 4 executors, each in a process of its own."""
    rows = bench.alternate(
        {f"{n} executors": partial(drain, bench, n) for n in _COUNTS}
    )
    return {
        "claims_per_s_1_2_4_executors": [
            rows[f"{n} executors"].median("jobs_s") for n in _COUNTS
        ],
        "drain_claims_waiting_on_locks": sum(
            row["waiting"] for n in _COUNTS for row in rows[f"{n} executors"].rows
        ),
    }


def drain(bench: Bench, executors: int) -> Row:
    """Give no-op jobs all at once to executors that share the origins."""
    jobs = bench.size(100_000)
    with (
        deployed(bench.server, None, partitions=16) as pods,
        bench.server.connect() as connection,
    ):
        names = [f"pod-{n}" for n in range(executors)]
        pods.start(*names)
        pods.await_shared(connection, *names)
        with watch_locks(bench.server, bench.tell) as waiting:
            connection.execute(
                "select count(jobs_lib.enqueue('nothing', '{}', origin => o))"
                " from (select 'local/' || n %% 16 as o"
                " from generate_series(1, %s) n) spread",
                (jobs,),
            )
            began = time.monotonic()
            query = "select from jobs_lib.jobs limit 1"
            ended = wait_until(
                lambda: not connection.execute(query).rowcount, 120, "all have run"
            )
    return {"jobs_s": jobs / (ended - began), "waiting": waiting["claims"]}
