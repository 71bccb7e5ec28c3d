"""What the regular statements read while a session keeps an old snapshot."""

from __future__ import annotations

import math
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from jobs_lib.executor.courier import Courier
from jobs_lib.executor.survey import Survey
from jobs_lib.jobs.claim import Claimer
from tests.support.apps import HOME, make_app

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
def survey(admin):
    """The survey of an executor that owns all origins."""
    owner = uuid4()
    admin.execute(
        "insert into jobs_lib.origins (role, origin, owner, epoch)"
        " select 'execute', unnest(%s::text[]), %s, 1",
        (HOME, owner),
    )
    types = {"work": make_app("").job(name="work")(lambda job: None)}
    claimer = Claimer(owner, UUID(int=1), types)
    claimer.add(dict.fromkeys(HOME, 1))
    return Survey(claimer, 0.01)


@pytest.fixture
def look(database, survey):
    """A function that looks once; returns how many pages the look has read."""
    with database.connect("test", impatient=True) as connection:
        courier = Courier(connection, database.queries, prepare=True)

        def look(*, complete: bool = False) -> int:
            survey._next_at = 0.0
            survey._sweeper._next_at = math.inf
            survey._looks._complete_at = 0.0 if complete else math.inf
            (batch,) = survey.prepare(busy=False, hinted=False)
            ((_, parameters),) = batch
            pages = count_pages(connection, database.queries["look"], parameters)
            (answer,), failure = courier.exchange(batch)
            assert failure is None
            survey.read(batch, answer)
            return pages

        yield look


def count_pages(connection, query, parameters) -> int:
    """How many pages a statement reads, with those of its parts."""
    explain = sql.SQL("explain (analyze, buffers, format json) ")
    ((((plan,),)),) = connection.execute(explain + query, parameters).fetchall()
    return plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]


@pytest.fixture
def gone(admin, connect, survey):
    """Many jobs have come and gone, and a session would still see them."""
    admin.execute(_GONE, {"rows": ROWS})
    holder = connect()
    holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    holder.execute("select count(*) from jobs_lib.jobs")
    admin.execute("delete from jobs_lib.jobs")
    admin.execute("vacuum analyze jobs_lib.jobs")
    (top,) = admin.execute("select last_value from jobs_lib.jobs_id_seq").fetchone()
    # As another executor's job, which it has just claimed, tells it.
    survey._claimer.positions[HOME[0]].cursor = top


def settle_marks(survey, look) -> None:
    """As if two seconds had passed since the last look, and two more before it."""
    for _ in range(2):
        survey._looks._marks = (0.0, survey._looks._marks[1])
        look(complete=True)


@pytest.mark.guarantee("FP25")
def test_a_look_does_not_grow_with_what_came_and_went(survey, look, gone):
    assert look(complete=True) > 500
    settle_marks(survey, look)
    assert look() < 400


def test_a_short_look_finds_what_comes(database, admin, survey, look, gone):
    settle_marks(survey, look)
    claimer = survey._claimer
    for position in claimer.positions.values():
        position.deep = False
    add = (
        "insert into jobs_lib.jobs (origin, type, payload, priority, state, run_at)"
        " values ('local/3', 'work', '{}', %s, %s, clock_timestamp()) returning id"
    )
    admin.execute(add, (0, "available"))
    look()
    assert [o for o, p in claimer.positions.items() if p.deep] == ["local/3"]
    assert not claimer.windows.prioritized
    admin.execute(add, (-1, "available"))
    look()
    assert claimer.windows.prioritized
    admin.execute(add, (0, "scheduled"))
    look()
    survey._next_at = math.inf
    assert survey.seconds_left() == 0
    (batch,) = survey.prepare(busy=False, hinted=False)
    with database.connect("test", impatient=True) as connection:
        pages = count_pages(
            connection, database.queries["promote"], dict(batch)["promote"]
        )
    assert pages < 400


def test_what_was_scheduled_for_long_ago_is_found_by_a_complete_look(
    admin, survey, look, gone
):
    settle_marks(survey, look)
    admin.execute(
        "insert into jobs_lib.jobs (origin, type, payload, state, run_at) values"
        " ('local/3', 'work', '{}', 'scheduled', clock_timestamp() - interval '1 day')"
    )
    look()
    survey._next_at = math.inf
    assert survey.seconds_left() > 0
    look(complete=True)
    survey._next_at = math.inf
    assert survey.seconds_left() == 0


@pytest.mark.guarantee("FP25")
def test_a_promotion_reads_nothing_that_is_not_due(database, admin, survey):
    admin.execute(
        "insert into jobs_lib.jobs (origin, type, payload, state, run_at)"
        " select 'local/' || n %% 16, 'work', '{}', 'scheduled', now() + interval '1d'"
        " from generate_series(1, %s) n",
        (ROWS,),
    )
    with database.connect("test", impatient=True) as connection:
        promotion = survey._prepare_promote()
        pages = count_pages(connection, database.queries["promote"], promotion)
    assert pages < 400
