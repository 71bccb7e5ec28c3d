"""The fixtures, as pytest finds them wherever jobs_lib is installed.

    jobs                the app's jobs in a fresh database: see Jobs
    outbox              what was written to topics: see Outbox
    jobs_app            the app; from the option jobs_lib_app, or yours
    jobs_database_url   a fresh database of this test alone
    jobs_database_setup makes your own tables, once; yours
    jobs_server_url     the server; an embedded one, or yours

"Yours" are fixtures to redefine in your conftest.py. Without these fixtures your tests
need neither a server nor the packages of the extra ``testing``: each is imported when
it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib.app import App
    from jobs_lib.testing.databases import Databases
    from jobs_lib.testing.jobs import Jobs
    from jobs_lib.testing.outbox import Outbox

_OPTION = "jobs_lib_app"
_CHECK_LOCKS = "jobs_lib_check_locks"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the app."""
    parser.addini(
        _OPTION, "jobs_lib: the app under test as module:attribute", default=""
    )
    parser.addini(
        _CHECK_LOCKS,
        "jobs_lib: fail a state that is sent before its entity is locked",
        type="bool",
        default=True,
    )


@pytest.fixture(scope="session")
def jobs_server_url() -> Iterator[str]:
    """The URL of a PostgreSQL server, started for this run.

    Redefine it to use another; its user must be allowed to create databases.
    """
    from jobs_lib.testing.databases import embedded_server

    with embedded_server() as server:
        yield server.url


@pytest.fixture(scope="session")
def jobs_databases(jobs_server_url: str) -> Iterator[Databases]:
    """Makes the fresh databases."""
    from jobs_lib.settings import load_settings
    from jobs_lib.testing.databases import Databases

    with Databases(jobs_server_url, load_settings()) as databases:
        yield databases


@pytest.fixture(scope="session")
def jobs_database_setup() -> Callable[[str], None] | None:
    """Redefine it to return a function that makes your tables in the database at a
    URL. It is called once; each test gets a copy of the result."""
    return None


@pytest.fixture
def jobs_database_url(
    jobs_databases: Databases, jobs_database_setup: Callable[[str], None] | None
) -> Iterator[str]:
    """The URL of a fresh, migrated database of this test alone."""
    with jobs_databases.fresh(jobs_database_setup) as url:
        yield url


@pytest.fixture
def jobs_app(pytestconfig: pytest.Config) -> App:
    """The app under test, which the option ``jobs_lib_app`` names."""
    from jobs_lib.app import load_app

    path = pytestconfig.getini(_OPTION)
    if not path:
        raise pytest.UsageError(
            f"no app is named for the tests: set the pytest option {_OPTION}, as in "
            f'{_OPTION} = "service:app", or define a fixture jobs_app that returns it'
        )
    return load_app(path)


@pytest.fixture
def jobs(
    jobs_app: App,
    jobs_database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> Iterator[Jobs]:
    """The jobs of the app under test, in a fresh database of this test alone."""
    from jobs_lib.testing.jobs import Jobs

    # For code that asks the environment itself.
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", jobs_database_url)
    locked = pytestconfig.getini(_CHECK_LOCKS)
    with Jobs(jobs_app, jobs_database_url, locked=locked) as jobs:
        yield jobs


@pytest.fixture
def outbox(jobs: Jobs) -> Outbox:
    """The records that the test's code has written to topics."""
    from jobs_lib.testing.outbox import Outbox

    return Outbox(jobs)
