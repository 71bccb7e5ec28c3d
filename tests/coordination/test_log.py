"""The log: read in order, written to, refused where it loses records, and cut."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import uuid
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from jobs_lib import telemetry
from jobs_lib.coordination import opening, snapshots
from jobs_lib.coordination.log import Log
from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Probe,
    ReleasingPartition,
    Sender,
    Shared,
    Snapshot,
    Unreadable,
    decode,
    encode,
)
from jobs_lib.coordination.opening import Cut
from jobs_lib.coordination.place import Place
from jobs_lib.coordination.world import Outcome, World, find_digest
from jobs_lib.coordination.writer import Writer
from jobs_lib.errors import ConfigurationError, UnavailableError
from jobs_lib.kafka.client import make_consumer
from jobs_lib.settings import Settings, load_settings
from tests.support.returning import Returning
from tests.support.topics import create_topic, delete_topics, grow_topic

ORDERS = Shared("shop.mailer", "orders", 0)
WAIT = 30.0


@pytest.fixture
def heard():
    """The events of the log, with their fields."""
    found: list[tuple[str, dict[str, Any]]] = []
    remove = telemetry.listen(
        lambda event, fields: found.append((event, fields)),
        only={"log.cut", "log.read"},
    )
    yield found
    remove()


class Listener:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def applied(self, place, message, outcome) -> None:
        self.told.append((place, message, outcome))

    def lost(self, reason) -> None:
        self.told.append("lost")

    def known(self) -> None:
        self.told.append("known")


def write(bootstrap_servers: str, log: str, place: int, *values: bytes) -> None:
    """Write records as somebody else would."""
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for value in values:
        producer.produce(log, value, partition=place)
    producer.flush(WAIT)


def cut(admin, log: str, place: int, before: int) -> None:
    """Delete the records of a place before an offset."""
    at = TopicPartition(log, place, before)
    admin.delete_records([at], request_timeout=WAIT)[at].result()


def set_config(admin, log: str, name: str, value: str) -> None:
    """Set a setting of a topic."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    asked = ConfigResource(ResourceType.TOPIC, log, incremental_configs=[entry])
    admin.incremental_alter_configs([asked])[asked].result()


def test_a_record_is_read_back_with_its_offset_and_what_it_did(log_topic, open_log):
    name = log_topic()
    log, other = open_log(name, "a"), open_log(name, "b")
    claim = log.send(ClaimingPartition(log.sender, ORDERS, 60_000))
    assert claim.wait(WAIT) is Outcome.VALID
    late = other.send(ClaimingPartition(other.sender, ORDERS, 60_000))
    assert late.wait(WAIT) is Outcome.HELD
    assert (claim.offset, late.offset) == (0, 1)
    beat = log.send(Heartbeat(log.sender, ORDERS, 0, 7))
    assert beat.wait(WAIT) is Outcome.VALID
    other.read_to_end()
    assert other.find(ORDERS) == log.find(ORDERS)
    assert log.find(ORDERS).position == 7


@pytest.mark.parametrize(
    "code",
    ["_UNKNOWN_PARTITION", "LEADER_NOT_AVAILABLE", "_TIMED_OUT", "_DESTROY_BROKER"],
)
@pytest.mark.parametrize("errors", [2, 1_000_000])
def test_a_log_waits_for_the_leaders_of_a_broker_that_comes_back(
    log_topic, open_log, monkeypatch, code, errors
):
    if errors > 2:
        monkeypatch.setattr(opening, "_ANSWER_SECONDS", 0.5)

    def make_returning(*given, **more) -> Returning:
        return Returning(
            make_consumer(*given, **more), getattr(KafkaError, code), errors
        )

    monkeypatch.setattr(opening, "make_consumer", make_returning)
    if errors > 2 or code == "_TIMED_OUT":
        with pytest.raises(UnavailableError, match="no Kafka broker"):
            open_log(log_topic())
    else:
        assert open_log(log_topic()).is_known


