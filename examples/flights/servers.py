"""Databases and topics for one run of the demo; each run makes them anew.

`python -m examples.flights.servers 2000` makes them, and sends so many flights.
"""

from __future__ import annotations

import os
import sys
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
from examples.flights.flights import read_flights
from examples.flights.producer import produce_flights
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
SOON: dict[str, Any] = {"request_timeout": 10.0}
"""A broker that has just started may not answer: the request is repeated then."""


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
            name_database(postgres, "jobs_lib_demo_flights"),
            name_database(postgres, "jobs_lib_demo_board"),
            kafka,
        )

    def make_databases(self) -> None:
        """Drop and create both, with the tables of the library and the services."""
        remake_database(self.flights_url, _make_service_tables)
        remake_database(self.board_url, board_tables.make_tables)

    def make_topics(self) -> None:
        """Delete and create both topics, and delete the groups that read them."""
        topics = [
            NewTopic(
                name, count, config=STATE_CONFIG if name == "aircraft-state" else {}
            )
            for name, count in PARTITIONS.items()
        ]
        remake_topics(self.kafka, topics, GROUPS)


def _make_service_tables(connection: psycopg.Connection) -> None:
    connection.execute((HERE / "service.sql").read_bytes())


def remake_database(
    url: str, make_tables: Callable[[psycopg.Connection], object]
) -> None:
    """Drop and create a database, with the tables of the library and of a service."""
    name = sql.Identifier(urlsplit(url).path[1:])
    with psycopg.connect(name_database(url, "postgres"), autocommit=True) as server:
        drop = sql.SQL("drop database if exists {} with (force)")
        server.execute(drop.format(name))
        server.execute(sql.SQL("create database {}").format(name))
    migrate(url)
    with psycopg.connect(url) as connection:
        make_tables(connection)


def remake_topics(kafka: str, topics: list[NewTopic], groups: list[str]) -> None:
    """Delete and create topics, and delete the groups that read them."""
    admin = AdminClient({"bootstrap.servers": kafka})
    names = [one.topic for one in topics]
    # A killed member stays in its group until its session ends.
    until(lambda: admin.delete_consumer_groups(groups, **SOON), "GROUP_ID_NOT_FOUND")
    until(lambda: admin.delete_topics(names, **SOON), "UNKNOWN_TOPIC_OR_PART")
    until(lambda: admin.create_topics(topics, **SOON), "TOPIC_ALREADY_EXISTS")


def until(call: Callable[[], dict[Any, Future[Any]]], done: str = "") -> None:
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


def name_database(url: str, name: str) -> str:
    """The address of another database on the same server."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


def main() -> None:
    """Make all anew, and send as many flights as asked for."""
    kafka = os.environ["JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS"]
    servers = Servers.at(os.environ["JOBS_LIB_DATABASE_URL"], kafka)
    servers.make_topics()
    servers.make_databases()
    produce_flights(read_flights(int(sys.argv[1])), kafka, 0, lambda: None)


if __name__ == "__main__":
    main()
