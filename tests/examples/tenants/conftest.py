"""The servers of the example, and its processes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING
from uuid import uuid4

import httpx
import pytest

from jobs_lib.postgres.migrate import migrate
from jobs_lib.settings import load_settings
from tests.support.tenants import APP, Stage, make_tables
from tests.support.topics import create_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


SCHEMA = "jobs_lib"


@pytest.fixture(scope="session")
def jobs_database_setup() -> Callable[[str], None]:
    return make_tables


@pytest.fixture(scope="module")
def make_stage(
    jobs_databases, jobs_database_setup, broker_of_run, tmp_path_factory
) -> Iterator[Callable[..., Stage]]:
    """A function that makes a stage on a database and a topic of its own."""
    with ExitStack() as opened:

        def make(*, proxied: bool = False, **settings) -> Stage:
            name = settings.setdefault("environment", f"e{uuid4().hex[:8]}")
            url = opened.enter_context(jobs_databases.fresh(jobs_database_setup))
            migrate(url, SCHEMA, load_settings(environment=name))
            own = broker_of_run.bootstrap_servers
            servers = broker_of_run.proxied if proxied else own
            stage = Stage(
                url, servers, own, tmp_path_factory.mktemp("stage"), **settings
            )
            opened.callback(stage.close)
            if proxied:
                create_topic(broker_of_run.admin, stage.topic, 2)
            else:
                stage.run("topics", "apply", APP)
            return stage

        yield make


@pytest.fixture
def http(stage) -> Iterator[httpx.Client]:
    """An HTTP client of the API."""
    with httpx.Client(base_url=stage.address, timeout=60) as client:
        yield client
