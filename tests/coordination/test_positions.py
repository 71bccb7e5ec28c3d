"""Operators set the positions of paused groups."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import TopicPartition

from jobs_lib.coordination.messages import ClaimingPartition, ReleaseGroup, Shared
from jobs_lib.coordination.world import Outcome
from jobs_lib.errors import OperatingError
from jobs_lib.operating.coordination import pause, positions, set_position
from tests.coordination.commands import GROUP, WAIT, look
from tests.support.apps import heard
from tests.support.topics import make_anew
from tests.support.waiting import linger


@pytest.mark.guarantee("M20", "M3")
@pytest.mark.parametrize(
    "delivery",
    [pytest.param("at_least_once", marks=pytest.mark.slow), "at_most_once"],
)
def test_a_group_goes_on_where_an_operator_has_set_it(
    log_topic, topic, publish, consume, run, wait_for, delivery
):
    log, data = log_topic(), topic(2)
    now = datetime.now(UTC)
    for number in range(2):
        for minutes in (60, 20):
            at = now - timedelta(minutes=minutes)
            publish(data, 10, number, at_ms=round(at.timestamp() * 1000))
    consumer, handler = consume(log, data, delivery=delivery)

    def positions() -> list[int | None]:
        read = consumer.member.log.find
        return [read(Shared(GROUP, data, number)).position for number in range(2)]

    wait_for(lambda: len(handler.seen) == 40)
    wait_for(lambda: positions() == [20, 20])
    run(log, "pause", GROUP, "--for", "10m")
    paused = look(run, log)["pauses"]
    between = f"{now - timedelta(minutes=40):%Y-%m-%dT%H:%M}"
    done = run(log, "set-position", GROUP, data, "--to", between, "--json")
    assert json.loads(done.stdout) == [
        {"topic": data, "partition": number, "before": 20, "after": 10}
        for number in range(2)
    ]
    # It is set for the group as a whole, and its pause ends when it would have ended.
    assert positions() == [10, 10]
    after = look(run, log)["pauses"]
    assert [one["until"] for one in after] == [one["until"] for one in paused]
    assert look(run, log)["parts"][0]["state"] == "free"
    chosen = ("set-position", GROUP, data, "--partition", 1)
    run(log, *chosen, "--to", "latest")
    run(log, *chosen, "--to", "earliest")
    run(log, *chosen, "--to", "17")
    assert positions() == [10, 17]
    handler.seen.clear()
    run(log, "resume", GROUP)
    wait_for(lambda: len(handler.seen) == 13, what=lambda: str(handler.seen))
    wait_for(lambda: positions() == [20, 20])
    assert sorted(handler.seen) == [
        *((0, offset) for offset in range(10, 20)),
        *((1, offset) for offset in range(17, 20)),
    ]


@pytest.mark.guarantee("M3")
def test_only_offsets_that_kafka_has_given_are_taken(
    log_topic, topic, publish, run, kafka_admin, settings
):
    log, data = log_topic(1), topic(2)
    publish(data, 10, 0)
    publish(data, 20, 1)
    at = TopicPartition(data, 1, 5)
    kafka_admin.delete_records([at])[at].result()
    run(log, "pause", GROUP, "--for", "10m")
    both = ("set-position", GROUP, data, "--partition", 0, "--partition", 1, "--to")
    refused = run(log, *both, "11", code=2)
    assert f"{data}/0 has no offset 11: its records begin at 0, and the next one" in (
        str(refused.exception)
    )
    assert "will be 10" in str(refused.exception)
    refused = run(log, *both, "4", code=2)
    assert f"{data}/1 has no offset 4: its records begin at 5" in str(refused.exception)
    refused = run(log, "set-position", GROUP, data, "--to", "7", code=2)
    assert "the offset 7 needs partitions (--partition)" in str(refused.exception)
    refused = run(log, "set-position", GROUP, data, "--partition", 2, "--to", 1, code=2)
    assert f"{data}/2 does not exist" in str(refused.exception)
    refused = run(log, "set-position", GROUP, "no-topic", "--to", "latest", code=2)
    assert "no-topic" in str(refused.exception)
    # Where one is refused, none is set.
    assert look(run, log)["parts"] == []
    run(log, *both, "10")
    assert [one["position"] for one in look(run, log)["parts"]] == [10, 10]
    # What is older than all records begins with the oldest, and what is newer, behind.
    old, new = datetime(1, 1, 1, tzinfo=UTC), datetime(2999, 1, 1, tzinfo=UTC)
    assert positions.find_offsets(settings, data, old) == {0: 0, 1: 5}
    assert positions.find_offsets(settings, data, new) == {0: 10, 1: 20}


@pytest.mark.guarantee("M3", "M20")
# Kafka has no such topic for a moment.
@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize(
    ("delivery", "runs_meanwhile"),
    [
        ("at_most_once", False),
        pytest.param("at_least_once", False, marks=pytest.mark.slow),
        pytest.param("at_most_once", True, marks=pytest.mark.slow),
        pytest.param("at_least_once", True, marks=pytest.mark.slow),
    ],
)
def test_a_topic_that_is_made_anew_and_is_shorter_waits_until_its_position_is_set(
    log_topic,
    topic,
    publish,
    consume,
    run,
    wait_for,
    kafka_admin,
    delivery,
    runs_meanwhile,
):
    log, data = log_topic(1), topic(1)
    shared = Shared(GROUP, data, 0)
    publish(data, 10)
    consumer, handler = consume(log, data, delivery=delivery)
    wait_for(lambda: consumer.member.log.find(shared).position == 10)
    if not runs_meanwhile:
        consumer.stop()
    with heard("offset.lost") as lost:
        make_anew(kafka_admin, data, 1)
        publish(data, 3)
        if not runs_meanwhile:
            consumer, handler = consume(log, data, delivery=delivery)
        wait_for(lambda: lost, timeout=60, what="it says that its position is lost")
        # It stands still, also once the new topic has that offset.
        publish(data, 10)
        linger(1.0)
        ((_, fields),) = lost
    assert fields["origin"] == f"{data}/0"
    assert (fields["next_offset"], fields["start"]) == (10, 0)
    # A process that runs may have looked before the new records were there.
    assert fields["end"] in ({0, 1, 2, 3} if runs_meanwhile else {3})
    assert consumer.member.log.find(shared).position == 10
    before = handler.seen.copy()
    assert len(before) == (10 if runs_meanwhile else 0)
    run(log, "pause", GROUP, "--for", "10m")
    run(log, "set-position", GROUP, data, "--to", "earliest")
    run(log, "resume", GROUP)
    wait_for(lambda: len(handler.seen) >= len(before) + 13, what="all are handled")
    assert handler.seen == [*before, *((0, offset) for offset in range(13))]


@pytest.mark.guarantee("M20")
def test_a_position_is_set_only_while_the_whole_group_is_paused(
    log_topic, topic, publish, run, open_log, settings
):
    log, data = log_topic(2), topic(1)
    publish(data, 10)
    words = ("set-position", GROUP, data, "--to", "latest")
    way_out = f"jobs-lib coordination pause {GROUP} --for 10m --log {log}"
    refused = str(run(log, *words, code=2).exception)
    assert "is not paused" in refused
    assert way_out in refused
    other = open_log(log)
    later = round(time.time() * 1000) + 600_000
    other.send(ReleaseGroup(other.sender, later), place=0).wait(WAIT)
    refused = str(run(log, *words, code=2).exception)
    assert "is paused in 1 of the 2 partitions of the coordination log" in refused
    other.send(ReleaseGroup(other.sender, later), place=1).wait(WAIT)
    assert f"resume {GROUP} --log {log}" in run(log, *words).stderr
    run(log, "resume", GROUP)
    pause(settings, log, GROUP, timedelta(seconds=4))
    refused = str(run(log, *words, code=2).exception)
    assert "ends too soon" in refused or "is not paused" in refused
    assert look(run, log)["parts"][0]["position"] == 10


def test_a_position_that_does_not_hold_is_reported(
    log_topic, topic, publish, open_log, settings, monkeypatch
):
    log, data = log_topic(1), topic(1)
    publish(data, 10)
    pause(settings, log, GROUP, timedelta(minutes=10))
    set_position(settings, log, GROUP, data, "latest")
    real = positions._claim

    def claim(opened, partitions):
        found = real(opened, partitions)
        # Just then somebody else ends the pause.
        opened.send(ReleaseGroup(opened.sender, 0), place=0).wait(WAIT)
        return found

    monkeypatch.setattr(positions, "_claim", claim)
    with pytest.raises(OperatingError, match=f"since the pause was over.*: {data}/0"):
        set_position(settings, log, GROUP, data, "earliest")
    reading = open_log(log, only_reads=True)
    assert reading.find(Shared(GROUP, data, 0)).position == 10


def test_a_partition_that_another_operator_claims_is_refused_and_none_is_set(
    log_topic, topic, publish, open_log, settings, monkeypatch, wait_for
):
    log, data = log_topic(1), topic(3)
    for number in range(3):
        publish(data, 1, number)
    other = open_log(log)
    pause(settings, log, GROUP, timedelta(minutes=10))
    until = other.get_world(0).pauses
    wait_for(lambda: GROUP in until)
    real = positions._find_ends

    def find_ends(opened):
        ends = real(opened)
        # It pauses the group in its own name, a moment before this one does.
        other.send(ReleaseGroup(other.sender, ends[0]), place=0).wait(WAIT)
        shared = Shared(GROUP, data, 1)
        assert (
            other.send(ClaimingPartition(other.sender, shared, 60_000)).wait(WAIT)
            is Outcome.VALID
        )
        return ends

    monkeypatch.setattr(positions, "_find_ends", find_ends)
    monkeypatch.setattr(positions, "wait_until_free", lambda *_: [])
    with pytest.raises(OperatingError, match=f"{data}/1 cannot be claimed, since ano"):
        set_position(settings, log, GROUP, data, "latest")
    other.read_to_end()
    found = [other.find(Shared(GROUP, data, number)) for number in range(3)]
    assert [one.position for one in found] == [None] * 3
    wait_for(
        lambda: (
            [other.find(Shared(GROUP, data, one)).holding for one in (0, 2)]
            == [None] * 2
        ),
        what="what it had claimed is free again",
    )
