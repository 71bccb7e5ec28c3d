"""Jobs and a transactional outbox on PostgreSQL, for services that talk over Kafka."""

from __future__ import annotations

__all__ = [
    "App",
    "Cancel",
    "ConfigurationError",
    "Discard",
    "Draft",
    "EnqueueError",
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
    "__version__",
    "exponential",
]

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
from jobs_lib.jobs.model import Cancel, Discard, Job, RetryAfter, Snooze
from jobs_lib.jobs.rate import Rate
from jobs_lib.settings import Settings
from jobs_lib.version import __version__
