"""To look which rows have been sent costs a few pages, however many wait."""

from __future__ import annotations

import pytest

from tests.support.pages_read import count_pages

ROWS = 100_000
FEW = 60
"""Pages, for the rows of four shards."""
_FILL = """
insert into jobs_lib.outbox (shard, topic, key, value)
select n %% 4, 'orders', 'k' || n %% 100, '' from generate_series(1, %s) n
"""


@pytest.fixture(params=["empty", "full", "never"])
def measure(request, database, admin):
    """A function that counts the pages of a query; with statistics from some moment."""
    admin.execute("alter table jobs_lib.outbox set (autovacuum_enabled = off)")
    if request.param == "empty":
        admin.execute("vacuum analyze")
    admin.execute(_FILL, (ROWS,))
    if request.param == "full":
        admin.execute("vacuum analyze jobs_lib.outbox")

    def measure(query: str, **values) -> tuple[int, str]:
        return count_pages(admin, database.queries[query], values)

    return measure


@pytest.mark.guarantee("K5")
def test_rows_that_wait_do_not_make_a_look_dearer(database, admin, measure):
    pages, plan = measure("find_outbox_ends")
    assert pages < FEW, plan
    rows = admin.execute(database.queries["find_outbox_ends"]).fetchall()
    ends = {shard: end for shard, end, _ in rows if shard is not None}
    assert len(ends) == 4
    given = {"shards": [*ends], "ends": [*ends.values()]}
    pages, plan = measure("find_unsent", **given, starts=[0] * 4)
    assert pages < FEW, plan
    # Most of them have left, and a look begins where the last one has ended.
    first = max(ends.values()) - 100
    old = "delete from jobs_lib.outbox where id < %s"
    admin.execute(old, (first,))
    pages, plan = measure("find_unsent", **given, starts=[first] * 4)
    assert pages < FEW, plan


@pytest.mark.guarantee("K5")
def test_a_look_reads_held_rows_once_however_many_shards_there_are(
    database, admin, measure
):
    admin.execute("alter table jobs_lib.held_rows set (autovacuum_enabled = off)")
    admin.execute(
        "insert into jobs_lib.held_rows"
        " (shard, class, id, topic, key, value, cause, created_at)"
        " select n %% 16, 0, n, 'orders', 'k' || n, '', 'live', now()"
        " from generate_series(1, %s) n",
        (ROWS,),
    )
    # As for the connections of our loops.
    admin.execute("set enable_seqscan = off; set enable_bitmapscan = off")
    # With its index, if it reads along that.
    size = "select pg_total_relation_size('jobs_lib.held_rows') / 8192"
    ((most,),) = admin.execute(size).fetchall()
    given = {"shards": [*range(16)], "ends": [2 * ROWS] * 16, "starts": [0] * 16}
    for query, values in (("find_outbox_ends", {}), ("find_unsent", given)):
        # The first reader of new rows also writes their pages.
        rows = admin.execute(database.queries[query], values).fetchall()
        assert len([shard for shard, *_ in rows if shard is not None]) == 16
        pages, plan = measure(query, **values)
        assert pages < most + 4 * FEW, plan
