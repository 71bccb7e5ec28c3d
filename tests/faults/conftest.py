"""A server that these tests alone use and may stop, and workers on its databases."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import psycopg
import pytest

from jobs_lib.testing.databases import Databases, embedded_server
from tests.faults.helpers import TABLES
from tests.support.apps import make_app

if TYPE_CHECKING:
    from jobs_lib import App


@pytest.fixture(scope="package")
def own_server():
    """A PostgreSQL server that may be stopped, killed and started again."""
    with embedded_server() as server:
        yield server


@pytest.fixture(scope="package")
def own_databases(own_server):
    """Databases on this server."""
    with Databases(own_server.url) as databases:
        yield databases


@pytest.fixture
def own_url(own_databases):
    """The URL of a fresh database on it, with the tables that workers write to."""
    with own_databases.fresh() as url:
        with psycopg.connect(url) as connection:
            connection.execute(TABLES)
        yield url


@pytest.fixture
def url(database_url):
    """The URL of such a database on the server of all tests."""
    with psycopg.connect(database_url) as connection:
        connection.execute(TABLES)
    return database_url


@pytest.fixture
def admin(url, connect):
    """A connection for a test to look at the database."""
    return connect(autocommit=True)


@pytest.fixture
def app(url) -> App:
    """An app on the server of all tests."""
    return make_app(url)


@pytest.fixture
def start_worker(run_process):
    """`start_worker(url, workers=2)` starts an executor of tests/faults/worker.py."""

    def start(url: str, env=None, **settings):
        worker = run_process(
            "-m", "tests.faults.worker", url, json.dumps(settings), env=env
        )
        worker.wait_for_line("^started$")
        return worker

    return start
