"""The regular statements read little while a session keeps an old snapshot."""

from __future__ import annotations

import math
from unittest.mock import Mock
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from jobs_lib.executor.claiming.claimer import Claimer
from jobs_lib.executor.claiming.polling import Poller
from jobs_lib.executor.round_trip import RoundTrip
from jobs_lib.ownership.filled import FilledOrigins
from tests.support.apps import HOME, count, make_app

ROWS = 20_000
_GONE = """
with scheduled as (
    insert into jobs_lib.jobs (origin, type, payload, state, run_at)
    select 'local/' || n %% 16, 'work', '{}', 'scheduled',
        clock_timestamp() - interval '1 hour'
    from generate_series(1, %(rows)s) n
)
insert into jobs_lib.jobs (origin, type, payload, priority)
select 'local/' || n %% 16, 'work', '{}', n %% 3 - 1 from generate_series(1, %(rows)s) n
"""


@pytest.fixture
def poller(admin):
    """The poller of an executor that owns all origins."""
    owner = uuid4()
    admin.execute(
        "insert into jobs_lib.origins (role, origin, owner, epoch)"
        " select 'execute', unnest(%s::text[]), %s, 1",
        (HOME, owner),
    )
    types = {"work": make_app("").job(name="work")(lambda job: None)}
    claimer = Claimer(owner, UUID(int=1), types)
    claimer.take(dict.fromkeys(HOME, 1))
    return Poller(claimer, 0.01)


@pytest.fixture
def look(database, poller):
    """A function that looks once; it returns how many pages the look has read."""
    with database.connect("test", impatient=True) as connection:
        round_trip = RoundTrip(connection, database.queries, prepare=True)

        def look(*, complete: bool = False) -> int:
            poller._next_at = 0.0
            poller._late_commits._next_at = math.inf
            poller._depth._complete_at = 0.0 if complete else math.inf
            (batch,) = poller.prepare(busy=False, hinted=False)
            ((_, parameters),) = batch.statements
            pages = count_pages(connection, database.queries["look"], parameters)
            (batch.answer,), failure = round_trip.exchange(batch.statements)
            assert failure is None
            batch.read()
            return pages

        yield look


def count_pages(connection, query, parameters) -> int:
    """Count the pages that a statement and its parts read."""
    explain = sql.SQL("explain (analyze, buffers, format json) ")
    ((((plan,),)),) = connection.execute(explain + query, parameters).fetchall()
    return plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]


@pytest.fixture
def gone(admin, connect, poller):
    """Many jobs have come and gone, and a session could still see them."""
    admin.execute(_GONE, {"rows": ROWS})
    holder = connect()
    holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    holder.execute("select count(*) from jobs_lib.jobs")
    admin.execute("delete from jobs_lib.jobs")
    admin.execute("vacuum analyze jobs_lib.jobs")
    (top,) = admin.execute("select last_value from jobs_lib.jobs_id_seq").fetchone()
    # A job that another executor has just claimed would move the cursor there.
    poller._claimer.cursors[HOME[0]].at = top


def settle_marks(poller, look) -> None:
    """Pretend that two seconds have passed since the last poll, and two before it."""
    for _ in range(2):
        poller._depth._marks = (0.0, poller._depth._marks[1])
        look(complete=True)


@pytest.mark.guarantee("FP25")
def test_a_poll_does_not_grow_with_rows_that_came_and_went(poller, look, gone):
    assert look(complete=True) > 500
    settle_marks(poller, look)
    assert look() < 400