def test_who_is_told_to_stop_reads_a_log_no_more_that_it_begins_with(
    settings, monkeypatch
):
    log = Log(settings, "log", Sender("shop.mailer", "a", "this run"))
    monkeypatch.setattr(log, "_open", lambda: None)
    monkeypatch.setattr(log, "_step", lambda consumer: log.give_up_start())
    with pytest.raises(UnavailableError, match="before its reader was told to stop"):
        log._read_first(WAIT)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_log_that_is_made_anew_is_met_whose_id_was_not_known_at_first(
    monkeypatch, is_known
):
    log = Log(load_settings(), "log", Sender("shop.mailer", "a", "this run"))
    first, second = uuid.uuid4(), uuid.uuid4()
    seen = iter([None, first, None, first, second])
    monkeypatch.setattr(log._ids, "poll", lambda: {"log": next(seen)})
    consumer = Mock(poll=lambda seconds: None)
    # Kafka did not tell it when the log was opened, such as one that is quite new.
    log.is_known = is_known
    log._places, log.partitions = [Place(0, 0, 1)], 1
    for _ in range(4):
        log._step(consumer)
    assert log._known_id == (first if is_known else None)
    with pytest.raises(Cut, match=f"its id is {second}, no more {first}"):
        log._step(consumer)


@pytest.mark.guarantee("M4", "I31")
def test_a_log_that_is_read_later_says_the_same(log_topic, open_log, bootstrap_servers):
    name = log_topic(4)
    first = open_log(name, "a")
    for number in range(20):
        shared = Shared("shop.mailer", "orders", number)
        first.send(ClaimingPartition(first.sender, shared, 500)).wait(WAIT)
    write(bootstrap_servers, name, 0, b"no message", b"", json.dumps({"v": 9}).encode())
    first.read_to_end()
    second = open_log(name, "b", only_reads=True)
    assert [one.spell() for one in second.get_worlds()] == [
        one.spell() for one in first.get_worlds()
    ]
    assert sum(len(one.entries) for one in second.get_worlds()) == 20


@pytest.mark.guarantee("M21")
@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"message.timestamp.type": "CreateTime"}, "timestamp.type=CreateTime"),
        ({"cleanup.policy": "compact"}, "cleanup.policy=compact"),
        ({"cleanup.policy": "compact,delete"}, "compact"),
        ({"retention.ms": "3599999"}, "retention.ms=3599999, and it needs -1, or 36"),
        ({"retention.bytes": "1000"}, "retention.bytes=1000"),
        ({"unclean.leader.election.enable": "true"}, "enable=true"),
    ],
    ids=["create-time", "compacted", "both", "short", "bytes", "unclean"],
)
def test_a_topic_that_loses_records_is_refused_with_the_way_out(
    topic, open_log, config, told
):
    name = topic(prefix="log", config=WANTED | config)
    with pytest.raises(ConfigurationError, match=told) as refused:
        open_log(name)
    (key,) = config
    assert f"--add-config {key}={WANTED[key]}" in str(refused.value)
    assert repr(name) in str(refused.value)


def test_the_shortest_retention_follows_from_the_interval(log_topic, open_log):
    name = log_topic(retention_ms="3600000")
    open_log(name, interval=36.0)
    with pytest.raises(ConfigurationError, match="or 3700000 at least"):
        open_log(name, interval=37.0)


def test_a_log_that_does_not_exist_is_refused_with_a_command_that_works(
    open_log, kafka_admin
):
    with pytest.raises(ConfigurationError, match="'no-log' does not exist") as refused:
        open_log("no-log")
    command = str(refused.value).rpartition("kafka-topics.sh")[2].split()
    given = dict(one.split("=") for one in command if "=" in one)
    create_topic(kafka_admin, "no-log", 2, given)
    try:
        open_log("no-log").stop()
    finally:
        delete_topics(kafka_admin, ["no-log"])


