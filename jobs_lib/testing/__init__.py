"""A test kit: a real database for each test, jobs that run on demand, assertions.

pytest finds the fixtures by itself: see :mod:`jobs_lib.testing.plugin`. Needs
``pip install 'jobs-lib[testing]'``.
"""

from __future__ import annotations

__all__ = ["Enqueued", "Jobs", "Outbox", "Sent", "make_record"]

from jobs_lib.testing.enqueued import Enqueued
from jobs_lib.testing.jobs import Jobs
from jobs_lib.testing.outbox import Outbox, Sent
from jobs_lib.testing.records import make_record
