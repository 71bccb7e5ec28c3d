"""The log itself: created, checked, and compared with its snapshots."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Producer, TopicPartition

from jobs_lib.coordination import snapshots
from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.coordination.messages import (
    ClaimingPartition,
    Probe,
    ReleasingPartition,
    Shared,
    encode,
)
from jobs_lib.coordination.verification import Result, verify
from jobs_lib.errors import TopicError
from jobs_lib.kafka.topic_settings import read_effective
from jobs_lib.operating.coordination import create_log, find_log_faults
from tests.coordination.commands import GROUP, WAIT
from tests.support.topics import delete_topics, grow_topic


@pytest.fixture
def name(kafka_admin, tmp_path):
    """A name of a topic that is not there; what has it at the end is deleted."""
    name = f"log-{tmp_path.name}"
    yield name
    delete_topics(kafka_admin, [name])


@pytest.fixture
def often(monkeypatch):
    """Snapshots come often, and are used even in a short log."""
    monkeypatch.setattr(snapshots, "EVERY", 20)
    monkeypatch.setattr(snapshots, "_WINDOW", 30)
    monkeypatch.setattr(snapshots, "LARGEST", 300)


@pytest.mark.guarantee("M21")
def test_a_log_is_made_as_members_need_it(name, run, open_log, settings):
    told = run(name, "create", "--partitions", 3).stdout
    assert told == f"created: {name}, with 3 partitions\n"
    assert read_effective(settings, name, WANTED) == WANTED
    assert open_log(name).partitions == 3
    told = run(name, "create", "--partitions", 3).stdout
    assert told == f"there already: {name}, with 3 partitions\n"
    refused = run(name, "create", code=2)
    assert "exists with 3 partitions, and 8 are asked for" in str(refused.exception)
    assert "Give --partitions 3" in str(refused.exception)


def test_a_topic_with_other_settings_is_no_log_to_create(topic, run):
    refused = run(topic(8), "create", code=2)
    assert "cannot be a coordination log: message.timestamp.type=Cr" in (
        str(refused.exception)
    )


def test_what_kafka_refuses_to_create_is_named(settings):
    with pytest.raises(TopicError, match=r"'log-of-many' cannot .*eplica"):
        create_log(settings, "log-of-many", replication=9)
    with pytest.raises(TopicError, match="'no name!' cannot be created"):
        create_log(settings, "no name!")


@pytest.mark.guarantee("M21")
def test_a_check_names_each_setting_that_loses_records_and_the_way_out(
    topic, log_topic, run
):
    wrong = {
        "message.timestamp.type": "CreateTime",
        "cleanup.policy": "compact",
        "retention.ms": "60000",
        "retention.bytes": "1000",
        "unclean.leader.election.enable": "true",
    }
    bad = topic(2, prefix="log", config=wrong)
    rows = json.loads(run(bad, "check", "--json", code=1).stdout)
    errors = {row["what"].split("=")[0]: row for row in rows if row["level"] == "error"}
    assert errors.keys() == wrong.keys()
    for setting, row in errors.items():
        assert f"{setting}={wrong[setting]}, and it needs" in row["what"]
        assert f"--add-config {setting}={WANTED[setting]}" in row["way_out"]
        assert bad in row["way_out"]
    # Of this broker's own topics there is one copy. Members take that.
    good = log_topic()
    (row,) = json.loads(run(good, "check", "--json").stdout)
    assert (row["level"], "has one replica" in row["what"]) == ("warn", True)
    assert "--replication 3" in row["way_out"]


@pytest.mark.guarantee("M21")
def test_a_check_finds_a_log_that_is_missing_has_grown_or_is_cut_too_soon(
    log_topic, run, open_log, kafka_admin, settings
):
    (row,) = json.loads(run("no-log", "check", "--json", code=1).stdout)
    assert "'no-log' does not exist" in row["what"]
    assert row["way_out"] == "jobs-lib coordination create --log no-log"
    log = log_topic(2, retention_ms="3600000")
    here = open_log(log)
    claim = ClaimingPartition(here.sender, Shared(GROUP, "orders", 0), 500)
    here.send(claim).wait(WAIT)
    here.stop()
    assert [one.level for one in find_log_faults(settings, log)] == ["warn"]
    found = find_log_faults(settings, log, 37.0)
    assert "retention.ms=3600000, and it needs -1, or 3700000" in found[0].what
    grow_topic(kafka_admin, log, 3)
    found = find_log_faults(settings, log)
    assert "has 3 partitions, and its records are of a log of 2" in found[0].what
    refused = run(log, "check", "--interval", "0", code=2)
    assert "interval=0.0 must be seconds from 0.1 to 3600" in str(refused.exception)


def fill(log, count: int = 100) -> None:
    """Let some partitions be claimed and released, until there are snapshots."""
    for number in range(10):
        shared = Shared(GROUP, "orders", number)
        claim = log.send(ClaimingPartition(log.sender, shared, 500))
        claim.wait(WAIT)
        if number % 2:
            at = claim.offset
            log.send(ReleasingPartition(log.sender, shared, at, number)).wait(WAIT)
    for _ in range(count - 15):
        log.send(Probe(log.sender), place=0).wait(WAIT)


@pytest.mark.guarantee("M4")
@pytest.mark.usefixtures("often")
def test_the_whole_log_says_the_same_as_its_last_snapshot(
    log_topic, run, open_log, settings, bootstrap_servers, kafka_admin, wait_for
):
    log = log_topic(1)
    (empty,) = verify(settings, log)
    assert (empty.result, empty.as_of, empty.records) == (Result.NO_SNAPSHOT, None, 0)
    here = open_log(log)
    fill(here)
    wait_for(lambda: (verify(settings, log)[0].as_of or 0) > 60, what="it has some")
    (row,) = json.loads(run(log, "show", "--verify", "--json").stdout)
    assert (row["place"], row["result"]) == (0, "same")
    assert row["records"] == row["as_of"] + 1
    assert row["digest"] == row["folded"]
    # Of a log whose beginning is gone, what follows an older snapshot is folded.
    at = TopicPartition(log, 0, 15)
    kafka_admin.delete_records([at])[at].result()
    (found,) = verify(settings, log)
    assert found.result is Result.SAME
    assert 0 < found.records < row["records"]
    # A member that was wrong would mislead all that start later.
    with here.lock:
        world = here.get_world(0).copy()
    shared = Shared(GROUP, "orders", 1)
    world.entries[shared] = world.entries[shared]._replace(position=99)
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for part in snapshots.split(world, here.sender):
        producer.produce(log, encode(part, 1), partition=0)
    producer.flush(WAIT)
    (row,) = json.loads(run(log, "show", "--verify", "--json", code=1).stdout)
    assert row["result"] == "differs"
    assert row["digest"] != row["folded"]


@pytest.mark.usefixtures("often")
def test_a_log_with_no_older_snapshot_than_the_last_cannot_be_compared(
    log_topic, open_log, settings, kafka_admin, wait_for
):
    log = log_topic(1)
    fill(open_log(log), 25)
    wait_for(lambda: verify(settings, log)[0].result is Result.SAME)
    at = TopicPartition(log, 0, 10)
    kafka_admin.delete_records([at])[at].result()
    (found,) = verify(settings, log)
    assert (found.result, found.folded) == (Result.UNKNOWN, None)