def test_a_short_poll_finds_new_jobs(database, admin, poller, look, gone):
    settle_marks(poller, look)
    claimer = poller._claimer
    for position in claimer.cursors.values():
        position.may_have_more = False
    add = (
        "insert into jobs_lib.jobs (origin, type, payload, priority, state, run_at)"
        " values ('local/3', 'work', '{}', %s, %s, clock_timestamp()) returning id"
    )
    admin.execute(add, (0, "available"))
    look()
    assert [o for o, p in claimer.cursors.items() if p.may_have_more] == ["local/3"]
    assert not claimer.windows.prioritized
    admin.execute(add, (-1, "available"))
    look()
    assert claimer.windows.prioritized
    admin.execute(add, (0, "scheduled"))
    look()
    poller._next_at = math.inf
    assert poller.seconds_left() == 0
    (batch,) = poller.prepare(busy=False, hinted=False)
    with database.connect("test", impatient=True) as connection:
        pages = count_pages(
            connection, database.queries["promote"], dict(batch.statements)["promote"]
        )
    assert pages < 400


def test_a_complete_poll_finds_a_job_scheduled_for_long_ago(admin, poller, look, gone):
    settle_marks(poller, look)
    admin.execute(
        "insert into jobs_lib.jobs (origin, type, payload, state, run_at) values"
        " ('local/3', 'work', '{}', 'scheduled', clock_timestamp() - interval '1 day')"
    )
    look()
    poller._next_at = math.inf
    assert poller.seconds_left() > 0
    look(complete=True)
    poller._next_at = math.inf
    assert poller.seconds_left() == 0


@pytest.mark.guarantee("FP25")
def test_a_promotion_reads_nothing_that_is_not_due(database, admin, poller):
    admin.execute(
        "insert into jobs_lib.jobs (origin, type, payload, state, run_at)"
        " select 'local/' || n %% 16, 'work', '{}', 'scheduled', now() + interval '1d'"
        " from generate_series(1, %s) n",
        (ROWS,),
    )
    with database.connect("test", impatient=True) as connection:
        promotion = poller._prepare_promote()
        pages = count_pages(connection, database.queries["promote"], promotion)
    assert pages < 400


@pytest.mark.guarantee("FP25")
def test_the_query_for_filled_origins_runs_seldom_while_it_is_slow(
    database, admin, gone, wait_for
):
    filled = FilledOrigins(database)
    add = "insert into jobs_lib.jobs (origin, type, payload) values (%s, 'work', '{}')"
    admin.execute(add, ("zone/1",))
    with database.connect("test", impatient=True) as connection:
        query = database.queries["filled_origins"]
        assert count_pages(connection, query, {}) > 500
        counting = Mock(wraps=connection)
        for _ in range(100):
            assert filled.find(counting) == ["zone/1"]
        assert counting.execute.call_count < 5
        admin.execute(add, ("zone/2",))
        wait_for(
            lambda: filled.find(counting) == ["zone/1", "zone/2"],
            what="the new one is found",
        )


@pytest.mark.guarantee("FP25")
def test_a_heartbeat_does_not_grow_with_the_claims_that_came_and_went(
    database, admin, connect
):
    silent = uuid4()
    admin.execute(
        "insert into jobs_lib.processes (id, pod, roles, host, pid, version,"
        " heartbeat_at) values"
        " (%s, 'silent', '{}', 'h', 1, '0', now() - interval '2h')",
        (silent,),
    )
    admin.execute(
        "insert into jobs_lib.claims (owner, seq, ids, claimed_at)"
        " select o.id, n, '{1}', now() - interval '2h' from generate_series(1, %s) n,"
        " (values (gen_random_uuid()), (gen_random_uuid())) as o(id)",
        (ROWS,),
    )
    holder = connect()
    holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    holder.execute("select count(*) from jobs_lib.claims")
    admin.execute("delete from jobs_lib.claims")
    admin.execute("vacuum analyze jobs_lib.claims")
    admin.execute(
        "insert into jobs_lib.claims values (%s, 1, '{1}', now() - interval '2h')",
        (silent,),
    )
    with database.connect("test", impatient=True) as connection:
        query = database.queries["bury"]
        assert count_pages(connection, query, {"after": 3_600.0}) < 100
    assert not count(admin, "processes")
    assert not count(admin, "claims")
