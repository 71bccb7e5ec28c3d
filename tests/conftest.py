"""Real servers, a fresh database per test, topics and processes.

The first test that needs a server starts it, and no server outlives the run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from hypothesis import HealthCheck, settings

from jobs_lib.devstack import KafkaBroker
from jobs_lib.postgres.database import Database
from jobs_lib.settings import default_settings
from jobs_lib.testing.databases import embedded_server
from tests import support
from tests.support.brokers import OwnBroker, await_coordinators, start_own_broker
from tests.support.budgets import Budgets
from tests.support.canary import watching_logs
from tests.support.expectations import FENCED, WATCHED, watch
from tests.support.hangs import Hangs
from tests.support.order import read_folders, read_long, start_long_first
from tests.support.roles import as_role
from tests.support.scheduler import FileScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from xdist.remote import Producer

    from jobs_lib.devstack import PostgresServer
    from tests.support import Worker

    Connect = Callable[..., psycopg.Connection[psycopg.rows.TupleRow]]

SCHEMA = "jobs_lib"
#: A bin folder of another PostgreSQL to test with, such as that of an older version.
POSTGRES_BIN = "JOBS_LIB_TEST_POSTGRES_BIN"
#: A kind of role: the tested code then connects as such a role, and the tests as a
#: superuser.
ROLE = "JOBS_LIB_TEST_ROLE"

_ADDRESS = re.compile(" at 0x[0-9a-f]")

# The machine decides where the servers' programs come from, so these stay set.
_KEPT = {POSTGRES_BIN, ROLE, "JOBS_LIB_CACHE_DIR", "JOBS_LIB_MAVEN_BASE_URL"}


def pytest_configure(config: pytest.Config) -> None:
    """Remove the developer's own settings, and count the seconds by folder."""
    for name in [name for name in os.environ if name.startswith("JOBS_LIB_")]:
        if name not in _KEPT:
            del os.environ[name]
    # A shell that starts this in the background makes it and all children ignore
    # SIGINT.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    budgets = Budgets.read(config.rootpath / "pyproject.toml")
    config.pluginmanager.register(budgets, "jobs_lib_budgets")
    config.pluginmanager.register(Hangs(), "jobs_lib_hangs")
    watch.install()
    # A busy machine takes as long as it takes for an example.
    settings.register_profile(
        "jobs_lib", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("jobs_lib")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Prepare the tests for several processes that share them.

    Names that differ between the processes are refused. After pytest-randomly has made
    the order, the longest files move to the start.
    """
    for item in items:
        if _ADDRESS.search(item.nodeid):
            raise pytest.UsageError(
                f"the name of {item.nodeid} holds an address in memory: give its "
                "parameters `ids`"
            )
    if hasattr(config, "workerinput"):
        long = read_long(config.rootpath / "pyproject.toml")
        items[:] = start_long_first(items, long)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(
    config: pytest.Config, log: Producer
) -> FileScheduler | None:
    """Let a run of files go on when one of its processes has ended."""
    if config.getvalue("dist") != "loadfile":
        return None
    folders = read_folders(config.rootpath / "pyproject.toml")
    return FileScheduler(config, log, folders)


@pytest.fixture(autouse=True)
def nothing_fails_unsaid(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which a loop failed, or work was lost, unless a mark says so."""
    expected = {
        name for mark in request.node.iter_markers("expects") for name in mark.args
    }
    if unknown := expected - WATCHED - {FENCED}:
        pytest.fail(f"unknown events {sorted(unknown)}: see tests/support/expectations")
    watch.take()
    with watch.expecting(expected):
        yield
    if found := watch.take():
        pytest.fail(
            "this happened, and the test has not said that it expects it "
            f"(`@pytest.mark.expects`):\n{found}"
        )


@pytest.fixture(scope="session", autouse=True)
def own_options() -> None:
    """Keep the options of this run from a pytest that a test starts."""
    os.environ.pop("PYTEST_ADDOPTS", None)


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """Keep what a test puts into the environment from the next test."""
    default_settings.cache_clear()
    yield
    default_settings.cache_clear()


@pytest.fixture(autouse=True)
def no_values_in_logs() -> Iterator[None]:
    """Fail a test whose log holds a value of a record or payload."""
    with watching_logs():
        yield


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this run; its data are deleted at the end."""
    chosen = os.environ.get(POSTGRES_BIN)
    with embedded_server(Path(chosen) if chosen else None) as server:
        yield server


@pytest.fixture(scope="session")
def jobs_server_url(postgres_server: PostgresServer) -> str:
    """The same server for the fixtures of the test kit."""
    return postgres_server.url


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that handlers wait for; set when the test ends."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def database_url(jobs_database_url: str) -> str:
    """The URL of a fresh, migrated database for this test alone."""
    kind = os.environ.get(ROLE)
    return as_role(jobs_database_url, kind) if kind else jobs_database_url


@pytest.fixture
def empty_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a database without our tables."""
    name = f"empty_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"create database {name}")
        yield postgres_server.url_of(name)
        connection.execute(f"drop database {name} with (force)")


@pytest.fixture
def database(database_url: str) -> Database:
    """The fresh database, as an object of the library."""
    return Database(database_url, SCHEMA)


@pytest.fixture
def connect(jobs_database_url: str) -> Iterator[Connect]:
    """A function that opens one more connection to the fresh database.

    It takes the same named arguments as `psycopg.connect`. All connections are closed
    at the end.
    """
    opened: list[psycopg.Connection[psycopg.rows.TupleRow]] = []

    def connect(**options) -> psycopg.Connection[psycopg.rows.TupleRow]:
        connection = psycopg.connect(jobs_database_url, **options)
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def admin(connect: Connect) -> psycopg.Connection[psycopg.rows.TupleRow]:
    """A connection in autocommit mode, for a test to look at the database."""
    return connect(autocommit=True)


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[KafkaBroker]:
    """A Kafka broker of this run; its data are deleted at the end."""
    # No test kills this broker: it must not seem dead while the machine is busy.
    patient = {
        "broker.session.timeout.ms": "60000",
        # Its heartbeats are half of what it costs while nobody uses it.
        "broker.heartbeat.interval.ms": "2000",
    }
    with KafkaBroker.ephemeral(properties=patient) as broker:
        await_coordinators(broker.bootstrap_servers)
        yield broker


@pytest.fixture(scope="session")
def broker_of_run() -> Iterator[OwnBroker]:
    """The broker of this run that tests may kill; its data are deleted at the end."""
    with start_own_broker() as broker:
        yield broker


@pytest.fixture
def own_broker(broker_of_run: OwnBroker) -> Iterator[OwnBroker]:
    """A broker that a test may kill; such a test starts it again.

    However the test ends, the broker's proxy then passes everything on again.
    """
    yield broker_of_run
    broker_of_run.proxy.restore()


@pytest.fixture(scope="session")
def bootstrap_servers(kafka_broker: KafkaBroker) -> str:
    """The broker's address for clients."""
    return kafka_broker.bootstrap_servers


@pytest.fixture(scope="session")
def kafka_admin(bootstrap_servers: str) -> AdminClient:
    """An admin client of the broker."""
    # As a notice it would tell of each topic that a test has deleted.
    quiet = {"log_level": 4}
    return AdminClient({"bootstrap.servers": bootstrap_servers, **quiet})


@pytest.fixture
def topic(kafka_admin: AdminClient) -> Iterator[Callable[..., str]]:
    """A function that creates a topic for this test alone and returns its name.

    `topic(partitions=1, *, prefix="test", config=None)`; all are deleted at the end.
    """
    made: list[str] = []

    def create(
        partitions: int = 1,
        *,
        prefix: str = "test",
        config: Mapping[str, str] | None = None,
    ) -> str:
        name = f"{prefix}-{uuid.uuid4().hex[:12]}"
        support.create_topic(kafka_admin, name, partitions, config)
        made.append(name)
        return name

    yield create
    support.delete_topics(kafka_admin, made)


@pytest.fixture
def wait_for() -> Callable[..., object]:
    """`wait_for(condition, timeout=…, what=…)`: see `tests.support.wait_for`."""
    return support.wait_for


@pytest.fixture
def run_process() -> Iterator[Callable[..., Worker]]:
    """A function that starts `python *args` in a process of its own.

    `run_process("-m", "jobs_lib.cli", "relay", env={…})` returns a
    `tests.support.Worker`. Processes that still run at the end are killed.
    """
    workers: list[Worker] = []

    def run(*args: str, env: Mapping[str, str] | None = None) -> Worker:
        worker = support.Worker(*args, env=env)
        workers.append(worker)
        return worker

    yield run
    for worker in workers:
        worker.close()


@pytest.fixture
def start_process(run_process: Callable[..., Worker]) -> Callable[..., Worker]:
    """A function that starts an app of `tests/support/processes` in its own process.

    `start_process("relay", url, topic="states")`: the options are those of the kind,
    and settings of its app. With `dies_at={"block.produced": 2}` the process kills
    itself at the second event of this name.
    """

    def start(
        kind: str, url: str, env: Mapping[str, str] | None = None, **options: object
    ) -> Worker:
        module = "tests.support.processes"
        return run_process("-m", module, kind, url, json.dumps(options), env=env)

    return start
