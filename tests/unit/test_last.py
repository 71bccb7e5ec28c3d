"""Of a pile of jobs only the last one runs; the pile knows how long it has waited."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from jobs_lib.executor.claiming import last_only as last
from jobs_lib.executor.claiming.last_only import Superseding

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
GROUP = ("local/1", "g")


def job(number: int, type_: str = "publish") -> Any:
    """A job; job 1 was enqueued at noon, and each next one a minute later."""
    enqueued_at = NOON + timedelta(minutes=number - 1)
    return SimpleNamespace(id=number, type=type_, enqueued_at=enqueued_at)


def test_a_pile_waits_since_its_oldest_even_if_that_is_superseded():
    superseding = Superseding()
    superseding.keep(GROUP, "publish", 3, NOON)
    assert GROUP in superseding
    assert superseding.take(GROUP, job(3)) == NOON
    assert GROUP not in superseding


def test_a_job_after_a_cancelled_head_waits_since_its_own_enqueue():
    superseding = Superseding()
    superseding.keep(GROUP, "publish", 3, NOON)
    # Job 3 was cancelled meanwhile.
    assert superseding.take(GROUP, job(4)) == job(4).enqueued_at


def test_each_type_of_a_group_has_a_pile_of_its_own():
    superseding = Superseding()
    superseding.keep(GROUP, "publish", 3, NOON)
    superseding.keep(GROUP, "index", 4, NOON + timedelta(seconds=1))
    assert superseding.take(GROUP, job(4, "index")) == NOON + timedelta(seconds=1)
    assert GROUP in superseding
    assert superseding.take(GROUP, job(3)) == NOON
    assert GROUP not in superseding


def test_the_number_of_remembered_piles_is_limited(monkeypatch):
    monkeypatch.setattr(last, "_MOST", 3)
    superseding = Superseding()
    for n in range(10):
        superseding.keep(("local/1", f"g{n}"), "publish", n, NOON)
    assert len(superseding) == 3
    assert ("local/1", "g9") in superseding
    superseding.release({"local/1"})
    assert len(superseding) == 0
