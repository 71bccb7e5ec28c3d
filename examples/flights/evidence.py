"""The data that a run leaves: rows, records, the partner's log, and the owners."""

from __future__ import annotations

import json
import threading
import uuid
from typing import TYPE_CHECKING, Any, cast

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from psycopg.rows import dict_row

from examples.flights.checks import Post, Row, State

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from pathlib import Path


def read_rows(url: str, table: str) -> dict[str, Row]:
    """The rows of a table of aircraft by tail number."""
    with psycopg.connect(url, row_factory=dict_row) as connection:
        rows = connection.execute(f"select * from {table}".encode()).fetchall()
    return {row["tail"]: row for row in rows}


def read_handled(url: str) -> list[tuple[int, str | None]]:
    """The number and tail number of every handled flight."""
    with psycopg.connect(url) as connection:
        return connection.execute("select flight, tail from handled").fetchall()


def read_posts(path: Path) -> list[Post]:
    """The partner's log, from its first line."""
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [Post(line["tail"], line["flight"], line["repeat"]) for line in lines]


def read_states(kafka: str, partitions: int) -> list[State]:
    """All committed records of ``aircraft-state``, in the order of each partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": f"check-{uuid.uuid4()}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign(
        [
            TopicPartition("aircraft-state", n, OFFSET_BEGINNING)
            for n in range(partitions)
        ]
    )
    states: list[State] = []
    at_end = 0
    while at_end < partitions:
        messages = consumer.consume(5_000, 10)
        if not messages:
            raise SystemExit("the topic aircraft-state cannot be read to its end")
        for message in messages:
            error = message.error()
            if error is None:
                headers = dict(cast("Sequence[tuple[str, Any]]", message.headers()))
                value = message.value()
                states.append(
                    State(
                        cast("bytes", message.key()).decode(),
                        None if value is None else json.loads(value),
                        cast("bytes", headers["ce_cause"]).decode(),
                        message.timestamp()[1] / 1000,
                    )
                )
            elif error.code() == KafkaError._PARTITION_EOF:
                at_end += 1
            else:
                raise SystemExit(f"the topic aircraft-state: {error.str()}")
    consumer.close()
    return states


class OwnerWatch:
    """Looks ten times a second which pod executes the jobs of each partition."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopping = threading.Event()
        self._seen: dict[tuple[str, int], tuple[str, datetime]] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> OwnerWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def owned_by(self, pod: str) -> dict[str, int]:
        """The partitions that a pod owns now, with their epochs."""
        with psycopg.connect(self._url) as connection:
            rows = self._look(connection)
        return {origin: epoch for origin, epoch, owner, _ in rows if owner == pod}

    def taken(self, owned: dict[str, int]) -> dict[str, datetime | None]:
        """When the next owner took each of these partitions."""
        return {
            origin: min(
                (
                    since
                    for (name, later), (_, since) in self._seen.items()
                    if name == origin and later > epoch
                ),
                default=None,
            )
            for origin, epoch in owned.items()
        }

    def _watch(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._stopping.wait(0.1):
                for origin, epoch, pod, since in self._look(connection):
                    self._seen.setdefault((origin, epoch), (pod, since))

    @staticmethod
    def _look(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
        return connection.execute(
            """
            select o.origin, o.epoch, p.pod, o.since
            from jobs_lib.origins o join jobs_lib.processes p on p.id = o.owner
            where o.role = 'execute'
            """
        ).fetchall()
