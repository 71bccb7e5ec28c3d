"""Quix Streams with its own PostgreSQLSink: upserts by primary key.

At least once, without a version guard. It calls the sink for a tombstone with None,
which the sink refuses, so tombstones are filtered out and their rows stay.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from quixstreams import Application
from quixstreams.sinks.community.postgresql import PostgreSQLSink

from benchmarks.consume.loops.common import BROKER, DATABASE, GROUP, TOPIC
from benchmarks.consume.statements import COLUMNS


def main() -> None:
    """Read until the process is ended."""
    where = urlsplit(DATABASE)
    app = Application(
        broker_address=BROKER,
        consumer_group=GROUP,
        auto_offset_reset="earliest",
        auto_create_topics=False,
        loglevel="WARNING",
        state_dir=os.environ["BENCH_SCRATCH"],
        commit_interval=float(os.environ.get("BENCH_COMMIT_SECONDS", "5")),
        commit_every=10_000,
        consumer_extra_config={"session.timeout.ms": 6_000},
    )
    topic = app.topic(TOPIC, key_deserializer="str", value_deserializer="json")
    sink = PostgreSQLSink(
        host=where.hostname,
        port=where.port,
        dbname=where.path[1:],
        user=where.username,
        password=where.password or "",
        table_name="aircraft_rm",
        primary_key_columns="tail",
        upsert_on_primary_key=True,
        include_metadata=False,
        schema_auto_update=False,
    )
    frame = app.dataframe(topic)
    frame = frame.filter(lambda value: value is not None)
    frame = frame.apply(lambda value: {name: value[name] for name in COLUMNS})
    frame.sink(sink)
    app.run()


if __name__ == "__main__":
    main()
