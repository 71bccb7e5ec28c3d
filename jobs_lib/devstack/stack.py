"""PostgreSQL and Kafka together, for a project folder: up, down, status."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jobs_lib.devstack import external
from jobs_lib.devstack.kafka import KafkaBroker
from jobs_lib.devstack.places import locked
from jobs_lib.devstack.postgres import PostgresServer
from jobs_lib.devstack.state import Record, StateFile
from jobs_lib.errors import DevStackError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from jobs_lib.devstack.jars import Progress
    from jobs_lib.devstack.server import Server

PROJECT_FOLDER = ".jobs-lib"

State = Literal["running", "stopped", "external"]

_VARIABLES = {
    "postgres": external.DATABASE_VARIABLE,
    "kafka": external.KAFKA_VARIABLE,
}
_NAMES = {"postgres": PostgresServer.name, "kafka": KafkaBroker.name}


@dataclass(frozen=True)
class Service:
    """One of the two servers: its state and its address."""

    #: `postgres` or `kafka`.
    key: str
    #: `external` is the user's own server, named by the environment variable.
    state: State
    #: The address that clients connect to; None if it was never started here.
    address: str | None = None
    pid: int | None = None
    #: The folder of its data and its log.
    folder: Path | None = None
    #: Whether this call started it (`up`) or stopped it (`down`).
    changed: bool = False
    #: Whether `up` gave it its first password.
    secured: bool = False

    @property
    def name(self) -> str:
        """Its name for people."""
        return _NAMES[self.key]

    @property
    def variable(self) -> str:
        """The environment variable with the server's address for jobs_lib."""
        return _VARIABLES[self.key]


