"""Jumps: a claim gets past rows that cannot run, and past no others."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb

from jobs_lib.executor.claiming.cursor import WIDEST
from tests.support.apps import executing, make_app

ORIGIN = "local/0"
BLOCKED = [("g", "scheduled", 0, 0), ("g", "available", 0, 0)]
FREE = (None, "available", 0, 0)


@pytest.fixture
def passed():
    """The rows that the last jump has passed over only because of their value."""
    return []


@pytest.fixture
def jump(database_url, admin, passed):
    """A function that jumps over rows: group, state, priority, crashes of each."""
    queries = make_app(database_url).database().queries

    def jump(
        rows, *, cursor=0, limit=100, room=1, groups=(), floors=(), lasts=(),
        skipped=(), full=(),
    ):  # fmt: skip
        ids = [
            admin.execute(
                'insert into jobs_lib.jobs (origin, type, "group", state, priority,'
                " crashes, attempt, run_at, payload)"
                " values (%s, 'work', %s, %s, %s, %s, (%s = 'scheduled')::int,"
                " case when %s = 'scheduled' then now() + interval '1 day' end, %s)"
                " returning id",
                (ORIGIN, *row, row[1], row[1], Jsonb({"place": place})),
            ).fetchone()[0]
            for place, row in enumerate(rows)
        ]
        found, furthest, count, full_ids, full_values, *_ = admin.execute(
            queries["jump_limited" if full else "jump"],
            {
                "origin": ORIGIN,
                "cursor": ids[cursor - 1] if cursor else 0,
                "limit": limit,
                "room": room,
                "groups": list(groups),
                "floor_groups": [group for group, _ in floors],
                "floor_ids": [ids[at] for _, at in floors],
                "last_types": list(lasts),
                "skipped_types": list(skipped),
                "field": "place" if full else None,
                "full": [str(place) for place in full],
                "refilled": [],
            },
        ).fetchone()
        place = {job_id: n for n, job_id in enumerate(ids)} | {None: None}
        assert [str(place[job_id]) for job_id in full_ids] == full_values
        passed[:] = [place[job_id] for job_id in full_ids]
        return [place[job_id] for job_id in found], place[furthest], count

    return jump


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([*BLOCKED, FREE], [2]),
        ([*BLOCKED, ("h", "available", 0, 0)], [2]),
        # A claim returns a suspect, and lets it run alone.
        ([*BLOCKED, ("h", "available", 0, 1)], [2]),
        ([*BLOCKED, (None, "available", 0, 1)], [2]),
        # Other priorities have windows of their own; jobs behind them in a group wait.
        ([(None, "available", 1, 0), ("h", "available", -1, 0), FREE], [2]),
        ([("h", "available", 1, 0), ("h", "available", 0, 0)], []),
        ([(None, "scheduled", 0, 0), *BLOCKED], []),
        ([], []),
    ],
)
def test_a_jump_finds_the_first_row_that_a_claim_might_take(jump, rows, found):
    assert jump(rows) == (found, len(rows) - 1 if rows else None, len(rows))


def test_a_failed_head_before_the_jump_blocks_its_own_group(jump):
    assert jump([*BLOCKED, FREE], cursor=1) == ([2], 2, 2)
    assert jump([("h", "available", 0, 0)] * 2, cursor=1) == ([], 1, 1)


@pytest.mark.parametrize("cursor", [0, 1])
def test_a_jump_finds_the_newer_last_only_job_behind_a_failed_one(jump, cursor):
    rows = [*BLOCKED, BLOCKED[1]]
    assert jump(rows, cursor=cursor, lasts=["work"])[0] == [1]
    assert jump(rows, cursor=cursor, lasts=["other"])[0] == []


def test_a_jump_passes_over_groups_in_flight_and_starts_at_floors(jump):
    rows = [("h", "available", 0, 0)] * 3
    assert jump([*rows, FREE], groups=["h"]) == ([3], 3, 4)
    # The start says that no job of the group lies below it, and the jump trusts it.
    assert jump(rows, cursor=1, floors=[("h", 0)]) == ([1], 2, 2)


@pytest.mark.parametrize(
    ("asked", "found"),
    [({"room": 2}, [0, 3]), ({"room": 9}, [0, 3, 4]), ({"groups": ["h"]}, [0, 3])],
)
def test_a_jump_finds_as_many_as_there_is_room_for(jump, asked, found):
    rows = [FREE, *BLOCKED, FREE, ("h", "available", 0, 0), ("h", "available", 0, 0)]
    assert jump(rows, **{"room": 9, **asked}) == (found, 5, 6)


def test_a_jump_reads_no_more_than_its_limit(jump):
    assert jump([*BLOCKED, *BLOCKED, FREE], limit=3) == ([], 2, 3)


@pytest.mark.guarantee("J18")
def test_jobs_behind_many_that_cannot_run_are_reached_and_so_are_urgent_ones(
    database_url, admin, wait_for
):
    """Blocked groups have more rows than a jump may read; a free row lies behind."""
    app = make_app(database_url)
    ran = []

    @app.job()
    def work(job, n: int) -> None:
        ran.append(n)

    admin.execute(
        'insert into jobs_lib.jobs (origin, type, "group", state, run_at, payload)'
        " select %s, 'work', 'g' || n %% 100,"
        " case when n < 100 then 'scheduled' else 'available' end,"
        " case when n < 100 then now() + interval '1 day' end,"
        " '{\"n\": -1}' from generate_series(0, %s) n",
        (ORIGIN, WIDEST + 1_000),
    )
    with app.database().connect("test") as connection, connection.transaction():
        work.options(origin=ORIGIN).enqueue(connection, n=1)
        work.options(origin=ORIGIN, priority="high").enqueue(connection, n=2)
    with executing(app, [ORIGIN]):
        wait_for(lambda: sorted(ran) == [1, 2], what=lambda: f"both ran: {ran}")


@pytest.mark.parametrize(("skipped", "found"), [("work", []), ("other", [0, 1])])
def test_a_jump_leaves_types_alone_that_may_not_run_here(jump, skipped, found):
    rows = [FREE, ("g", "available", 0, 0)]
    assert jump(rows, skipped=[skipped], room=2) == (found, 1, 2)


@pytest.mark.guarantee("J18")
@pytest.mark.parametrize("group", [None, "g"], ids=["alone", "groups"])
@pytest.mark.parametrize("why", ["unknown", "paused"])
def test_jobs_behind_very_many_of_a_type_that_may_not_run_are_reached(
    database_url, admin, wait_for, why, group
):
    app = make_app(database_url)
    ran = []

    @app.job()
    def work(job) -> None:
        ran.append(job.id)

    if why == "paused":
        app.job(name="other")(lambda job: None)
        admin.execute(
            "insert into jobs_lib.pauses (kind, name) values ('type', 'other')"
        )
    admin.execute(
        'insert into jobs_lib.jobs (origin, type, "group", payload)'
        " select %s, 'other', %s || n, '{}' from generate_series(1, 100000) n",
        (ORIGIN, group),
    )
    with app.database().connect("test") as connection, connection.transaction():
        job = work.options(origin=ORIGIN).enqueue(connection)
    with executing(app, [ORIGIN]):
        wait_for(lambda: ran == [job], timeout=30, what="it has run")


def test_a_jump_passes_over_full_values_and_tells_which(jump, passed):
    rows = [FREE, FREE, ("g", "available", 0, 0), FREE, (None, "scheduled", 0, 0)]
    assert jump(rows, full=[0, 2, 4], room=5) == ([1, 3], 4, 5)
    assert sorted(passed) == [0, 2]