def test_a_log_that_has_grown_is_refused(log_topic, open_log, kafka_admin):
    name = log_topic(2)
    log = open_log(name)
    log.send(ClaimingPartition(log.sender, ORDERS, 500)).wait(WAIT)
    log.stop()
    grow_topic(kafka_admin, name, 3)
    with pytest.raises(ConfigurationError, match=r"3 partitions, .* a log of 2"):
        open_log(name)


def test_a_record_without_an_append_time_is_refused(
    log_topic, open_log, kafka_admin, bootstrap_servers
):
    name = log_topic(1)
    set_config(kafka_admin, name, "message.timestamp.type", "CreateTime")
    write(bootstrap_servers, name, 0, b"{}")
    set_config(kafka_admin, name, "message.timestamp.type", "LogAppendTime")
    with pytest.raises(ConfigurationError, match=r"offset 0 of .* has no append time"):
        open_log(name)


@pytest.mark.guarantee("M21")
def test_producers_that_lose_records_are_refused(log_topic, bootstrap_servers):
    settings = Settings(kafka_bootstrap_servers=bootstrap_servers, kafka={"acks": "1"})
    log = Log(settings, log_topic(), Sender("a.b", "c", "d"))
    with pytest.raises(ConfigurationError, match="acks=1 is refused"):
        log.start()


@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize("how", ["cut", "anew"])
def test_a_log_that_changes_under_its_reader_is_read_anew(
    log_topic, open_log, kafka_admin, bootstrap_servers, heard, wait_for, settings, how
):
    name = log_topic(1)
    listener = Listener()
    log = Log(settings, name, Sender("a.b", "c", "d"), interval=0.5, ids_every=0.1)
    log.listen(listener)
    with log:
        claim = ClaimingPartition(log.sender, Shared("a.b", "orders", 0), 500)
        assert log.send(claim).wait(WAIT) is Outcome.VALID
        before = log.send(Probe(log.sender), place=0)
        before.wait(WAIT)
        if how == "anew":
            delete_topics(kafka_admin, [name])
            create_topic(kafka_admin, name, 1, WANTED)
        else:
            # Its consumer is at the end, and what it has is gone: only a gap shows.
            cut(kafka_admin, name, 0, 2)
            assert log._opened is not None
            log._opened.seek(TopicPartition(name, 0, 1))
        wait_for(
            # Records may follow: what is made anew is told of by a snapshot.
            lambda: (
                [one for one in listener.told if isinstance(one, str)][-2:]
                == ["lost", "known"]
            ),
            timeout=60,
            what=lambda: f"the log is read anew: {listener.told}",
        )
        assert "log.cut" in [event for event, _ in heard]
        if how == "anew":
            assert log.find(Shared("a.b", "orders", 0)).holding is None
        assert log.send(Probe(log.sender), place=0).wait(WAIT) is Outcome.VALID


@pytest.mark.guarantee("M15")
def test_a_claim_of_a_batch_is_found_in_a_log_that_is_read_anew(
    log_topic, open_log, wait_for
):
    log = open_log(log_topic(1))
    log.send(ClaimingPartition(log.sender, ORDERS, 500)).wait(WAIT)
    log.send(Heartbeat(log.sender, ORDERS, 0, 5)).wait(WAIT)
    end = log.get_world(0).next_offset
    # Its acknowledgement is lost, and it is not read before the log is cut.
    log._writer._acknowledged = lambda *_: None
    with log.lock:
        sent = log.send(ClaimingMessages(log.sender, ORDERS, 0, 5, 9))
        log.get_world(0).next_offset -= 1
    wait_for(lambda: sent.is_done, what="the log has told")
    assert (sent.outcome, sent.offset) == (Outcome.VALID, end)
    assert log.lost_places == set()


