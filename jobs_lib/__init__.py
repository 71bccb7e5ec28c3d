"""Jobs and a transactional outbox on PostgreSQL, for services that talk over Kafka.

Each name is imported at its first use: wherever the package is installed, every run of
pytest loads it for the fixtures of :mod:`jobs_lib.testing.plugin`. Modules for
connecting and for checking values are loaded when they are needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jobs_lib.version import __version__

if TYPE_CHECKING:
    from jobs_lib.app import App
    from jobs_lib.backoff import Retry, exponential
    from jobs_lib.consuming.merging import EntityState
    from jobs_lib.consuming.model_table import create_read_model
    from jobs_lib.consuming.record import Record
    from jobs_lib.errors import (
        AccessError,
        AnswerError,
        ConfigurationError,
        DevStackError,
        EnqueueError,
        FencedError,
        GrowingError,
        JobsError,
        NoTransactionError,
        OperatingError,
        OutOfTurnError,
        PayloadError,
        PlaceError,
        RecordError,
        ReexportError,
        RefusedError,
        RequestConflictError,
        SchemaVersionError,
        StoredPayloadError,
        TopicError,
        UnavailableError,
        UnknownCommitError,
        UnknownPublishError,
    )
    from jobs_lib.jobs.batch import Item
    from jobs_lib.jobs.job import Cancel, Discard, Job, RetryAfter, Snooze
    from jobs_lib.jobs.limit import Workers
    from jobs_lib.jobs.middleware import Draft
    from jobs_lib.jobs.rate import Rate
    from jobs_lib.naming import Exact
    from jobs_lib.outbox.capture import capture_changes, stop_capturing
    from jobs_lib.outbox.keys import join_key, split_key
    from jobs_lib.outbox.topic import Gone
    from jobs_lib.postgres.migrate import (
        include_name,
        migrate,
        upgrade,
    )
    from jobs_lib.service.service import Service
    from jobs_lib.settings import Settings, load_settings
    from jobs_lib.streams.event import Event, Published
    from jobs_lib.streams.keys import derive_key

__all__ = [
    "AccessError",
    "AnswerError",
    "App",
    "Cancel",
    "ConfigurationError",
    "DevStackError",
    "Discard",
    "Draft",
    "EnqueueError",
    "EntityState",
    "Event",
    "Exact",
    "FencedError",
    "Gone",
    "GrowingError",
    "Item",
    "Job",
    "JobsError",
    "NoTransactionError",
    "OperatingError",
    "OutOfTurnError",
    "PayloadError",
    "PlaceError",
    "Published",
    "Rate",
    "Record",
    "RecordError",
    "ReexportError",
    "RefusedError",
    "RequestConflictError",
    "Retry",
    "RetryAfter",
    "SchemaVersionError",
    "Service",
    "Settings",
    "Snooze",
    "StoredPayloadError",
    "TopicError",
    "UnavailableError",
    "UnknownCommitError",
    "UnknownPublishError",
    "Workers",
    "__version__",
    "capture_changes",
    "create_read_model",
    "derive_key",
    "exponential",
    "include_name",
    "join_key",
    "load_settings",
    "migrate",
    "split_key",
    "stop_capturing",
    "upgrade",
]

_MODULES = {
    "AccessError": "errors",
    "AnswerError": "errors",
    "App": "app",
    "Cancel": "jobs.job",
    "ConfigurationError": "errors",
    "DevStackError": "errors",
    "Discard": "jobs.job",
    "Draft": "jobs.middleware",
    "EnqueueError": "errors",
    "EntityState": "consuming.merging",
    "Event": "streams.event",
    "Exact": "naming",
    "FencedError": "errors",
    "GrowingError": "errors",
    "Gone": "outbox.topic",
    "Item": "jobs.batch",
    "Job": "jobs.job",
    "JobsError": "errors",
    "NoTransactionError": "errors",
    "OperatingError": "errors",
    "OutOfTurnError": "errors",
    "PayloadError": "errors",
    "PlaceError": "errors",
    "Published": "streams.event",
    "Rate": "jobs.rate",
    "Record": "consuming.record",
    "RecordError": "errors",
    "ReexportError": "errors",
    "RefusedError": "errors",
    "RequestConflictError": "errors",
    "Retry": "backoff",
    "RetryAfter": "jobs.job",
    "SchemaVersionError": "errors",
    "Service": "service.service",
    "Settings": "settings",
    "Snooze": "jobs.job",
    "StoredPayloadError": "errors",
    "TopicError": "errors",
    "UnavailableError": "errors",
    "UnknownCommitError": "errors",
    "UnknownPublishError": "errors",
    "Workers": "jobs.limit",
    "capture_changes": "outbox.capture",
    "create_read_model": "consuming.model_table",
    "derive_key": "streams.keys",
    "exponential": "backoff",
    "include_name": "postgres.migrate",
    "join_key": "outbox.keys",
    "load_settings": "settings",
    "migrate": "postgres.migrate",
    "split_key": "outbox.keys",
    "stop_capturing": "outbox.capture",
    "upgrade": "postgres.migrate",
}


def __getattr__(name: str) -> Any:
    # pytest loads this package in each of its runs: it loads nothing more by itself.
    from jobs_lib.extras import explain_missing, require_driver
    from jobs_lib.lazy import import_name

    try:
        # An app loads psycopg itself when it connects, which may be much later.
        if name == "App":
            require_driver()
            if not _finds_libpq():
                importlib.import_module("psycopg")  # fails: says where it has looked
        return import_name(__name__, _MODULES, name)
    except ImportError as error:
        if told := explain_missing(error):
            error.add_note(told)
        raise


def _finds_libpq() -> bool:
    """Check that psycopg will find libpq, when the app is imported."""
    from importlib.util import find_spec

    if find_spec("psycopg_c") or find_spec("psycopg_binary"):
        return True
    from ctypes.util import find_library

    return find_library("pq") is not None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
