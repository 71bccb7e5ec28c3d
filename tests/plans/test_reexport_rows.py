"""However many rows of re-exports wait, a read takes only those that may leave."""

from __future__ import annotations

from uuid import uuid4

import psycopg
import pytest

from jobs_lib.outbox.pace import BatchPace
from jobs_lib.outbox.reader import Reader
from jobs_lib.outbox.starts import Start
from tests.plans.test_plans import Plans, count_pages, show_pages
from tests.support.apps import make_app
from tests.support.outbox.steps import own_shards

OWNER = uuid4()
PAUSED, SLOW, FAST, CANCELLED = 1, 2, 3, 4
MANY = 40_000
"""Rows of the paused re-export: they fill hundreds of pages."""
POLL = {"shards": [0], "live_from": [0], "batch_from": [0], "server": 0}
_WRITE = """
insert into jobs_lib.outbox (shard, class, topic, key, entity, cause, reexport_id)
select 0, 1, 'states', 'k' || %(reexport)s || '-' || n, 'things', 'reexport',
    %(reexport)s
from generate_series(1, %(rows)s) n
"""


@pytest.fixture
def reader(database, admin, monkeypatch):
    """A reader of one shard, for an app with an entity.

    It passes a re-export that has spent its rate over until the test lets it go on.
    """
    monkeypatch.setattr("jobs_lib.outbox.pace._SPENT_SECONDS", 3600.0)
    own_shards(admin, OWNER, [0])
    admin.execute("alter table jobs_lib.outbox set (autovacuum_enabled = off)")
    for number, state, rate in (
        (PAUSED, "paused", 60_000),
        (SLOW, "running", 1),
        (FAST, "running", 60_000),
        (CANCELLED, "cancelled", 60_000),
    ):
        admin.execute(
            "insert into jobs_lib.reexports"
            " (id, entity, topic, state, rate, total, refilled_at)"
            " values (%s, %s, 'states', %s, %s, 99999, now() - interval '1 minute')",
            (number, f"things{number}", state, rate),
        )
    app = make_app(database.url)
    states = app.topic("states", value=int, compacted=True)
    app.entity(states, source="things", key="k")(lambda _, keys: dict.fromkeys(keys, 1))
    return Reader(
        database, OWNER, 500, entities=app.entities, topics=app.topics, source="test"
    )


def write(admin, reexport: int, rows: int) -> None:
    admin.execute(_WRITE, {"reexport": reexport, "rows": rows})


@pytest.mark.guarantee("W28", "X7")
@pytest.mark.parametrize(
    ("impatient", "generic"),
    # Behind PgBouncer no setting restricts the planner, and it plans each time.
    [(True, True), (True, False), (False, False)],
    ids=["generic", "custom", "bouncer"],
)
@pytest.mark.parametrize("analyzed", ["empty", "full", "never"])
def test_rows_of_a_paused_re_export_are_not_read(
    database, admin, reader, analyzed, impatient, generic
):
    def count_all(query: str, **values: object) -> int:
        with plans.told(generic=generic) as told:
            connection.execute(database.queries[query], values).fetchall()
        return sum(map(count_pages, told))

    def read() -> tuple[int, int, int]:
        """Count the pages of two blocks, of a count of rows, and of a poll."""
        reader.pace = reader.rates.pace = BatchPace()
        admin.execute("update jobs_lib.reexports set refilled_at = 'epoch'")
        with plans.told(generic=generic) as told:
            first, second = (reader.read(connection, 0, 1) for _ in range(2))
        # They share the first block. The second one lacks the one that is spent.
        assert [one.key for one in first.records if "k3-" in one.key] == [
            f"k3-{n}" for n in range(1, 41)
        ]
        assert len(first.dropped) == len(second.dropped) == 20
        assert len(second.records) == 60
        pages = sum(map(count_pages, told))
        waiting = count_all("count_batch_rows", reexport=FAST, limit=1_000)
        return pages, waiting, count_all("pending_shards", **POLL)

    if analyzed == "empty":
        admin.execute("vacuum analyze jobs_lib.outbox")
    with database.connect("test", impatient=impatient) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        plans = Plans(connection)
        show_pages(connection)
        for reexport, rows in ((SLOW, 200), (FAST, 60), (CANCELLED, 20)):
            write(admin, reexport, rows)
        # The first reads set hints and read catalogues.
        read()
        before = read()
        write(admin, PAUSED, MANY)
        if analyzed == "full":
            admin.execute("vacuum analyze jobs_lib.outbox")
        after = read()
    # The index of many rows has one level more.
    assert after[0] <= before[0] + 150, (before, after)
    assert after[1] <= before[1] + 50, (before, after)
    assert after[2] <= before[2] + 10, (before, after)


@pytest.mark.guarantee("FP25", "X7")
def test_rows_that_left_are_not_read_again_under_an_old_snapshot(
    database, admin, connect, reader
):
    for reexport in (FAST, CANCELLED):
        write(admin, reexport, MANY // 2)
    holder = connect()
    holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    holder.execute("select count(*) from jobs_lib.outbox")
    admin.execute("delete from jobs_lib.outbox")
    for reexport in (FAST, CANCELLED):
        write(admin, reexport, 10)
    admin.execute("vacuum analyze jobs_lib.outbox")
    (first,) = admin.execute("select min(id) from jobs_lib.outbox").fetchone()
    with database.connect("test", impatient=True) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        plans = Plans(connection)
        show_pages(connection)
        with plans.told(generic=True) as told:
            block = reader.read(connection, 0, 1, Start(first, first))
    assert [len(block.records), len(block.dropped)] == [10, 10]
    assert sum(map(count_pages, told)) < 500