def test_a_member_that_starts_behind_a_cut_gets_a_snapshot_of_one_that_knows(
    log_topic, open_log, kafka_admin
):
    name = log_topic(1)
    first = open_log(name, "a")
    first.send(ClaimingPartition(first.sender, ORDERS, 500)).wait(WAIT)
    first.send(Heartbeat(first.sender, ORDERS, 0, 42)).wait(WAIT)
    cut(kafka_admin, name, 0, 2)
    second = open_log(name, "b")
    assert second.find(ORDERS).position == 42
    assert second.find(ORDERS).holding.client_id == "a"
    assert second._places[0].is_restored
    assert second.lost_places == set()


def test_a_log_whose_beginning_nobody_knows_is_read_as_it_is_after_two_intervals(
    log_topic, open_log, kafka_admin, wait_for
):
    name = log_topic(1)
    first = open_log(name, "a")
    other = Shared("shop.mailer", "orders", 1)
    first.send(ClaimingPartition(first.sender, other, 500)).wait(WAIT)
    first.send(ReleasingPartition(first.sender, other, 0, 3)).wait(WAIT)
    first.send(ClaimingPartition(first.sender, ORDERS, 500)).wait(WAIT)
    first.stop()
    cut(kafka_admin, name, 0, 2)
    began = time.monotonic()
    second = open_log(name, "b")
    assert time.monotonic() - began > 1.0
    assert second.lost_places == {0}
    assert second.find(ORDERS).holding.client_id == "a"
    assert second.find(other).position is None
    third = open_log(name, "c")
    assert third.find(ORDERS).holding == second.find(ORDERS).holding
    # It began with a snapshot, and what was lost stays lost, in its own ones too.
    assert third._places[0].is_restored
    assert third.lost_places == {0}
    second.stop()
    with third.lock:
        third._write_snapshot(third._places[0])
        end = third.get_world(0).next_offset
    wait_for(lambda: third.get_world(0).next_offset > end)
    third.stop()
    cut(kafka_admin, name, 0, end)
    assert open_log(name, "d").lost_places == {0}


@pytest.fixture
def refuse_snapshots(monkeypatch):
    """A function: so many snapshots are not acknowledged, and never in the log."""
    send = Writer.send
    left: list[int] = []

    def write(writer, sent, place, *more) -> None:
        if left and isinstance(sent.message, Snapshot):
            left.pop()
            writer._failed(sent, place, UnavailableError("Kafka has not answered"))
        else:
            send(writer, sent, place, *more)

    monkeypatch.setattr(Writer, "send", write)
    return lambda count: left.extend(range(count))


def read_anew(log: Log, heard: list[Any], wait_for, *, as_another: bool) -> None:
    """Let a log be read anew, as if it were made anew, or had only been cut."""
    heard.clear()
    with log.lock:
        log._id = uuid.uuid4()
        if as_another:
            log._known_id = uuid.uuid4()
    wait_for(lambda: "log.read" in [event for event, _ in heard], what="it is read")


def test_a_member_asks_again_if_the_snapshot_that_it_wrote_is_not_in_the_log(
    settings, log_topic, open_log, kafka_admin, refuse_snapshots
):
    name = log_topic(1)
    first = open_log(name, "a")
    for _ in range(2):
        first.send(Probe(first.sender), place=0).wait(WAIT)
    first.stop()
    cut(kafka_admin, name, 0, 1)
    refuse_snapshots(1)
    log = Log(settings, name, Sender("shop.mailer", "b", "d"), interval=0.2)
    # Nothing else comes to the log: it would wait for it for ever.
    log.start(patience=3.0)
    assert log.lost_places == {0}
    log.stop()


def test_a_loss_is_told_again_if_the_snapshot_that_tells_it_is_not_in_the_log(
    log_topic, open_log, refuse_snapshots, heard, wait_for
):
    name = log_topic(1)
    log = open_log(name, ids_every=0.1)
    log.send(Probe(log.sender), place=0).wait(WAIT)
    later = open_log(name, "b", only_reads=True)
    refuse_snapshots(1)
    read_anew(log, heard, wait_for, as_another=True)
    wait_for(lambda: later.lost_places == {0}, what="the log says so")