class DevStack:
    """The servers of one project.

    - folder: where data, logs and the state file are. Defaults to `.jobs-lib` in the
      current folder.
    - postgres_port, kafka_port: fixed ports. Defaults to the last ports if they are
      free, else to any free ones.
    - progress: called as (jars present, all jars) while jars are fetched.

    A server is not started if its environment variable is set, unless the variable
    names this folder's own server.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        postgres_port: int | None = None,
        kafka_port: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.folder = Path(folder or PROJECT_FOLDER).absolute()
        self._ports = {"postgres": postgres_port, "kafka": kafka_port}
        self._progress = progress
        self._state = StateFile(self.folder / "state.json")

    def up(self) -> list[Service]:
        """Start each server that does not run yet, and wait until it answers.

        If it raises DevStackError, it has stopped every server that it started.
        """
        with self._exclusively():
            records = self._state.read()
            services = self._externals(records)
            servers = {
                key: self._server(key, records.get(key))
                for key in _VARIABLES
                if key not in services
            }
            found = {key: s.pid for key, s in servers.items() if s.running}
            start_together(servers.values())
            for key, server in servers.items():
                changed = found.get(key) != server.pid
                services[key] = _running(key, server, changed=changed)
            return [services[key] for key in _VARIABLES]

    def down(self) -> list[Service]:
        """Stop the servers started here. Raises DevStackError if one cannot be."""
        with self._exclusively():
            running = {
                key: self._adopted(key, record)
                for key, record in self._state.read().items()
                if record.process.alive()
            }
            with ThreadPoolExecutor(2) as pool:
                for ending in [pool.submit(s.stop) for s in running.values()]:
                    ending.result()
            return [
                Service(key, "stopped", changed=key in running) for key in _VARIABLES
            ]

    def status(self) -> list[Service]:
        """The two servers as they are now."""
        records = self._state.read()
        return [self._status(key, records.get(key)) for key in _VARIABLES]

    @contextlib.contextmanager
    def ephemeral(self) -> Iterator[tuple[list[Service], list[Server]]]:
        """Both servers for the length of a `with` block; their data are then deleted.

        Yields a description of both, and the servers started. Raises DevStackError.
        """
        services = self._externals(self._state.read())
        servers: dict[str, Server] = {}
        if "postgres" not in services:
            port = self._ports["postgres"]
            servers["postgres"] = PostgresServer(port=port, durable=False)
        if "kafka" not in services:
            port = self._ports["kafka"]
            servers["kafka"] = KafkaBroker(port=port, progress=self._progress)
        start_together(servers.values())
        try:
            for key, server in servers.items():
                services[key] = _running(key, server, changed=True)
            yield [services[key] for key in _VARIABLES], list(servers.values())
        finally:
            stop_all(servers.values())

    def _status(self, key: str, record: Record | None) -> Service:
        if (address := _external(key, record)) is not None:
            return Service(key, "external", address)
        if record is None:
            return Service(key, "stopped")
        if record.process.alive():
            return _running(key, self._adopted(key, record), changed=False)
        return Service(key, "stopped", record.address, folder=Path(record.folder))

    def _externals(self, records: dict[str, Record]) -> dict[str, Service]:
        services = {}
        for key, variable in _VARIABLES.items():
            if (address := _external(key, records.get(key))) is not None:
                external.check(variable, address)
                services[key] = Service(key, "external", address)
        return services

    def _server(self, key: str, record: Record | None) -> Server:
        port = self._ports[key]
        if record is not None and record.process.alive():
            if port not in (None, record.port):
                raise DevStackError(
                    f"{_NAMES[key]} runs on port {record.port} already: "
                    f"`jobs-lib dev down` first, to have it on port {port}"
                )
            return self._adopted(key, record)
        server = self._make(key, port)
        if record is not None:
            server.prefer_port(record.port)
        return server

    def _adopted(self, key: str, record: Record) -> Server:
        server = self._make(key, record.port)
        server.adopt(record.process, port=record.port, folder=Path(record.folder))
        return server

    def _make(self, key: str, port: int | None) -> Server:
        folder = self.folder / key
        server: Server
        if key == "postgres":
            server = PostgresServer(folder, port=port, detached=True)
        else:
            server = KafkaBroker(
                folder, port=port, detached=True, progress=self._progress
            )
        # Record it at once, so that no server ever runs unrecorded.
        server.on_launch = lambda: self._state.write(key, server)
        return server

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Allow one `up` or `down` at a time: a second one waits for the first."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            ignored = self.folder / ".gitignore"
            if not ignored.exists():
                ignored.write_text("*\n", encoding="utf-8")
            with locked(self.folder / "lock"):
                yield
        except OSError as error:
            raise DevStackError(
                f"{self.folder} cannot be used: {error}; choose another (--folder)"
            ) from error


def start_together(servers: Collection[Server]) -> None:
    """Start several servers at once; if one fails, stop those that this call started.

    Raises DevStackError with the message of every server that failed.
    """
    fresh = [server for server in servers if not server.running]
    try:
        with ThreadPoolExecutor(max(1, len(servers))) as pool:
            starting = [pool.submit(server.start) for server in servers]
        failures = [f for future in starting if (f := future.exception()) is not None]
        for failure in failures:
            if not isinstance(failure, DevStackError):
                raise failure
        if failures:
            raise DevStackError("\n".join(map(str, failures))) from failures[0]
    except BaseException:
        stop_all(fresh)
        raise


def stop_all(servers: Iterable[Server]) -> None:
    """Stop each of these servers, although another one cannot be stopped.

    Raises DevStackError if one cannot be.
    """
    with contextlib.ExitStack() as stopping:
        for server in servers:
            stopping.callback(server.stop)


def _external(key: str, record: Record | None) -> str | None:
    address = external.given(_VARIABLES[key])
    # After `eval "$(jobs-lib dev env)"` the variable names our own server.
    return None if record is not None and record.address == address else address


def _running(key: str, server: Server, *, changed: bool) -> Service:
    return Service(
        key,
        "running",
        server.address,
        server.pid,
        server.folder,
        changed=changed,
        secured=server.secured,
    )
