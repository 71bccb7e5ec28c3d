"""Reading the depths costs the same, however deep they are."""

from __future__ import annotations

from jobs_lib.operating import depths
from jobs_lib.operating.depths import read_depths

ADD = (
    "insert into jobs_lib.jobs (origin, type, payload, state, run_at)"
    " select 'local/1', %s, '{}', %s, case when %s = 'scheduled' then now() end"
    " from generate_series(1, %s)"
)


def test_small_tables_are_counted_to_the_row(database, admin):
    for type_, state, rows in [
        ("charge", "available", 7),
        ("charge", "scheduled", 2),
        ("mail", "available", 1),
    ]:
        admin.execute(ADD, (type_, state, state, rows))
    admin.execute(
        "update jobs_lib.jobs set enqueued_at = now() - interval '5 minutes'"
        " where type = 'mail'"
    )
    admin.execute(
        "insert into jobs_lib.outbox (shard, topic, value, created_at)"
        " select 1, 't', '', now() - interval '1 minute' from generate_series(1, 3)"
    )
    found = read_depths(database)
    assert found.jobs == {
        ("charge", "available"): 7,
        ("charge", "scheduled"): 2,
        ("mail", "available"): 1,
    }
    assert (found.outbox, found.discarded, found.held) == (3, 0, 0)
    assert 300 <= found.oldest_job < 400
    assert 60 <= found.oldest_row < 160


def test_nothing_waits_in_empty_tables(database):
    assert read_depths(database) == depths.Depths()


def test_a_large_table_is_estimated_by_a_sample_of_its_pages(
    database, admin, monkeypatch
):
    rows = 50_000
    admin.execute(ADD, ("charge", "available", "available", rows))
    (pages,) = admin.execute(
        "select pg_relation_size('jobs_lib.jobs') / 8192"
    ).fetchone()
    monkeypatch.setattr(depths, "_PAGES", pages // 5)
    found = read_depths(database)
    assert 0.6 * rows < found.jobs["charge", "available"] < 1.4 * rows
