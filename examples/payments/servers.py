"""Databases, topic and groups for one run of the demo; each run makes them anew.

`python -m examples.payments.servers 2000` makes them, and sends so many payments.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pydantic import TypeAdapter

from examples.flights.servers import (
    DEADLINE,
    name_database,
    remake_database,
    remake_topics,
)
from examples.payments.payments import Payment, read_payments

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).parent
TOPIC, PARTITIONS = "payments", 6
GROUPS = {
    "relations": ["relations"],
    "profiles": ["profiles", "profiles.done"],
    "detection": ["detection"],
    "screening": ["screening"],
}
"""The groups of each service."""


@dataclass(frozen=True)
class Servers:
    """PostgreSQL, with a database for each service, and Kafka."""

    postgres: str
    kafka: str

    def find_url(self, name: str) -> str:
        """The address of a service's database."""
        return name_database(self.postgres, f"jobs_lib_demo_{name}")

    def make_topic(self) -> None:
        """Delete and create the topic, and delete the groups that read it."""
        groups = [group for of_service in GROUPS.values() for group in of_service]
        remake_topics(self.kafka, [NewTopic(TOPIC, PARTITIONS)], groups)

    def make_database(self, name: str) -> None:
        """Drop and create the database of a service."""
        remake_database(self.find_url(name), lambda conn: make_tables(conn, name))

    def read(self, name: str, query: str) -> list[tuple[Any, ...]]:
        """Ask the database of a service."""
        with psycopg.connect(self.find_url(name)) as connection:
            return connection.execute(query.encode()).fetchall()

    def produce(self, payments: Iterable[Payment]) -> None:
        """Send payments to the topic, as a foreign system does."""
        producer = Producer(
            {
                "bootstrap.servers": self.kafka,
                # Java's choice of a partition: jobs_lib computes origins with it.
                "partitioner": "murmur2_random",
                "enable.idempotence": True,
                "log_level": 3,  # errors only: a new broker makes noise
            }
        )
        encode = TypeAdapter(Payment).dump_json
        for payment in payments:
            while len(producer) > 10_000:
                producer.poll(0.1)  # the broker is behind
            producer.produce(TOPIC, key=payment.payer, value=encode(payment))
            producer.poll(0)
        producer.flush()

    def set_back(self, group: str) -> None:
        """Set a group back to the start, as soon as it has no members."""
        start = [TopicPartition(TOPIC, number, 0) for number in range(PARTITIONS)]
        asked = [ConsumerGroupTopicPartitions(group, start)]
        admin = AdminClient({"bootstrap.servers": self.kafka})
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                done = admin.alter_consumer_group_offsets(asked)[group].result()
                error = next(filter(None, (one.error for one in done.topic_partitions)))
            except StopIteration:
                return
            except KafkaException as refused:
                # A killed member stays in its group until its session ends.
                error = refused.args[0]
            if time.monotonic() > deadline:
                raise SystemExit(f"the group {group} cannot be set back: {error.str()}")
            time.sleep(0.2)


def make_tables(connection: psycopg.Connection, name: str) -> None:
    """Make the tables of a service."""
    connection.execute((HERE / f"{name}.sql").read_bytes())


def main() -> None:
    """Make the topic and all databases anew, and send as many payments as asked for."""
    servers = Servers(
        os.environ["JOBS_LIB_DATABASE_URL"],
        os.environ["JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS"],
    )
    servers.make_topic()
    for name in GROUPS:
        servers.make_database(name)
    servers.produce(read_payments(int(sys.argv[1])))


if __name__ == "__main__":
    main()
