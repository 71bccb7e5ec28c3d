"""Drain, and its own SQL, which pgbench sends again on a copy of the same table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import pieces
from benchmarks.figures import ratio
from benchmarks.measures.drain import drain_all
from benchmarks.peers.peer import OURS
from benchmarks.replay import Recording
from benchmarks.worker import PieceError, working

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Figures
    from benchmarks.worker import Row

# The queries of jobs_lib/sql that claim and complete a job.
STATEMENTS = ("claim", "complete")
# The rows of these tables say which process may send these queries.
_OWNERSHIP = ("processes", "origins")
_ROUNDS = 5
_LIMIT_SECONDS = 600.0


def measure(bench: Bench) -> Figures:
    """Drain 100,000 jobs with one client each, and take the median of five."""
    jobs = bench.size(100_000)
    recording, owners = _record(bench, jobs)

    def replay() -> Row:
        bench.prepare(OURS, jobs)
        _restore_owners(bench, owners)
        took = recording.replay()
        if bench.server.ask(OURS.unfinished):
            raise PieceError("the same statements left jobs unfinished")
        return {"jobs": jobs, "jobs_s": jobs / took, **recording.counts}

    rows = bench.alternate(
        {"drain": lambda: drain_all(bench, OURS, jobs), "raw sql": replay},
        rounds=max(bench.rounds, _ROUNDS),
    )
    bench.server.forget()
    raw = rows["raw sql"].median("jobs_s")
    return {
        "raw_sql_jobs_s": raw,
        "raw_sql_jobs_per_claim": jobs / recording.counts[STATEMENTS[0]],
        "drain_vs_raw_sql": ratio(rows["drain"].median("jobs_s"), raw),
    }


def _record(bench: Bench, jobs: int) -> tuple[Recording, dict[str, bytes]]:
    bench.prepare(OURS, jobs)
    recording = Recording(bench.server, STATEMENTS)
    recording.start()
    given = {"jobs": jobs, "seconds": _LIMIT_SECONDS}
    with working(bench.server, OURS, {}, **given) as worker:
        worker.await_event("end", _LIMIT_SECONDS)
        pieces.await_finish(bench.server, OURS.unfinished)
        with bench.server.connect() as connection:
            owners = {}
            for table in _OWNERSHIP:
                query = f"copy jobs_lib.{table} to stdout".encode()
                with connection.cursor().copy(query) as copy:
                    owners[table] = b"".join(copy)
    recording.stop()
    bench.tell(f"recorded: {recording.counts}")
    return recording, owners


def _restore_owners(bench: Bench, owners: dict[str, bytes]) -> None:
    """Make the owner of the recording the owner again."""
    with bench.server.connect() as connection:
        connection.execute("set session_replication_role = replica")
        for table, rows in owners.items():
            connection.execute(f"delete from jobs_lib.{table}".encode())
            query = f"copy jobs_lib.{table} from stdin".encode()
            with connection.cursor().copy(query) as copy:
                copy.write(rows)
