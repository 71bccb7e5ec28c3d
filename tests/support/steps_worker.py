"""A service that does all four steps; its process may kill itself at the n-th event."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from jobs_lib import exponential, telemetry
from jobs_lib.service.service import Service
from tests.support.apps import make_app

if TYPE_CHECKING:
    from jobs_lib import App, Job

TABLES = """
create table totals (key text primary key, records int, sum int);
create table states (key text primary key, version int, sum int);
"""


def make(url: str, bootstrap_servers: str, source: str, target: str) -> App:
    """Reads `source` in blocks, keeps totals, and publishes states to `target`."""
    app = make_app(
        url,
        home=source,
        kafka_bootstrap_servers=bootstrap_servers,
        # The same member again, so that a restart need not wait for the group.
        kafka={"group.instance.id": source},
        consumer_block=50,
        relay_block=100,
    )
    states = app.topic(target, compacted=True, partitions=2, merge=False)

    @app.consumer(source, group=f"{source}-steps")
    def handle(record: Any, connection: Any) -> None:
        connection.execute(
            "insert into totals as t values (%s, 1, %s) on conflict (key) do update"
            " set records = t.records + 1, sum = t.sum + excluded.sum",
            (record.key, record.value),
        )
        publish.enqueue(connection, key=record.key, n=record.value)

    @app.job(group="key", retry=exponential(first=0.05, cap=0.05))
    def publish(job: Job, key: str, n: int) -> None:
        if key == "bad":
            raise ValueError("cannot be handled")
        with job.transaction() as connection:
            row = connection.execute(
                "insert into states as s values (%s, 1, %s) on conflict (key) do update"
                " set version = s.version + 1, sum = s.sum + excluded.sum"
                " returning version, sum",
                (key, n),
            ).fetchone()
            assert row is not None
            version, total = row
            value = {"sum": total, "last": n}
            states.send(connection, key=key, value=value, version=version)

    return app


def main() -> None:
    """Run until the event comes, or for ever."""
    *place, event, count = sys.argv[1:]
    left = int(count)

    def die(heard: str, _: dict[str, Any]) -> None:
        nonlocal left
        if heard == event:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    telemetry.listen(die)
    sys.exit(Service(make(*place)).run())


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    main()