@pytest.mark.guarantee("M14")
def test_a_loss_that_nobody_has_told_yet_outlasts_a_log_that_is_read_anew_once_more(
    log_topic, open_log, refuse_snapshots, heard, wait_for
):
    log = open_log(log_topic(1), ids_every=0.1)
    log.send(Probe(log.sender), place=0).wait(WAIT)
    refuse_snapshots(1_000)
    read_anew(log, heard, wait_for, as_another=True)
    assert log.lost_places == {0}
    read_anew(log, heard, wait_for, as_another=False)
    assert log.lost_places == {0}


@pytest.mark.expects("loop.failed")
def test_a_snapshot_for_which_there_is_no_thread_makes_nobody_read_the_log_anew(
    log_topic, open_log, monkeypatch, heard
):
    log = open_log(log_topic(1))
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "jobs_lib snapshot":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    probe = Probe(log.sender, wants_snapshot=True)
    assert log.send(probe, place=0).wait(WAIT) is Outcome.VALID
    assert log.send(Probe(log.sender), place=0).wait(WAIT) is Outcome.VALID
    assert [event for event, _ in heard] == ["log.read"]


def test_what_is_sent_while_a_log_is_read_anew_is_not_waited_for_in_vain(
    log_topic, open_log, wait_for, monkeypatch
):
    log = open_log(log_topic(1), ids_every=0.1)
    open_again, sent = log._open, []

    def open_later():
        sent.append(log.send(Probe(log.sender), place=0))
        wait_for(lambda: sent[0].offset is not None, what="it is acknowledged")
        return open_again()

    monkeypatch.setattr(log, "_open", open_later)
    with log.lock:
        log._id = uuid.uuid4()
    wait_for(lambda: sent and sent[0].is_done, what="it has ended", timeout=5)
    assert "read anew" in str(sent[0].error)


def test_a_start_ends_with_an_error_if_one_partition_stands_still_and_others_do_not(
    settings, log_topic, open_log, monkeypatch
):
    name = log_topic(2)
    first = open_log(name, "a")
    for place in (0, 1):
        first.send(Probe(first.sender), place=place).wait(WAIT)
    log = Log(settings, name, Sender("shop.mailer", "b", "d"))
    take = log._take

    def take_other(message) -> None:
        # Others write on, and the partition 1 has no leader any more.
        first.send(Probe(first.sender), place=0)
        if message.partition() == 0:
            take(message)

    monkeypatch.setattr(log, "_take", take_other)
    errors: list[Exception] = []

    def start() -> None:
        with pytest.raises(UnavailableError) as caught:
            log.start(patience=0.5)
        errors.append(caught.value)

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(8)
    assert "Has each of its partitions a leader?" in str(errors)


def test_a_snapshot_of_a_release_that_does_not_say_so_is_a_whole_one():
    world = World(0)
    world.next_offset = 1
    (part,) = snapshots.split(world, Sender("a.b", "c", "d"), is_partial=True)
    older = encode(part, 1).replace(b',"partial":true', b"")
    read = decode(older)
    assert not isinstance(read, Unreadable)
    assert read == (1, part._replace(partial=False))


def test_a_start_reads_from_the_last_snapshot_on(log_topic, open_log, monkeypatch):
    monkeypatch.setattr(snapshots, "EVERY", 50)
    monkeypatch.setattr(snapshots, "_WINDOW", 60)
    monkeypatch.setattr(snapshots, "LARGEST", 500)
    name = log_topic(1)
    first = open_log(name, "a")
    for number in range(20):
        shared = Shared("shop.mailer", "orders", number)
        first.send(ClaimingPartition(first.sender, shared, 500)).wait(WAIT)
    for _ in range(120):
        first.send(Probe(first.sender), place=0).wait(WAIT)
    first.read_to_end()
    second = open_log(name, "b", only_reads=True)
    second.read_to_end()
    first.read_to_end()
    place = second._places[0]
    assert place.is_restored
    assert place.folded < 100
    assert second.get_worlds()[0].spell() == first.get_worlds()[0].spell()
    assert second.get_worlds()[0].now_ms == first.get_worlds()[0].now_ms


