"""The settings of Debezium's JDBC sink, the fastest ones here.

UNNEST, the reduction buffer, batches of 5,000, and values without a schema of their
own: the converter has it. It commits offsets each 60 s, which is its default.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from benchmarks.connect import SINK

if TYPE_CHECKING:
    from pathlib import Path

_FIELDS = {
    "airport": "string",
    "flights": "int32",
    "minutes_late": "int32",
    "version": "int64",
}
_SCHEMA = {
    "type": "struct",
    "name": "state",
    "optional": True,
    "fields": [
        {"field": name, "type": kind, "optional": True}
        for name, kind in _FIELDS.items()
    ],
}
_WORKER = {
    "key.converter": "org.apache.kafka.connect.storage.StringConverter",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter.schemas.enable": "true",
    "value.converter.schema.content": json.dumps(_SCHEMA),
    "listeners": "http://127.0.0.1:0",
    # It starts sooner if it does not look into every class.
    "plugin.discovery": "service_load",
    "connector.client.config.override.policy": "All",
}
_CONNECTOR = {
    "name": "sink",
    "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
    "tasks.max": "1",
    "insert.mode": "upsert",
    "delete.enabled": "true",
    "schema.evolution": "none",
    "primary.key.mode": "record_key",
    "primary.key.fields": "tail",
    "collection.name.format": "aircraft_rm",
    "batch.size": "5000",
    "use.reduction.buffer": "true",
    "dialect.postgres.unnest.insert.enabled": "true",
    "consumer.override.max.poll.records": "5000",
    "consumer.override.session.timeout.ms": "6000",
    "consumer.override.heartbeat.interval.ms": "1000",
    "consumer.override.auto.offset.reset": "earliest",
    # It takes any key for a struct, and fails where it is a plain string.
    "transforms": "key",
    "transforms.key.field": "tail",
    "transforms.key.type": "org.apache.kafka.connect.transforms.HoistField$Key",
}


def make_command(
    folder: Path, *, broker: str, database: str, topic: str, group: str
) -> list[str]:
    """The command line of a sink.

    Args:
        folder: takes its settings.
        broker: where Kafka is.
        database: the URL of the database.
        topic: the topic that it reads.
        group: the consumer group.
    """
    where = urlsplit(database)
    address = f"{where.hostname}:{where.port}{where.path}"
    worker = {
        **_WORKER,
        "bootstrap.servers": broker,
        "offset.storage.file.filename": str(folder / "offsets"),
    }
    connector = {
        **_CONNECTOR,
        "topics": topic,
        "connection.url": f"jdbc:postgresql://{address}?reWriteBatchedInserts=true",
        "connection.username": str(where.username),
        "connection.password": where.password or "none",
        "consumer.override.group.id": group,
    }
    return SINK.command(folder, worker, connector)
