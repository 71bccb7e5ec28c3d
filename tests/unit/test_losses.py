"""The cases in which a job itself caused the loss of its connection."""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import psycopg
import pytest

from jobs_lib.backoff import Retry
from jobs_lib.errors import UnavailableError
from jobs_lib.executor.lane import ClaimedJob, Finished, Lane, Outcome, Result
from jobs_lib.executor.running.transaction import refuse_lost
from jobs_lib.executor.settling.losses import Losses
from tests.support.claimed import make_claimed


class Type:
    """The part of a job type that matters here."""

    retry = Retry(max_attempts=1)


TYPES: Any = {"work": Type()}


def make_job() -> ClaimedJob:
    lane = Lane("local/0", 1, None, 1, UUID(int=1), Finished())
    return make_claimed(lane, 7)


def lose(
    losses: Losses, job: ClaimedJob, *, connected_at: float, since: float = 10.0
) -> Result:
    outcome = Outcome(job, Result.SNOOZED, "lost", 1.0, lost_since=since)
    judged = losses.judge([outcome], connected_at)
    losses.note([], judged)
    return judged[0].result


def test_the_second_loss_in_a_row_counts_when_the_other_connection_is_older():
    losses, job = Losses(TYPES), make_job()
    assert lose(losses, job, connected_at=5) is Result.SNOOZED
    assert lose(losses, job, connected_at=5) is Result.DISCARDED


def test_a_loss_counts_only_if_the_other_connection_outlived_the_loss_before():
    losses, job = Losses(TYPES), make_job()
    assert lose(losses, job, connected_at=5, since=10) is Result.SNOOZED
    # The other connection was lost with the first one, and is a new one since then.
    assert lose(losses, job, connected_at=15, since=20) is Result.SNOOZED
    assert lose(losses, job, connected_at=15, since=30) is Result.DISCARDED


def test_losses_of_both_connections_count_from_the_fifth_on():
    losses, job = Losses(TYPES), make_job()
    results = [lose(losses, job, connected_at=15) for _ in range(5)]
    assert results == [Result.SNOOZED] * 4 + [Result.DISCARDED]


def test_a_loss_that_is_not_written_is_not_counted():
    losses, job = Losses(TYPES), make_job()
    outcome = Outcome(job, Result.SNOOZED, "lost", 1.0, lost_since=10.0)
    for _ in range(5):
        assert losses.judge([outcome], 5)[0].result is Result.SNOOZED


def test_any_other_end_resets_the_count_of_losses():
    failed = [Outcome(make_job(), Result.RETRIED)]
    for completed in (True, False):
        losses, job = Losses(TYPES), make_job()
        lose(losses, job, connected_at=5)
        losses.note([job] if completed else [], [] if completed else failed)
        assert lose(losses, job, connected_at=5) is Result.SNOOZED


@pytest.mark.guarantee("FP12")
def test_a_loss_to_a_refusing_server_never_counts_and_is_retried_more_rarely(
    monkeypatch,
):
    monkeypatch.setattr(random, "random", lambda: 1.0)
    with pytest.raises(UnavailableError, match="refused") as refused:
        refuse_lost(lost=False, error=psycopg.errors.DiskFull("no room"), since=10.0)
    since = refused.value.lost_since
    losses, job, delays = Losses(TYPES), make_job(), []
    for _ in range(6):
        judged = losses.judge([Outcome(job, Result.SNOOZED, lost_since=since)], 5)
        losses.note([], judged)
        assert judged[0].result is Result.SNOOZED
        delays.append(judged[0].delay)
    assert delays == [0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_the_error_of_a_lost_connection_holds_the_time_of_its_loss():
    with pytest.raises(UnavailableError, match="lost") as lost:
        refuse_lost(lost=True, error=psycopg.OperationalError("gone"), since=10.0)
    assert lost.value.lost_since == 10.0
