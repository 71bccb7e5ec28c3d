"""To look how far jobs are done costs a few pages, however many are done already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.service.maintenance import Maintenance
from tests.support.apps import count
from tests.support.pages_read import count_pages
from tests.support.places import Partition

if TYPE_CHECKING:
    import psycopg

DONE = 100_000
_FILL = """
insert into jobs_lib.jobs (origin, type, payload, source, record_offset)
select 'local/0', 'work', '{}', %s, n / %s from generate_series(0, %s - 1) n
"""


@pytest.fixture(params=["empty", "full", "never"])
def partition(request, database, admin) -> Partition:
    """A partition, with statistics of the tables from some moment."""
    for table in ("jobs", "kept_places", "offsets", "sources", "discarded"):
        admin.execute(f"alter table jobs_lib.{table} set (autovacuum_enabled = off)")
    if request.param == "empty":
        admin.execute("vacuum analyze")
    # Others, among which the planner must not look for one.
    for number in range(1, 4):
        Partition(database, admin, number)
    return Partition(database, admin, stored=DONE + 10)


def fill(admin: psycopg.Connection[Any], partition: Partition, each: int) -> None:
    """Add jobs, so many of each record, and one more that stays."""
    admin.execute(_FILL, (partition.source, each, DONE))
    admin.execute(_FILL.replace("n / %s", "%s + n"), (partition.source, DONE, 1))


def measure(database, admin, partition: Partition, query: str) -> tuple[int, str]:
    """Return how many pages a query reads, and its plan."""
    return count_pages(admin, database.queries[query], partition.asked)


@pytest.mark.guarantee("K22")
@pytest.mark.parametrize("each", [1, DONE], ids=["a job each", "one for all"])
def test_jobs_that_are_done_do_not_make_a_look_dearer(
    database, admin, connect, partition, request, each
):
    fill(admin, partition, each)
    if "full" in request.node.name:
        admin.execute("vacuum analyze jobs_lib.jobs")
    before, plan = measure(database, admin, partition, "find_done")
    assert before < 60, plan
    # While an old snapshot is held, nothing can be cleared away of what ends.
    old = connect()
    old.execute("set transaction isolation level repeatable read")
    old.execute("select from jobs_lib.jobs limit 1")
    first = admin.execute("select min(id) from jobs_lib.jobs").fetchone()[0]
    admin.execute("delete from jobs_lib.jobs where id < %s", (first + DONE - 10,))
    # This look passes over all of it, once.
    found = partition.tell()
    after, plan = measure(database, admin, partition, "find_done")
    assert after < 60, plan
    assert found == (DONE - 10 if each == 1 else 0)
    admin.execute("delete from jobs_lib.jobs where record_offset < %s", (DONE,))
    assert partition.tell() == DONE
    after, plan = measure(database, admin, partition, "find_done")
    assert after < 60, plan


@pytest.mark.guarantee("K22")
def test_kept_places_that_are_done_do_not_make_a_look_dearer(
    database, admin, connect, partition
):
    old = connect()
    old.execute("set transaction isolation level repeatable read")
    old.execute("select from jobs_lib.jobs limit 1")
    # Their job has ended long ago.
    admin.execute(
        "insert into jobs_lib.kept_places (source, record_offset, job_id, origin)"
        " select %s, n, 1, 'local/0' from generate_series(1, 20000) n",
        (partition.source,),
    )
    for _ in range(21):
        found = partition.tell()
    assert found == DONE + 10
    for query in ("sweep_places", "find_done"):
        pages, plan = measure(database, admin, partition, query)
        assert pages < 60, plan


@pytest.mark.guarantee("K22")
def test_the_upkeep_deletes_kept_places_of_jobs_that_have_ended(
    database, admin, partition, monkeypatch, wait_for
):
    fill(admin, partition, each=1)
    low, high = admin.execute("select min(id), max(id) from jobs_lib.jobs").fetchone()
    # More than one look takes in belong to one job, and more than the owner of the
    # partition sees lie before the last ones: their jobs are unfinished.
    for first, each in ((low, 1), (high + 1, 25)):
        admin.execute(
            "insert into jobs_lib.kept_places (source, record_offset, job_id, origin)"
            " select %s, n, %s + n / %s, 'local/0' from generate_series(0, 2000) n",
            (partition.source, first, each),
        )
        query = database.queries["forget_places"]
        pages, plan = count_pages(admin, query, {"after": first, "rows": 10})
        assert pages < 200, plan
    monkeypatch.setattr("jobs_lib.service.maintenance._ROWS", 10)
    maintenance = Maintenance(database, {1})
    maintenance.start()
    wait_for(lambda: count(admin, "kept_places") == 2_001, what="the others are gone")
    maintenance.stop()
    assert partition.find(admin) == 0
