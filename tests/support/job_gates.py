"""Jobs that come from records, without a consumer, and the gates that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs_lib.jobs.context import Place, holding
from jobs_lib.postgres.queries import load_queries

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import psycopg

    from jobs_lib.executor.limiting.gate import JobGate
    from jobs_lib.service.service import Service


class Records:
    """The records of a topic, as if the handler of a consumer enqueued their jobs."""

    def __init__(
        self,
        admin: psycopg.Connection[Any],
        topic: str,
        partitions: int = 1,
        group: str = "own",
    ) -> None:
        """Give the partitions their numbers, as the owner of a partition does."""
        queries = load_queries("jobs_lib")
        asked = {
            "group": group,
            "topics": [topic] * partitions,
            "partitions": [*range(partitions)],
        }
        admin.execute(queries["make_sources"], asked)
        rows = admin.execute(queries["read_sources"], asked).fetchall()
        self.numbers = {partition: number for _, partition, number in rows}

    def handling(self, offset: int, partition: int = 0) -> AbstractContextManager[None]:
        """Handle a record inside the block."""
        return holding(Place(f"record {self.numbers[partition]} {offset}"))


def find_gate(service: Service) -> JobGate:
    """Find the only gate of a service's job types."""
    assert service._executor is not None
    (gate,) = service._executor.gates.values()
    return gate


def find_waiting(service: Service) -> dict[str, int]:
    """Find the highest offset that jobs wait for, by partition of their records."""
    waits = find_gate(service).find_waits()
    return {one.origin: one.wait.place.offset for one in waits}
