"""An outbox, a relay and a reader of an afternoon: nothing more can be left out.

With ``relay`` as its argument it sends the rows of the table ``bridge`` to the topic,
in a transaction of Kafka, and deletes them. With ``read`` it writes each record of a
committed transaction into the table of the read model. Neither notices a second one.
"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer, Producer

from benchmarks.consume.loops.common import (
    BROKER,
    GROUP,
    TOPIC,
    connect,
    key_of,
    row_of,
)
from benchmarks.consume.statements import UPSERT

_READ = "select id, key, value from bridge order by id"
_DELETE = "delete from bridge where id = any (%s)"


def relay() -> None:
    """Send rows until the process is ended."""
    producer = Producer(
        {
            "bootstrap.servers": BROKER,
            "transactional.id": GROUP,
            "linger.ms": 0,
        }
    )
    producer.init_transactions(30)
    with connect(autocommit=True) as connection:
        connection.execute("listen bridge")
        while True:
            rows = connection.execute(_READ, prepare=True).fetchall()
            if not rows:
                list(connection.notifies(timeout=1.0, stop_after=1))
                continue
            producer.begin_transaction()
            for _, key, value in rows:
                producer.produce(TOPIC, value, key)
            producer.commit_transaction(30)
            ids = [row_id for row_id, _, _ in rows]
            connection.execute(_DELETE, (ids,), prepare=True)


def read() -> None:
    """Write rows until the process is ended."""
    consumer = Consumer(
        {
            "bootstrap.servers": BROKER,
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 500,
        }
    )
    consumer.subscribe([TOPIC])
    with connect() as connection:
        while True:
            message = consumer.poll(1.0)
            if message is None or message.error():
                continue
            row = row_of(message)
            assert row is not None, f"{key_of(message)} has an end"
            connection.execute(UPSERT, row, prepare=True)
            connection.commit()


if __name__ == "__main__":
    {"relay": relay, "read": read}[sys.argv[1]]()
