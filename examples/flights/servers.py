"""Databases and topics for one run of the demo; each run makes them anew."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg import sql

from examples.flights import board_tables
from jobs_lib import migrate

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

HERE = Path(__file__).parent
PARTITIONS = {"flights": 12, "aircraft-state": 4}
GROUPS = ["flight-tracker", "board"]
# The topic is compacted as always, but not before the demo has read its records. The
# broker stamps the records, since the rate is measured by its clock.
STATE_CONFIG = {
    "cleanup.policy": "compact",
    "min.compaction.lag.ms": "86400000",
    "message.timestamp.type": "LogAppendTime",
}
DEADLINE = 60.0


@dataclass(frozen=True)
class Servers:
    """The addresses of databases and Kafka."""

    flights_url: str
    board_url: str
    kafka: str

    @classmethod
    def at(cls, postgres: str, kafka: str) -> Servers:
        """The demo's own two databases on a server."""
        return cls(
            _with_database(postgres, "jobs_lib_demo_flights"),
            _with_database(postgres, "jobs_lib_demo_board"),
            kafka,
        )

    def make_databases(self) -> None:
        """Drop and create both, with the tables of the library and the services."""
        for url, make_tables in (
            (self.flights_url, _make_service_tables),
            (self.board_url, board_tables.make_tables),
        ):
            name = sql.Identifier(urlsplit(url).path[1:])
            server = _with_database(url, "postgres")
            with psycopg.connect(server, autocommit=True) as connection:
                connection.execute(
                    sql.SQL("drop database if exists {} with (force)").format(name)
                )
                connection.execute(sql.SQL("create database {}").format(name))
            migrate(url)
            with psycopg.connect(url) as connection:
                make_tables(connection)

    def make_topics(self) -> None:
        """Delete and create both topics, and delete the groups that read them."""
        admin = AdminClient({"bootstrap.servers": self.kafka})
        # A killed member stays in its group until its session ends.
        _until(lambda: admin.delete_consumer_groups(GROUPS), "GROUP_ID_NOT_FOUND")
        _until(lambda: admin.delete_topics(list(PARTITIONS)), "UNKNOWN_TOPIC_OR_PART")
        topics = [
            NewTopic(
                name, count, config=STATE_CONFIG if name == "aircraft-state" else {}
            )
            for name, count in PARTITIONS.items()
        ]
        _until(lambda: admin.create_topics(topics), "TOPIC_ALREADY_EXISTS")


def _make_service_tables(connection: psycopg.Connection) -> None:
    connection.execute((HERE / "service.sql").read_bytes())


def _until(call: Callable[[], dict[str, Future[Any]]], done: str) -> None:
    """Repeat a call until Kafka has done it, or answers that it is ``done`` already."""
    deadline = time.monotonic() + DEADLINE
    while True:
        errors = [error for future in call().values() if (error := _error_of(future))]
        wrong = [error for error in errors if error.name() != done]
        if not wrong:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"Kafka does not get ready: {wrong[0].str()}")
        time.sleep(0.2)


def _error_of(future: Future[Any]) -> KafkaError | None:
    try:
        future.result()
    except KafkaException as error:
        found: KafkaError = error.args[0]
        return found
    return None


def _with_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
