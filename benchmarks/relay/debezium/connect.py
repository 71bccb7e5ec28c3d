"""Kafka Connect with Debezium's outbox router on the outbox of a database.

It reads the write-ahead log instead of the table, and deletes nothing. Its settings are
the fastest ones here: logical decoding by pgoutput, a poll each 10 ms, batches of
8,192, lz4.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from benchmarks.connect import OUTBOX, DebeziumError
from benchmarks.machine import peak_rss_mb
from benchmarks.ownership.pods import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.relay.stage import Stage

_SLOT = "debezium"
_STARTED = (
    f"select count(*) from pg_replication_slots where slot_name = '{_SLOT}' and active"
)
_WORKER = {
    "key.converter": "org.apache.kafka.connect.storage.StringConverter",
    "value.converter": "org.apache.kafka.connect.converters.ByteArrayConverter",
    "offset.flush.interval.ms": "1000",
    "producer.linger.ms": "5",
    "producer.compression.type": "lz4",
    "producer.acks": "all",
    "listeners": "http://127.0.0.1:0",
}
_CONNECTOR = {
    "name": "outbox",
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "topic.prefix": "debezium",
    "plugin.name": "pgoutput",
    "slot.name": _SLOT,
    "publication.autocreate.mode": "filtered",
    "table.include.list": "jobs_lib.outbox",
    "snapshot.mode": "no_data",
    "poll.interval.ms": "10",
    "max.batch.size": "8192",
    "max.queue.size": "32768",
    "tombstones.on.delete": "false",
    "binary.handling.mode": "bytes",
    "transforms": "outbox",
    "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
    "transforms.outbox.table.field.event.id": "id",
    "transforms.outbox.table.field.event.key": "key",
    "transforms.outbox.table.field.event.payload": "value",
    "transforms.outbox.table.fields.additional.placement": "version:header:ce_version",
    "transforms.outbox.route.by.field": "topic",
    "transforms.outbox.route.topic.replacement": "${routedByValue}",
}


def install() -> None:
    """Fetch the jars by Maven, if they are missing.

    Raises:
        DebeziumError: there is no Maven, or it failed.
    """
    OUTBOX.install()


class Debezium:
    """A running worker of Kafka Connect."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    def rss_mb(self) -> float:
        """The most memory that it has used."""
        return peak_rss_mb(self.pid)


@contextlib.contextmanager
def connecting(stage: Stage) -> Iterator[Debezium]:
    """Relay the outbox of a stage, on a server with ``wal_level=logical``.

    Raises:
        DebeziumError: it cannot be installed, or did not start.
    """
    install()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        worker = {
            **_WORKER,
            "bootstrap.servers": stage.broker.bootstrap_servers,
            "offset.storage.file.filename": str(folder / "offsets"),
        }
        database = urlsplit(stage.server.url)
        connector = {
            **_CONNECTOR,
            "database.hostname": str(database.hostname),
            "database.port": str(database.port),
            "database.user": str(database.username),
            "database.password": database.password or "none",
            "database.dbname": database.path.strip("/"),
        }
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                OUTBOX.command(folder, worker, connector),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            _await_start(stage, process, log)
            yield Debezium(process.pid)
        finally:
            process.terminate()
            process.wait(30)
            stage.server.ask(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
                f" where slot_name = '{_SLOT}'"
            )


def _await_start(stage: Stage, process: subprocess.Popen[bytes], log: Path) -> None:
    def is_over() -> bool:
        return process.poll() is not None or bool(stage.server.ask(_STARTED))

    wait_until(is_over, 60, "Debezium reads the log")
    if process.poll() is not None:
        said = log.read_text(errors="replace")[-2_000:]
        raise DebeziumError(f"Kafka Connect ended at its start: {said}")
