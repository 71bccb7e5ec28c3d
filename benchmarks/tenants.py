"""How many tenants the example creates in a second: `python -m benchmarks.tenants`.

The API, one processor and the provider are processes of their own, on PostgreSQL with
durable commits. The callers are threads of this process, on the same machine.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from threading import local
from uuid import uuid4

import psycopg

from benchmarks.figures import percentile
from benchmarks.server import Server
from examples.flights.pods import Processes
from jobs_lib.devstack import KafkaBroker
from jobs_lib.devstack.kafka import FAST_JVM
from jobs_lib.devstack.ports import free_port
from jobs_lib.kafka.client import create_topic, make_admin
from jobs_lib.postgres.migrate import migrate
from jobs_lib.settings import load_settings

TENANTS = 5_000
WARM = 200
CALLERS = 32
PARTITIONS = 6
_TABLES = Path(__file__).parents[1] / "examples/tenants/tables.sql"
_DEADLINE = 120.0


def main() -> None:
    """Measure, and print one line of JSON."""
    # The exit unwinds the stack, so that no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Server() as server, KafkaBroker.ephemeral(jvm=FAST_JVM) as broker:
        print(json.dumps(measure_tenants(server, broker)))


def measure_tenants(
    server: Server, broker: KafkaBroker, tenants: int = TENANTS
) -> dict[str, float]:
    """Create tenants over HTTP, each by one request, until the table has them.

    Args:
        server: its database is made anew.
        broker: gets a topic of its own for this run.
        tenants: how many.

    Returns the requests in a second, until the last answer and until the table has
    them all, and how long an answer takes.
    """
    servers, run = broker.bootstrap_servers, f"e{uuid4().hex[:8]}"
    settings = load_settings(kafka_bootstrap_servers=servers, environment=run)
    server.renew()
    migrate(server.url, settings.schema_name, settings)
    with psycopg.connect(server.url) as connection:
        connection.execute(_TABLES.read_bytes())
    compacted = {"cleanup.policy": "compact"}
    create_topic(make_admin(settings), f"{run}.tenants", PARTITIONS, compacted)
    with tempfile.TemporaryDirectory() as folder:
        return _measure(server, servers, run, Path(folder), tenants)


def _measure(
    server: Server, kafka: str, environment: str, folder: Path, tenants: int
) -> dict[str, float]:
    port, provider = free_port(), free_port()
    env = {
        "JOBS_LIB_DATABASE_URL": server.url,
        "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": kafka,
        "JOBS_LIB_ENVIRONMENT": environment,
        "PROVIDER_ADDRESS": f"http://127.0.0.1:{provider}",
        "PYTHONPATH": os.getcwd(),
    }
    api = ["examples.tenants.api:web", "--no-access-log", "--port", str(port)]
    ledger = str(folder / "ledger")
    with Processes(folder) as processes:
        processes.start(
            "provider", "examples.tenants.provider", ledger, str(provider), env=env
        )
        processes.start("api", "uvicorn", *api, env=env)
        processes.start(
            *("processor", "jobs_lib.cli", "run", "examples.tenants.processor:app"),
            env=env,
        )
        callers = _Callers(port)
        callers.await_api()
        callers.create(0, WARM)
        _await_rows(server, WARM)
        begun = time.monotonic()
        waits = callers.create(WARM, WARM + tenants)
        answered = time.monotonic() - begun
        _await_rows(server, WARM + tenants)
        visible = time.monotonic() - begun
        processes.check()
    return {
        "tenant_requests_s": round(tenants / visible, 1),
        "tenant_answers_s": round(tenants / answered, 1),
        "tenant_answer_p50_ms": round(1000 * (percentile(waits, 0.5) or 0.0), 1),
        "tenant_answer_p99_ms": round(1000 * (percentile(waits, 0.99) or 0.0), 1),
        "tenant_callers": CALLERS,
    }


class _Callers:
    """Threads that create tenants, each on a connection of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._own = local()

    def await_api(self) -> None:
        """Wait until the API answers."""
        deadline = time.monotonic() + _DEADLINE
        while True:
            try:
                connection = HTTPConnection("127.0.0.1", self._port)
                connection.request("GET", "/tenants?country=AT")
                connection.getresponse().read()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def create(self, first: int, end: int) -> list[float]:
        """Create the tenants of these numbers; returns how long each answer took."""
        with ThreadPoolExecutor(CALLERS) as pool:
            return list(pool.map(self._create, range(first, end)))

    def _create(self, number: int) -> float:
        begun = time.monotonic()
        if not hasattr(self._own, "connection"):
            self._own.connection = HTTPConnection("127.0.0.1", self._port)
        connection: HTTPConnection = self._own.connection
        tenant = {
            "email": f"t{number}@example.org",
            "name": "Ada",
            "country": "DE",
            "account": "DE02",
        }
        headers = {"Idempotency-Key": f"r{number}"}
        connection.request("POST", "/tenants", json.dumps(tenant), headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 201:
            raise RuntimeError(f"a tenant was answered with {answer.status}")
        return time.monotonic() - begun


def _await_rows(server: Server, rows: int) -> None:
    deadline = time.monotonic() + _DEADLINE
    while server.ask("select count(*) from tenants_rm") < rows:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the table does not have {rows:,} tenants in time")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
