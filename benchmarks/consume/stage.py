"""What each measure uses: fresh tables, running consumers, what they have used."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.consume.debezium import sink
from benchmarks.consume.topics import Topics
from benchmarks.machine import Usage, find_children, peak_rss_mb, read_usage
from benchmarks.ownership.pods import wait_until
from benchmarks.peers.peer import REPOSITORY
from jobs_lib.postgres.migrate import migrate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.consume.peers import Peer
    from benchmarks.consume.tables import Connection, Table
    from benchmarks.consume.topics import Topic
    from benchmarks.server import Server
    from jobs_lib.devstack import KafkaBroker

_START_SECONDS = 90.0
_END_SECONDS = 30.0


class ConsumerError(Exception):
    """A consumer ended too early, was too slow, or left a wrong table."""


@dataclass(frozen=True)
class Used:
    """The clock, and the seconds of CPU that all have used until then."""

    at: float
    usage: Usage
    broker: float

    def __sub__(self, earlier: Used) -> Used:
        return Used(
            self.at - earlier.at,
            self.usage - earlier.usage,
            self.broker - earlier.broker,
        )

    @property
    def other_cores(self) -> float:
        """How many cores programs used that have no part in it."""
        return max(0.0, self.usage.other - self.broker) / self.at


class Running:
    """A consumer that runs, with all its processes."""

    def __init__(self, peer: Peer, process: subprocess.Popen[bytes], log: Path) -> None:
        self.peer = peer
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Its first process."""
        return self._process.pid

    @property
    def rss_mb(self) -> float:
        """The most memory that it and its children have used."""
        return sum(peak_rss_mb(pid) for pid in (self.pid, *find_children(self.pid)))

    def check(self) -> None:
        """Raise `ConsumerError` if it has ended by itself."""
        if self._process.poll() is not None:
            raise ConsumerError(f"{self.peer.name} has ended: {self.said}")

    def ended(self) -> bool:
        """Whether it has ended by itself, and well.

        Raises:
            ConsumerError: it has failed.
        """
        code = self._process.poll()
        if code:
            raise ConsumerError(
                f"{self.peer.name} has failed with code {code}: {self.said}"
            )
        return code == 0

    @property
    def said(self) -> str:
        """The end of its output."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-1_500:]

    def end(self, number: int = signal.SIGTERM) -> None:
        """End all its processes, and wait for it."""
        self._signal(number)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: int) -> None:
        # It leads a group of processes of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


@dataclass
class Stage:
    """The servers, and the topics of this run."""

    server: Server
    broker: KafkaBroker
    peers: dict[str, Peer]
    """The peers that are installed and asked for."""
    topics: Topics = field(init=False)

    def __post_init__(self) -> None:
        self.topics = Topics(self.broker.bootstrap_servers)

    @contextlib.contextmanager
    def prepared(self, table: Table) -> Iterator[Connection]:
        """A connection to a fresh database with this table."""
        self.server.renew()
        migrate(self.server.url)
        with self.server.connect() as connection:
            table.make(connection)
            connection.execute("checkpoint")
            yield connection

    @contextlib.contextmanager
    def consuming(
        self,
        peer: Peer,
        topic: Topic,
        *,
        group: str | None = None,
        database: str | None = None,
        **settings: str,
    ) -> Iterator[Running]:
        """A consumer that ends with the block.

        Args:
            peer: who reads.
            topic: what it reads.
            group: its consumer group. Defaults to a new one.
            database: the URL of the database. Defaults to the server's one.
            settings: more variables of its environment.
        """
        group = group or f"bench-{uuid.uuid4().hex[:8]}"
        database = database or self.server.url
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name)
            command = peer.command or sink.make_command(
                folder,
                broker=self.broker.bootstrap_servers,
                database=database,
                topic=topic.name,
                group=group,
            )
            environment = {
                **{k: v for k, v in os.environ.items() if not k.startswith("JOBS_LIB")},
                "BENCH_TOPIC": topic.name,
                "BENCH_GROUP": group,
                "BENCH_BROKER": self.broker.bootstrap_servers,
                "BENCH_DATABASE": database,
                "BENCH_SCRATCH": name,
                "JOBS_LIB_DATABASE_URL": database,
                "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": self.broker.bootstrap_servers,
                "PYTHONPATH": str(REPOSITORY),
                **peer.settings,
                **settings,
            }
            log = folder / "log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    cwd=REPOSITORY,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            running = Running(peer, process, log)
            try:
                yield running
            finally:
                running.end()

    def await_first(
        self, running: Running, connection: Connection, table: Table
    ) -> None:
        """Wait until the first row can be read."""

        def has_begun() -> bool:
            running.check()
            return not table.is_empty(connection)

        wait_until(has_begun, _START_SECONDS, f"{running.peer.name} has written a row")

    def await_progress(
        self,
        running: Running,
        connection: Connection,
        table: Table,
        topic: Topic,
        *,
        share: float = 1.0,
        seconds: float,
        pause: float,
    ) -> None:
        """Wait until this share of the topic has been applied.

        Raises:
            ConsumerError: it takes longer, or the consumer has ended.
        """
        deadline = time.monotonic() + seconds
        while (done := table.progress(connection, topic)) < share:
            running.check()
            if time.monotonic() > deadline:
                raise ConsumerError(
                    f"{running.peer.name} has {done:.0%} of the topic after "
                    f"{seconds:g} s: {running.said}"
                )
            time.sleep(pause)

    def look(self, running: Running) -> Used:
        """The clock and the counters now."""
        # To read the counters takes a while.
        at = time.monotonic()
        usage = read_usage(running.pid, self.server.pid)
        broker = read_usage(self.broker.pid, self.server.pid).worker
        return Used(at, usage, broker)


def count_cpu(used: Used, records: float) -> dict[str, Any]:
    """Seconds of a core for 100,000 records, and the cores of strangers."""
    per_100k = 100_000 / records
    return {
        "consumer_cpu": used.usage.worker * per_100k,
        "db_cpu": used.usage.server * per_100k,
        "broker_cpu": used.broker * per_100k,
        "idle": 1 - used.usage.machine / used.at / (os.cpu_count() or 1),
        "other_cpu": used.other_cores,
    }
