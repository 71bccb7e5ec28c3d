"""A claim asks for some jobs by id."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import pytest

from jobs_lib.executor.claiming.claimer import Claimer
from jobs_lib.executor.claiming.found import read_rows
from jobs_lib.executor.claiming.rows import JOB, WINDOW, ClaimRow
from jobs_lib.executor.lane import Lane
from tests.support.claimed import make_claimed

ORIGIN, OTHER = "local/0", "local/1"


@pytest.fixture
def claimer():
    """A claimer that owns one origin."""
    claimer = Claimer(UUID(int=1), UUID(int=2), {})
    claimer.take({ORIGIN: 1})
    return claimer


def test_rows_of_origins_that_must_wait_hold_up_no_others(claimer):
    claimer.take({OTHER: 1})
    claimer.wanted.extra = {1: OTHER, 2: OTHER, 3: ORIGIN}
    claimer.pause({"origin": frozenset([OTHER])})
    claimer.cursors[ORIGIN].seen = True
    _, asked = claimer.prepare(1)
    assert asked["extra_ids"] == "{3}"


def test_a_claim_asks_for_no_job_of_an_origin_before_its_first_poll(claimer):
    claimer.wanted.extra = {3: ORIGIN}
    claimer.wanted.hurry({7: ORIGIN, 9: OTHER})
    assert claimer.prepare(1) is None
    claimer.cursors[ORIGIN].seen = True
    _, asked = claimer.prepare(1)
    assert asked["extra_ids"] == "{7}"


def test_a_claim_asks_for_no_job_of_an_origin_that_has_left(claimer):
    lane = Lane(OTHER, 1, None, 1, UUID(int=2), claimer.finished)
    claimer.take_back(make_claimed(lane, 7))
    assert claimer.wanted.extra == {}
    claimer.in_flight.late[8] = OTHER
    claimer.prepare(1)
    assert claimer.wanted.extra == {}


ROW = ClaimRow(
    kind=JOB,
    origin=ORIGIN,
    id=7,
    type="work",
    group="g",
    attempt=2,
    crashes=1,
    priority=-1,
    payload="{}",
    run_at=datetime(2026, 1, 1, tzinfo=UTC),
    enqueued=3.5,
    headers={"a": "b"},
    cut=True,
    delayed_or_placed=True,
    age=4.5,
    place="(5,6)",
    value="v",
)
"""In this row no two columns have the same value."""


@pytest.mark.parametrize("by_value", [False, True])
def test_each_column_of_a_claimed_row_is_read_into_its_field(claimer, by_value):
    row = tuple(ROW) if by_value else ROW[:-1]
    found = read_rows(
        [row], claimer.cursors, claimer.in_flight, claimer._open_lane, by_value=by_value
    )
    (job,), (lane,) = found.jobs, found.lanes.values()
    assert (job.origin, job.id, job.type, job.group) == (ORIGIN, 7, "work", "g")
    assert (job.attempt, job.crashes, job.priority) == (4, 1, -1)
    assert (job.payload, job.run_at, job.enqueued) == ("{}", ROW.run_at, 3.5)
    assert (job.headers, job.place, job.placed) == ({"a": "b"}, "(5,6)", True)
    assert job.value == ("v" if by_value else None)
    assert found.ages == {7: (True, 4.5)}
    assert lane.more


@pytest.mark.parametrize(
    ("mark", "age", "placed"),
    [(True, None, True), (False, None, False), (True, 4.5, True), (False, 4.5, True)],
)
def test_a_mark_of_a_job_that_runs_last_only_says_nothing_of_places(
    claimer, mark, age, placed
):
    row = ROW._replace(delayed_or_placed=mark, age=age)[:-1]
    found = read_rows(
        [row], claimer.cursors, claimer.in_flight, claimer._open_lane, by_value=False
    )
    (job,) = found.jobs
    assert job.placed is placed
    assert job.name_places() == (f"job {ORIGIN}:7" if placed else None)
    assert found.ages == ({} if age is None else {7: (mark, age)})


def test_a_window_row_is_read_from_the_columns_of_a_job(claimer):
    window = ROW._replace(kind=WINDOW, attempt=12, priority=1, cut=False)
    found = read_rows(
        [window[:-1]], claimer.cursors, claimer.in_flight, claimer._open_lane,
        by_value=False,
    )  # fmt: skip
    assert found.windows == [(ORIGIN, 1, 7, 12, False)]
    assert (found.jobs, found.claimed) == ([], False)
