"""Jobs and a transactional outbox on PostgreSQL, for services that talk over Kafka.

Each name is imported at its first use: pytest loads this package in every run of
everybody who has it installed, for the fixtures of :mod:`jobs_lib.testing.plugin`.
And what a name needs to connect or to check values is loaded when it does so.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jobs_lib.version import __version__

if TYPE_CHECKING:
    from jobs_lib.app import App
    from jobs_lib.backoff import Retry, exponential
    from jobs_lib.consuming.record import Record
    from jobs_lib.errors import (
        ConfigurationError,
        EnqueueError,
        JobsError,
        NoTransactionError,
        PayloadError,
    )
    from jobs_lib.jobs.around import Draft
    from jobs_lib.jobs.batch import Item
    from jobs_lib.jobs.limit import Workers
    from jobs_lib.jobs.model import Cancel, Discard, Job, RetryAfter, Snooze
    from jobs_lib.jobs.rate import Rate
    from jobs_lib.outbox.entity import Gone
    from jobs_lib.settings import Settings

__all__ = [
    "App",
    "Cancel",
    "ConfigurationError",
    "Discard",
    "Draft",
    "EnqueueError",
    "Gone",
    "Item",
    "Job",
    "JobsError",
    "NoTransactionError",
    "PayloadError",
    "Rate",
    "Record",
    "Retry",
    "RetryAfter",
    "Settings",
    "Snooze",
    "Workers",
    "__version__",
    "exponential",
]

_MODULES = {
    "App": "app",
    "Cancel": "jobs.model",
    "ConfigurationError": "errors",
    "Discard": "jobs.model",
    "Draft": "jobs.around",
    "EnqueueError": "errors",
    "Gone": "outbox.entity",
    "Item": "jobs.batch",
    "Job": "jobs.model",
    "JobsError": "errors",
    "NoTransactionError": "errors",
    "PayloadError": "errors",
    "Rate": "jobs.rate",
    "Record": "consuming.record",
    "Retry": "backoff",
    "RetryAfter": "jobs.model",
    "Settings": "settings",
    "Snooze": "jobs.model",
    "Workers": "jobs.limit",
    "exponential": "backoff",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == "App" and not _finds_libpq():
            importlib.import_module("psycopg")  # fails, and says where it has looked
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ImportError as error:
        if "no pq wrapper" in str(error):
            error.add_note(
                "libpq is missing: pip install 'jobs-lib[binary]' brings one, or "
                "install it on the system (Debian: libpq5)"
            )
        raise
    value = globals()[name] = getattr(module, name)
    return value


def _finds_libpq() -> bool:
    """Whether psycopg will find one: told here, where the app is imported.

    An app loads psycopg itself when it connects, which may be long after.
    """
    from importlib.util import find_spec

    if find_spec("psycopg_c") or find_spec("psycopg_binary"):
        return True
    from ctypes.util import find_library

    return find_library("pq") is not None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
