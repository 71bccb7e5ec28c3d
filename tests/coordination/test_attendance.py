"""Who is there, as far as shares go: clocks may differ, and members may die."""

from __future__ import annotations

import pytest

from jobs_lib.coordination import shares
from jobs_lib.coordination.messages import Heartbeat, Sender, Shared
from jobs_lib.coordination.shares import Attendance
from jobs_lib.coordination.world import Entry, Holding, Outcome, World
from tests.support.clock import Clock

GROUP = "shop.mailer"
INTERVAL_MS = 10_000


@pytest.fixture
def clock(monkeypatch):
    """The clock that the members' machine has."""
    clock = Clock(1_000.0)
    monkeypatch.setattr(shares, "read_clock", clock.monotonic)
    return clock


@pytest.fixture
def attendance():
    """Who is there, by what a member has read."""
    return Attendance(GROUP, INTERVAL_MS)


def beat(attendance, place, client, time_ms) -> None:
    """Read a heartbeat of a client in a partition of the log."""
    sender = Sender(GROUP, client, f"a run of {client}")
    message = Heartbeat(sender, Shared(GROUP, "orders", place), 1, None)
    attendance.note(place, message, Outcome.VALID, time_ms)


@pytest.mark.parametrize("apart_ms", [25_000, -25_000, 3_600_000])
def test_members_stay_where_the_clocks_of_two_leaders_differ(
    attendance, clock, apart_ms
):
    for second in range(0, 60, 3):
        clock.now = 1_000.0 + second
        time_ms = 5_000_000 + 1_000 * second
        # Each of them holds partitions in both places of the log.
        beat(attendance, 0, "ann", time_ms + apart_ms)
        beat(attendance, 0, "ben", time_ms + apart_ms)
        assert attendance.list_members() == ["ann", "ben"]
        beat(attendance, 1, "ann", time_ms)
        assert attendance.list_members() == ["ann", "ben"]
        beat(attendance, 1, "ben", time_ms)
        assert attendance.list_members() == ["ann", "ben"]


def test_a_dead_member_goes_although_nobody_else_writes_where_it_wrote(
    attendance, clock
):
    beat(attendance, 0, "ann", 5_000_000)
    beat(attendance, 1, "ben", 5_000_000)
    assert attendance.list_members() == ["ann", "ben"]
    for second in range(3, 24, 3):
        clock.now = 1_000.0 + second
        beat(attendance, 1, "ben", 5_000_000 + 1_000 * second)
        there = ["ann", "ben"] if second <= 20 else ["ben"]
        assert attendance.list_members() == there


def test_who_reads_an_old_log_counts_only_those_who_were_there_at_its_end(
    attendance, clock
):
    worlds = [World(0), World(1)]
    for world, client, age_ms in zip(
        worlds, ("ann", "ben"), (5_000, 25_000), strict=True
    ):
        world.now_ms = 5_000_000 + 3_600_000 * world.place
        holding = Holding(client, "a run", 1, INTERVAL_MS, world.now_ms - age_ms, True)
        world.entries[Shared(GROUP, "orders", world.place)] = Entry(5, holding)
    attendance.read(worlds)
    assert attendance.list_members() == ["ann"]
    clock.now += 15.5
    assert attendance.list_members() == []