def test_a_snapshot_whose_digest_is_wrong_is_passed_over(
    log_topic, open_log, bootstrap_servers, kafka_admin
):
    name = log_topic(1)
    first = open_log(name, "a")
    first.send(ClaimingPartition(first.sender, ORDERS, 500)).wait(WAIT)
    (part,) = snapshots.split(first.get_worlds()[0].copy(), first.sender)
    first.stop()
    wrong = part._replace(entries=part.entries.replace("orders", "others"))
    cut(kafka_admin, name, 0, 1)
    write(bootstrap_servers, name, 0, encode(wrong, 1))
    second = open_log(name, "b")
    assert second.find(ORDERS).holding is None
    assert second.lost_places == {0}


def test_a_probe_is_sent_only_to_places_that_are_quiet(log_topic, open_log):
    log = open_log(log_topic(2))
    log.send(Probe(log.sender), place=0).wait(WAIT)
    log.probe([0, 1], quiet=60.0)
    log.probe([0, 1], quiet=60.0)
    log.send(Probe(log.sender), place=1).wait(WAIT)
    log.read_to_end()
    assert [one.next_offset for one in log.get_worlds()] == [1, 2]


def test_coordination_loads_no_database_driver():
    code = (
        "import sys\n"
        "from jobs_lib.settings import Settings\n"
        "from jobs_lib.coordination import log, log_topic, snapshots\n"
        "from jobs_lib.coordination.messages import Sender\n"
        "settings = Settings(kafka_bootstrap_servers='x:1')\n"
        "log.Log(settings, 'log', Sender('a.b', 'c', 'd'))\n"
        "print([one for one in sys.modules if one.split('.')[0] in "
        "{'psycopg', 'psycopg_pool', 'sqlalchemy', 'alembic'}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_gap_between_two_offsets_is_noticed_and_nothing_before_it_counts(
    log_topic, settings, bootstrap_servers, heard, wait_for
):
    name = log_topic(1)
    listener = Listener()
    log = Log(settings, name, Sender("shop.mailer", "c", "d"), interval=0.5)
    log.listen(listener)
    with log:
        log.send(ClaimingPartition(log.sender, ORDERS, 500)).wait(WAIT)
        # The end of somebody's transaction takes an offset, and is no record.
        producer = Producer(
            {"bootstrap.servers": bootstrap_servers, "transactional.id": name}
        )
        producer.init_transactions(WAIT)
        producer.begin_transaction()
        producer.produce(name, b"no message", partition=0)
        producer.commit_transaction(WAIT)

        def is_lost() -> bool:
            # The broker may write the end of the transaction a moment later.
            log.probe([0], 0.1)
            return "lost" in listener.told

        wait_for(is_lost, what=lambda: f"the log is lost: {listener.told}")
        wait_for(lambda: log.is_known, timeout=60, what="the log is read anew")
        assert log.lost_places == {0}
        assert log.find(ORDERS).holding is None
        errors = [fields["error"] for event, fields in heard if event == "log.cut"]
        assert re.search(r"goes on with offset (\d), and \d comes next", errors[0])


