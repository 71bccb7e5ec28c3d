"""An app on the fresh database, and one of its job types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.apps import make_app

if TYPE_CHECKING:
    from jobs_lib import App, Job
    from jobs_lib.jobs.type import JobType


@pytest.fixture
def app(database_url: str) -> App:
    """An app with quick settings; each test adds its types."""
    return make_app(database_url)


@pytest.fixture
def notify(app: App) -> JobType[...]:
    """A job type with a group."""

    @app.job(group="customer")
    def notify(job: Job, order: int, customer: str | None = None) -> None: ...

    return notify
