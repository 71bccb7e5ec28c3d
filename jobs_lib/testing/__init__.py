"""A test kit: a real database for each test, jobs that run on demand, assertions.

pytest finds the fixtures by itself: see :mod:`jobs_lib.testing.plugin`. Needs
``pip install 'jobs-lib[testing]'``. Each name is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs_lib.testing.enqueued import Enqueued
    from jobs_lib.testing.jobs import Jobs
    from jobs_lib.testing.outbox import Outbox, Sent
    from jobs_lib.testing.records import make_record

__all__ = ["Enqueued", "Jobs", "Outbox", "Sent", "make_record"]

_MODULES = {
    "Enqueued": "enqueued",
    "Jobs": "jobs",
    "Outbox": "outbox",
    "Sent": "outbox",
    "make_record": "records",
}


def __getattr__(name: str) -> Any:
    # pytest loads this package in each of its runs: it loads nothing more by itself.
    from jobs_lib.lazy import import_name

    return import_name(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