def test_a_snapshot_is_passed_over_if_records_behind_it_are_gone(
    log_topic, open_log, bootstrap_servers, kafka_admin
):
    name = log_topic(1)
    first = open_log(name, "a")
    first.send(ClaimingPartition(first.sender, ORDERS, 500)).wait(WAIT)
    (part,) = snapshots.split(first.get_worlds()[0].copy(), first.sender)
    first.send(ReleasingPartition(first.sender, ORDERS, 0, 5)).wait(WAIT)
    first.stop()
    write(bootstrap_servers, name, 0, encode(part, 1))
    cut(kafka_admin, name, 0, 2)
    second = open_log(name, "b")
    # It says that the partition is held, which the lost record has ended.
    assert second.find(ORDERS).holding is None
    assert second.lost_places == {0}


def spell_snapshot(log, partitions=1, entries=None, **more) -> bytes:
    """Spell a snapshot of the log's first place, with its digest and other fields."""
    with log.lock:
        (part,) = snapshots.split(log.get_worlds()[0].copy(), log.sender)
    entries = part.entries if entries is None else entries
    digest = find_digest([entries], part.pauses)
    changed = {"entries": entries, "digest": digest} | more
    return encode(part._replace(**changed), partitions)


@pytest.mark.guarantee("M4")
@pytest.mark.parametrize("wrong", ["of the future", "unreadable"])
def test_a_snapshot_that_does_not_count_keeps_no_member_from_starting(
    log_topic, open_log, bootstrap_servers, kafka_admin, wrong
):
    name = log_topic(1)
    first = open_log(name, "a")
    first.send(ClaimingPartition(first.sender, ORDERS, 500)).wait(WAIT)
    more = {"as_of": 9} if wrong == "of the future" else {"entries": '["?"]\n'}
    value = spell_snapshot(first, **more)
    first.stop()
    cut(kafka_admin, name, 0, 1)
    write(bootstrap_servers, name, 0, value)
    second = open_log(name, "b", interval=0.1)
    assert second.lost_places == {0}
    assert second.find(ORDERS).holding is None


@pytest.mark.guarantee("M4", "M21")
def test_a_snapshot_of_another_number_of_partitions_does_not_refuse_a_start(
    log_topic, open_log, bootstrap_servers, monkeypatch, kafka_admin
):
    monkeypatch.setattr(snapshots, "_WINDOW", 1)
    name = log_topic(1)
    first = open_log(name, "a")
    first.send(ClaimingPartition(first.sender, ORDERS, 500)).wait(WAIT)
    write(bootstrap_servers, name, 0, spell_snapshot(first, 1))
    other = Sender("-.-", "somebody", "else")
    wrong = spell_snapshot(first, 3, entries="", sender=other)
    write(bootstrap_servers, name, 0, wrong)
    first.read_to_end()
    second = open_log(name, "b")
    assert second._places[0].is_restored
    assert second.find(ORDERS) == first.find(ORDERS)
    first.stop()
    second.stop()
    # Where partitions were added, the snapshots that are left say so, too.
    cut(kafka_admin, name, 0, 1)
    grow_topic(kafka_admin, name, 2)
    with pytest.raises(ConfigurationError, match=r"2 partitions, .* a log of 1"):
        open_log(name, "c")


@pytest.mark.guarantee("M4")
@pytest.mark.parametrize("last", ["late", "unreadable"])
def test_a_start_takes_an_older_snapshot_where_the_last_one_does_not_count(
    log_topic, open_log, bootstrap_servers, kafka_admin, last
):
    name = log_topic(1)
    first = open_log(name, "a")
    first.send(ClaimingPartition(first.sender, ORDERS, 500)).wait(WAIT)
    # Its writer stands still until others have written newer ones.
    late = spell_snapshot(first)
    first.send(ReleasingPartition(first.sender, ORDERS, 0, 5)).wait(WAIT)
    good = spell_snapshot(first)
    bad = spell_snapshot(first, entries="[]\n")
    first.stop()
    write(bootstrap_servers, name, 0, good, late if last == "late" else bad)
    cut(kafka_admin, name, 0, 2)
    second = open_log(name, "b")
    assert second.lost_places == set()
    assert second.find(ORDERS) == (5, None)
