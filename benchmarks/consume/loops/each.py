"""The loop of every tutorial: an upsert and a commit per record, offsets by themselves.

At least once. The client commits offsets every five seconds, so a crash repeats the
records since then, and rows go back in time until those records have come again.
"""

from __future__ import annotations

from benchmarks.consume.loops.common import (
    TOPIC,
    connect,
    key_of,
    open_consumer,
    row_of,
    take,
)
from benchmarks.consume.statements import DELETE, UPSERT


def main() -> None:
    """Read until the process is ended."""
    consumer = open_consumer(auto_commit=True)
    consumer.subscribe([TOPIC])
    with connect(autocommit=True) as connection:
        while True:
            for message in take(consumer, 500, 0.1):
                row = row_of(message)
                if row is None:
                    connection.execute(DELETE, (key_of(message),), prepare=True)
                else:
                    connection.execute(UPSERT, row, prepare=True)


if __name__ == "__main__":
    main()
