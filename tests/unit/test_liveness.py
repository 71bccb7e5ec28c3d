"""The time after which a thread counts as dead."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from confluent_kafka import TopicPartition

from jobs_lib.kafka.member import GroupMember
from jobs_lib.telemetry import liveness
from jobs_lib.telemetry.liveness import Liveness, Pulse
from tests.support.apps import heard, make_app
from tests.support.clock import Clock


@pytest.fixture
def clock(monkeypatch):
    """The clock that liveness reads."""
    clock = Clock()
    monkeypatch.setattr(liveness, "time", clock)
    return clock


@pytest.mark.guarantee("O2", "FJ19")
def test_a_thread_without_a_beat_counts_as_dead_after_the_stated_time(clock):
    pulses = [Pulse("still", lambda: True), Pulse("going", lambda: True)]
    judge = Liveness(lambda: pulses, 30.0)
    with heard("thread.silent") as silent:
        for _ in range(4):
            assert judge.find_silent() == []
            clock.now += 9
            pulses[1].beat()
        assert judge.find_silent() == ["still"]
        clock.now += 9
        pulses[1].beat()
        assert judge.find_silent() == ["still"]
    assert [fields["thread"] for _, fields in silent] == ["still"]
    pulses[0].beat()
    assert judge.find_silent() == []


@pytest.mark.guarantee("O2")
def test_a_thread_that_waits_for_another_system_may_take_any_time(clock):
    pulse = Pulse("relay", lambda: True)
    judge = Liveness(lambda: [pulse], 30.0)
    with pulse.elsewhere():
        for _ in range(100):
            clock.now += 10
            assert judge.find_silent() == []


@pytest.mark.guarantee("O2")
def test_a_member_that_hands_its_partitions_over_may_take_its_time(clock):
    member = GroupMember(make_app("").settings, "g", ["t"])
    member.pulse = Pulse("poll", lambda: True)
    judge = Liveness(lambda: [member.pulse], 30.0)
    found: list[list[str]] = []

    def revoked(_) -> None:
        for _ in range(12):
            clock.now += 10
            found.append(judge.find_silent())

    member.listen(Mock(revoked=revoked))
    member._on_revoke(Mock(), [TopicPartition("t", 0)])
    assert found == [[]] * 12


@pytest.mark.guarantee("O2")
def test_a_process_that_was_frozen_is_not_dead(clock):
    pulse = Pulse("dispatcher", lambda: True)
    judge = Liveness(lambda: [pulse], 30.0)
    judge.find_silent()
    clock.now += 3_600
    assert judge.find_silent() == []
    clock.now += 3_600
    pulse.beat()
    assert judge.find_silent() == []


@pytest.mark.guarantee("O2", "FJ19")
def test_a_thread_that_is_gone_counts_as_dead_wherever_it_was(clock):
    pulse = Pulse("worker", lambda: False)
    pulse.away = True
    judge = Liveness(lambda: [pulse], 30.0)
    for _ in range(4):
        clock.now += 10
        judge.find_silent()
    assert judge.find_silent() == ["worker"]


def test_a_stopped_thread_is_not_judged(clock):
    pulses = [Pulse("worker", lambda: True)]
    judge = Liveness(lambda: pulses, 30.0)
    for _ in range(4):
        clock.now += 10
        judge.find_silent()
    pulses.clear()
    assert judge.find_silent() == []
