"""The example `examples/tenants`, as processes on the servers of a test."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg

from jobs_lib.devstack.ports import free_port
from tests.support.apps import QUICK
from tests.support.records import Seen, read_topic
from tests.support.waiting import wait_for
from tests.support.worker import ROOT, Worker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import httpx

TABLES = ROOT / "examples/tenants/tables.sql"
APP = "examples.tenants.processor:app"
TOPIC = "tenants"
STATE = {"name": "Ada", "country": "DE", "account": "DE02"}
"""What a tenant has beside its email."""


def make_tables(url: str) -> None:
    """Make the tables of the example."""
    with psycopg.connect(url) as connection:
        connection.execute(TABLES.read_bytes())


def make_form(email: str, **other: str) -> dict[str, str]:
    """The body of a request."""
    return {"email": f"{email}@example.org", **STATE, **other}


class Stage:
    """Starts processes of the example, and looks at what they leave.

    Each process has the same address when it is started again.

    Args:
        database: its URL; it has the tables.
        servers: the brokers for the processes.
        own_servers: the brokers for the test itself.
        folder: for the ledger of the provider.
        settings: of the library, beside quick ones.
    """

    def __init__(
        self,
        database: str,
        servers: str,
        own_servers: str,
        folder: Path,
        **settings: Any,
    ) -> None:
        self.database = database
        self.ledger = folder / "ledger"
        self._servers = own_servers
        self._ports = {"api": free_port(), "provider": free_port()}
        named = {**QUICK, "database_url": database, "kafka_bootstrap_servers": servers}
        self.env = {
            f"JOBS_LIB_{name.upper()}": value if isinstance(value, str) else repr(value)
            for name, value in (named | settings).items()
        }
        self.env["PROVIDER_ADDRESS"] = f"http://127.0.0.1:{self._ports['provider']}"
        environment = settings.get("environment")
        self.topic = f"{environment}.{TOPIC}" if environment else TOPIC
        self._workers: list[Worker] = []

    @property
    def address(self) -> str:
        """The address of the API."""
        return f"http://127.0.0.1:{self._ports['api']}"

    def start_api(self, kind: str = "web") -> Worker:
        """Start the API; ``whole`` has the processor in the same process."""
        worker = self._start(
            *("uvicorn", f"examples.tenants.api:{kind}", "--no-access-log"),
            *("--port", str(self._ports["api"])),
        )
        wait_for(
            # It says so once it listens, and "startup complete" before that.
            lambda: any("Uvicorn running on" in line for line in worker.errors),
            timeout=60,
            what=lambda: f"the API has started\n{worker.output}",
        )
        return worker

    def start_processor(self) -> Worker:
        """Start the processor in a process of its own."""
        return self._start("jobs_lib.cli", "run", APP)

    def start_provider(self) -> Worker:
        """Start the payment provider."""
        arguments = str(self.ledger), str(self._ports["provider"])
        worker = self._start("examples.tenants.provider", *arguments)
        worker.wait_for_line("http://")
        return worker

    def run(self, *arguments: str) -> None:
        """Run a command of `jobs-lib` to its end."""
        worker = self._start("jobs_lib.cli", *arguments)
        assert worker.wait(timeout=60) == 0, worker.output

    def close(self) -> None:
        """Kill all processes."""
        while self._workers:
            self._workers.pop().close()

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """Ask the database."""
        with psycopg.connect(self.database, autocommit=True) as connection:
            return connection.execute(query.encode()).fetchall()

    def read_log(self, key: str | None = None) -> list[Seen]:
        """All events of the topic, or those of a tenant."""
        seen = read_topic(self._servers, self.topic, timeout=120)
        return [one for one in seen if key in (None, one.key)]

    def read_registrations(self) -> list[str]:
        """The tenants that the provider has registered, each as often as it has."""
        lines = self.ledger.read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["tenant"] for line in lines]

    def read_table(self) -> dict[str, dict[str, Any]]:
        """What the table has of each tenant."""
        query = "select id, to_jsonb(t) - 'version' from tenants_rm t"
        return dict(self.ask(query))

    def await_table(self, timeout: float = 60) -> None:
        """Wait until the table has all events."""
        ends: dict[int, int] = {}
        for event in self.read_log():
            ends[event.partition] = event.offset + 1
        query = (
            "select partition, next_offset from jobs_lib.offsets"
            f" where topic = '{self.topic}'"
        )
        wait_for(
            lambda: {*ends.items()} <= {*self.ask(query)},
            timeout=timeout,
            what=lambda: f"the table has {ends}: {self.ask(query)}\n{self.output}",
        )

    def await_registrations(self, timeout: float = 60) -> None:
        """Wait until all tenants are registered."""
        query = "select count(*) from registrations where registered_at is null"
        wait_for(
            lambda: self.ask(query) == [(0,)],
            timeout=timeout,
            what=lambda: f"all are registered: {self.ask(query)}\n{self.output}",
        )

    @property
    def output(self) -> str:
        """The end of what each process has written, for messages."""
        return "\n".join(worker.output[-6000:] for worker in self._workers)

    def _start(self, *arguments: str) -> Worker:
        worker = Worker("-m", *arguments, env=self.env)
        self._workers.append(worker)
        return worker


def read_states(log: list[Seen]) -> dict[str, Any]:
    """The newest state of each tenant: what a compacted topic says."""
    newest = {event.key: event.json for event in log}
    return {key: state for key, state in newest.items() if state is not None}


def read_place(answer: httpx.Response) -> tuple[int, int]:
    """The partition and the offset of the event that an answer tells."""
    partition, offset = answer.headers["Tenant-Event"].split("/")
    return int(partition), int(offset)


def without_account(state: Mapping[str, Any]) -> dict[str, Any]:
    """A tenant without its internal field."""
    return {name: value for name, value in state.items() if name != "account"}
