"""The message of a stopping process about the jobs that it waits for."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from jobs_lib import telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jobs_lib.jobs.job import Job

_SOON = 0.3
"""Seconds in which quick jobs end; until then nothing is said."""
_SHOWN = 5
"""How many ids of each type are shown."""


@contextmanager
def telling(
    find_running: Callable[[], Iterable[Job]], patience: float
) -> Iterator[None]:
    """Say once which jobs still run, if the wait inside is long.

    Args:
        find_running: finds the running jobs, from another thread.
        patience: seconds that they have to end.
    """

    def tell() -> None:
        if running := [*find_running()]:
            telemetry.logger.warning("%s", describe_wait(running, patience))

    timer = threading.Timer(_SOON, tell)
    timer.daemon = True
    # The interpreter may be at its end, or the process have no more threads: then the
    # stop goes on without a word.
    with suppress(RuntimeError):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def describe_wait(running: Iterable[Job], patience: float) -> str:
    """Say which jobs it waits for, how long at most, and what a second signal does."""
    ids: dict[str, list[int]] = {}
    for job in running:
        ids.setdefault(job.type, []).append(job.id)
    number = sum(map(len, ids.values()))
    return (
        f"stopping: {number} job{' still runs' if number == 1 else 's still run'}, for "
        f"{patience:g} s at most: "
        + "; ".join(f"{name} {_name_few(ids[name])}" for name in sorted(ids))
        + ". A second Ctrl-C or signal ends this process at once: then they run again "
        "elsewhere, and no attempt is counted"
    )


def _name_few(ids: list[int]) -> str:
    few = ", ".join(map(str, sorted(ids)[:_SHOWN]))
    return few if len(ids) <= _SHOWN else f"{few}, … ({len(ids)} in all)"
