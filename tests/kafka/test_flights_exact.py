"""Sums over all real flights are exact, however often their consumers are killed."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import pytest

from examples.flights.flights import read_flights
from jobs_lib.partitioner import choose_partition
from tests.support.records import produce

if TYPE_CHECKING:
    from collections.abc import Iterable

    from examples.flights.flights import Flight
    from tests.support import Worker

FLIGHTS = 336_776
PARTITIONS = 8
KILLS = 20
SUMS = """
create table flight_sums (
    partition int primary key, records bigint, ids bigint, squares bigint,
    minutes bigint
)
"""
BATCH = 50_000
"""How many records wait in the producer at a time."""

Sums: TypeAlias = dict[int, tuple[int, int, int, int]]


def add_up(flights: Iterable[Flight]) -> Sums:
    """Compute the sums of each partition from the file alone.

    A repeat and a gap that leave the number and the sum of the ids as they are change
    the sum of their squares.
    """
    partition_of = cache(lambda key: choose_partition(key, PARTITIONS))
    sums = dict.fromkeys(range(PARTITIONS), (0, 0, 0, 0))
    for flight in flights:
        number = partition_of(flight.key)
        records, ids, squares, minutes = sums[number]
        sums[number] = (
            records + 1,
            ids + flight.id,
            squares + flight.id**2,
            minutes + (flight.delay or 0),
        )
    return sums


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.expects("fenced")
@pytest.mark.guarantee("I24", "I25", "W59", "W76")
def test_a_sum_over_all_flights_is_exact_after_twenty_kills(
    admin, database_url, bootstrap_servers, topic, start_process, wait_for
):
    name = topic(PARTITIONS)
    admin.execute(SUMS)
    flights = read_flights()
    assert len(flights) == FLIGHTS
    for first in range(0, FLIGHTS, BATCH):
        produce(
            bootstrap_servers,
            name,
            (
                (flight.key, {"id": flight.id, "minutes": flight.delay or 0})
                for flight in flights[first : first + BATCH]
            ),
        )

    def start() -> Worker:
        return start_process(
            "flight_sums",
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            topic=name,
        )

    def count_read() -> int:
        # One snapshot: what is in the sums is exactly what lies before the offsets.
        rows = admin.execute(
            "select o.partition, coalesce(o.next_offset, 0), coalesce(s.records, 0)"
            " from jobs_lib.offsets o left join flight_sums s using (partition)"
            " where o.topic = %s",
            (name,),
        ).fetchall()
        assert all(following == records for _, following, records in rows), rows
        return sum(records for _, _, records in rows)

    def find_owners() -> list[Worker]:
        """The workers that own partitions now."""
        owning = {
            pid
            for (pid,) in admin.execute(
                "select distinct p.pid from jobs_lib.origins o"
                " join jobs_lib.processes p on p.id = o.owner"
            ).fetchall()
        }
        return [worker for worker in workers if worker.pid in owning]

    workers = [start(), start()]
    # The last kill comes while much is left to read.
    for at in sorted(random.sample(range(FLIGHTS * 4 // 5), KILLS)):
        wait_for(
            lambda at=at: count_read() >= at and find_owners(),
            timeout=120,
            what=lambda at=at: f"{count_read()} of {at} are read by an owner",
        )
        victim = random.choice(find_owners() or workers)
        victim.kill()
        workers.remove(victim)
        workers.append(start())
    wait_for(
        lambda: count_read() >= FLIGHTS,
        timeout=300,
        what=lambda: f"{count_read()} of {FLIGHTS} are read\n{workers[0].output}",
    )
    rows = admin.execute("select * from flight_sums").fetchall()
    found: Sums = {number: tuple(sums) for number, *sums in rows}
    assert found == add_up(flights)
