"""Cancel jobs: remove waiting ones, and ask running ones to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.errors import OperatingError
from jobs_lib.operating.session import bounded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs_lib.postgres.database import Database

LIMIT = 1_000


def cancel(
    database: Database,
    jobs: Iterable[int],
    *,
    keep: int = 1,
    stale_after: float = 5.0,
) -> dict[int, str]:
    """Cancel jobs in one transaction; returns what became of each.

    ``cancelled``: it is gone, and will not run. ``requested``: it is claimed, so it may
    be running, and its executor was asked to stop it; it may still end well.
    ``missing``: it is not among the unfinished jobs.

    Args:
        database: where the jobs are.
        jobs: their ids, 1,000 at most.
        keep: days for which the history keeps cancelled jobs; 0 for not at all.
        stale_after: seconds without a heartbeat until a process counts as dead, the
            setting of that name: jobs that a dead process has claimed do not run.

    Raises:
        OperatingError: too many ids, or locks could not be taken within five seconds.
    """
    ids = sorted(set(jobs))
    if len(ids) > LIMIT:
        raise OperatingError(
            f"cancel at most {LIMIT:,} jobs at once, not {len(ids):,}: their origins "
            "stand still meanwhile"
        )
    if not 0 <= keep <= 3_660:
        raise OperatingError(f"keep must be 0 to 3,660 days, not {keep}")
    if not ids:
        return {}
    queries = database.queries
    with database.connect("cancel") as connection, bounded(connection, database):
        # Before it looks for the jobs: a move of the home topic would take them to
        # other origins meanwhile, and none would be found.
        connection.execute(queries["hold_home"])
        found = connection.execute(queries["find_origins"], {"ids": ids}).fetchall()
        values = {
            "origins": [origin for (origin,) in found],
            "ids": ids,
            "keep": keep,
            "stale_after": stale_after,
        }
        connection.execute(queries["make_jobs_origins"], values)
        connection.execute(queries["lock_jobs_origins"], values)
        became: dict[int, str] = dict(
            connection.execute(queries["cancel_jobs"], values).fetchall()
        )
    return {job: became.get(job, "missing") for job in ids}
