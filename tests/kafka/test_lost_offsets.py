"""Offsets for which a topic has no record: told, and never passed over in silence."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from unittest.mock import Mock
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from jobs_lib import ConfigurationError
from jobs_lib.kafka import poller
from jobs_lib.kafka.member import GroupMember
from jobs_lib.kafka.poller import Poller
from jobs_lib.kafka.topic_ids import TopicIds
from tests.support.apps import heard, make_app, running
from tests.support.fake_records import fake_record
from tests.support.groups import Group
from tests.support.records import (
    key_of,
    leave_offset,
    produce,
    read_committed,
)
from tests.support.topics import create_topic

MEBIBYTE = 1_048_576


@pytest.fixture
def make(database_url, bootstrap_servers):
    """A function that makes an app with Kafka."""
    return lambda **settings: make_app(
        database_url,
        kafka_bootstrap_servers=bootstrap_servers,
        heartbeat_interval=0.5,
        stale_after=5.0,
        **settings,
    )


@pytest.fixture
def read_offset(admin):
    """A function that reads the stored offset of a topic with one partition."""

    def read(topic: str) -> int | None:
        row = admin.execute(
            "select next_offset from jobs_lib.offsets where topic = %s", (topic,)
        ).fetchone()
        return row and row[0]

    return read


@pytest.fixture
def read_failure(admin):
    """A function that reads where a topic's partition stands still, and why."""

    def read(topic: str) -> tuple[int | None, str | None]:
        (row,) = admin.execute(
            "select failed_offset, failure from jobs_lib.offsets where topic = %s",
            (topic,),
        ).fetchall()
        return tuple(row)

    return read


@pytest.fixture
def read_told(bootstrap_servers):
    """A function that reads what Kafka has of a group, and of its done group."""

    def read(topic: str) -> list[dict[int, int] | None]:
        groups = (f"{topic}-g", f"{topic}-g.done")
        return [read_committed(bootstrap_servers, one, topic) for one in groups]

    return read


def tell(servers: str, topic: str, offset: int) -> None:
    """Tell Kafka an offset of a topic's group, and of its done group."""
    for group in (f"{topic}-g", f"{topic}-g.done"):
        with closing(Group(servers, group)) as told:
            told.commit(topic, offset)


@pytest.fixture
def consume(make, topic, bootstrap_servers, read_offset, wait_for):
    """A function that lets a group handle ten records.

    It returns the topic, the app, and the values that were handled.
    """

    def consume(**options):
        name = topic(1)
        app = make()
        seen: list[int] = []

        @app.consumer(name, group=f"{name}-g", **options)
        def handle(record, conn) -> None:
            seen.append(record.value)

        produce(bootstrap_servers, name, [("k", n) for n in range(10)])
        with running(app, "consumers"):
            wait_for(lambda: read_offset(name) == 10, timeout=30, what="all is in")
        return name, app, seen

    return consume


@pytest.fixture
def cut(kafka_admin, bootstrap_servers):
    """A function that adds records to a topic, and lets those before an offset go."""

    def cut(name: str, values: range, before: int) -> None:
        produce(bootstrap_servers, name, [("k", n) for n in values])
        at = TopicPartition(name, 0, before)
        for deleted in kafka_admin.delete_records([at]).values():
            assert deleted.result().low_watermark == before

    return cut


def test_records_that_are_gone_stop_the_partition_and_are_told(
    consume, cut, admin, read_offset, read_failure, wait_for
):
    name, app, seen = consume()
    cut(name, range(10, 20), before=15)
    with heard("offset.lost") as lost, running(app, "consumers"):
        # Again and again, as long as it stands still.
        wait_for(lambda: len(lost) > 1, timeout=30, what="it is told")
        assert read_offset(name) == 10
        assert read_failure(name) == (10, lost[0][1]["error"])
        admin.execute(
            "update jobs_lib.offsets set next_offset = 15 where topic = %s", (name,)
        )
        wait_for(lambda: read_offset(name) == 20, timeout=30, what="it goes on")
    fields = lost[0][1]
    assert fields["origin"] == f"{name}/0"
    assert (fields["next_offset"], fields["start"], fields["end"]) == (10, 15, 20)
    assert "5 records before offset 15 are gone" in fields["error"]
    assert "set next_offset = 15" in fields["error"]
    assert seen == [*range(10), *range(15, 20)]
    assert read_failure(name) == (None, None)


@pytest.mark.guarantee("FK15")
def test_a_consumer_that_says_so_goes_on_behind_records_that_are_gone(
    consume, cut, read_offset, wait_for
):
    name, app, seen = consume(on_gap="skip")
    cut(name, range(10, 20), before=15)
    with heard("offset.moved") as moved, running(app, "consumers"):
        wait_for(lambda: read_offset(name) == 20, timeout=30, what="it goes on")
    ((_, fields),) = moved
    assert (fields["before"], fields["next_offset"]) == (10, 15)
    assert seen == [*range(10), *range(15, 20)]


@pytest.mark.guarantee("FK15")
@pytest.mark.parametrize(
    ("policy", "on_gap", "stops", "gone"),
    [
        ("delete", "stop", True, []),
        ("delete", "skip", False, [5]),
        ("compact,delete", "stop", False, [5]),
    ],
)
def test_a_read_model_stops_at_what_retention_deleted_unless_its_topic_is_compacted(
    make, kafka_admin, cut, admin, bootstrap_servers, read_offset, wait_for, policy,
    on_gap, stops, gone,
):  # fmt: skip
    admin.execute("create table rows (key text primary key, version bigint, n int)")
    name = f"test-{uuid4().hex}"
    create_topic(kafka_admin, name, 1, {"cleanup.policy": policy})
    app = make()
    app.read_model(name, table="rows", key="key", group=name, on_gap=on_gap)(
        lambda record: {"n": record.value}
    )
    cut(name, range(10), before=5)
    admin.execute(
        "insert into jobs_lib.offsets (consumer_group, topic, partition, next_offset)"
        " values (%s, %s, 0, 0)",
        (name, name),
    )
    with (
        heard("offset.lost") as lost,
        heard("records.gone") as told,
        heard("offset.moved"),
        running(app, "consumers"),
    ):
        if stops:
            wait_for(lambda: lost, timeout=60, what="it stands still")
            assert (lost[0][1]["next_offset"], lost[0][1]["start"]) == (0, 5)
            assert read_offset(name) == 0
            admin.execute("update jobs_lib.offsets set next_offset = 5")
        wait_for(lambda: read_offset(name) == 10, timeout=60, what="it goes on")
    assert [fields["count"] for _, fields in told] == gone
    assert bool(lost) is stops


@pytest.mark.parametrize("on_gap", ["stop", "skip"])
def test_an_offset_beyond_the_end_of_its_partition_stops_it(
    consume, admin, read_offset, read_failure, wait_for, on_gap
):
    name, app, seen = consume(on_gap=on_gap)
    # As after a broker was restored.
    admin.execute("update jobs_lib.offsets set next_offset = 50")
    with heard("offset.lost") as lost, running(app, "consumers"):
        wait_for(lambda: lost, timeout=60, what="it is told")
    fields = lost[0][1]
    assert (fields["next_offset"], fields["start"], fields["end"]) == (50, 0, 10)
    assert "ends before offset 10" in fields["error"]
    assert read_offset(name) == 50
    assert read_failure(name) == (50, fields["error"])
    assert seen == [*range(10)]


@pytest.mark.parametrize(
    ("change", "begin"), [("next_offset = 10", 10), ("failed_offset = null", 50)]
)
def test_a_partition_that_ended_before_its_offset_stands_still_when_it_has_grown(
    consume, admin, bootstrap_servers, read_offset, read_failure, read_told, wait_for,
    change, begin,
):  # fmt: skip
    name, app, seen = consume(done=True)
    nothing = [{0: 0}, {0: 0}]
    # As after a broker was restored.
    admin.execute("update jobs_lib.offsets set next_offset = 50")
    with heard("offset.lost") as lost, running(app, "consumers"):
        wait_for(lambda: lost, timeout=60, what="it is told")
        produce(bootstrap_servers, name, [("k", n) for n in range(10, 60)])
        wait_for(lambda: lost[-1][1]["end"] == 60, timeout=60, what="it has grown")
        # Others that wait for it would handle records that it never had.
        wait_for(lambda: read_told(name) == nothing, timeout=60, what="nothing is done")
    # Somebody who has not noticed yet has told the offset.
    tell(bootstrap_servers, name, 50)
    with heard("offset.moved"), heard("offset.lost") as lost, running(app, "consumers"):
        wait_for(lambda: len(lost) > 1, timeout=60, what="a new process knows it")
        wait_for(lambda: read_told(name) == nothing, timeout=60, what="it says so")
        before = len(lost)
        wait_for(lambda: len(lost) > before, timeout=60, what="it stands still")
        assert read_told(name) == nothing
        assert read_offset(name) == 50
        assert seen == [*range(10)]
        fields = lost[0][1]
        assert (fields["next_offset"], fields["start"], fields["end"]) == (50, 0, 60)
        assert read_failure(name) == (50, fields["error"])
        admin.execute(f"update jobs_lib.offsets set {change}")
        wait_for(lambda: seen[-1] == 59, timeout=60, what="it goes on")
        wait_for(lambda: read_offset(name) == 60, timeout=60, what="all is in")
        all_is_in = [{0: 60}, {0: 60}]
        wait_for(lambda: read_told(name) == all_is_in, timeout=60, what="all is done")
    assert seen == [*range(10), *range(begin, 60)]
    assert read_failure(name) == (None, None)


@pytest.mark.parametrize("kind", ["handler", "read model"])
def test_a_partition_that_grows_past_its_offset_before_it_is_asked_is_told_too(
    make, topic, admin, bootstrap_servers, read_offset, wait_for, monkeypatch, kind
):
    name, app, seen = topic(1), make(), []
    grown = threading.Event()
    tell_range = Poller._tell_range

    def grow(*given):
        if not grown.is_set():
            produce(bootstrap_servers, name, [(f"k{n}", n) for n in range(10, 60)])
            grown.set()
        return tell_range(*given)

    if kind == "handler":
        app.consumer(name, group=name)(lambda record, conn: seen.append(record.value))
    else:
        admin.execute("create table rows (key text primary key, version bigint, n int)")
        app.read_model(name, table="rows", key="key", group=name)(
            lambda record: {"n": record.value}
        )
    produce(bootstrap_servers, name, [(f"k{n}", n) for n in range(10)])
    with running(app, "consumers"):
        wait_for(lambda: read_offset(name) == 10, timeout=30, what="all is in")
    admin.execute("update jobs_lib.offsets set next_offset = 50")
    monkeypatch.setattr(Poller, "_tell_range", grow)
    with (
        heard("offset.lost") as lost,
        heard("offset.moved") as moved,
        running(app, "consumers"),
    ):
        if kind == "handler":
            wait_for(lambda: lost, timeout=60, what="it is told")
            assert read_offset(name) == 50
        else:
            wait_for(lambda: read_offset(name) == 60, timeout=60, what="all is in")
            assert [one["next_offset"] for _, one in moved] == [0]
            rows = admin.execute("select n from rows order by n").fetchall()
            assert [n for (n,) in rows] == [*range(60)]
    assert seen == [*range(10 if kind == "handler" else 0)]


def test_a_partition_that_has_its_records_again_is_no_longer_said_to_stand_still(
    consume, admin, read_offset, read_failure, wait_for
):
    name, app, seen = consume()
    admin.execute("update jobs_lib.offsets set next_offset = 50")
    with heard("offset.lost"), heard("offset.moved"), running(app, "consumers"):
        wait_for(lambda: read_failure(name)[0], timeout=60, what="it is written down")
        # There is no record behind it, so that no offset moves.
        admin.execute("update jobs_lib.offsets set next_offset = 10")
        wait_for(
            lambda: read_failure(name) == (None, None), timeout=30, what="it is cleared"
        )
    assert seen == [*range(10)]


@pytest.mark.guarantee("K21")
def test_kafka_is_told_of_an_offset_that_went_back_before_its_record_is_handled(
    make, topic, admin, bootstrap_servers, read_offset, read_failure, wait_for
):
    name, app = topic(1), make()
    fails = threading.Event()

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        if fails.is_set():
            raise ValueError("not now")

    def read_told() -> dict[int, int] | None:
        return read_committed(bootstrap_servers, f"{name}-g", name)

    produce(bootstrap_servers, name, [("k", n) for n in range(10)])
    with running(app, "consumers"), heard("record.failed"):
        wait_for(lambda: read_told() == {0: 10}, timeout=60, what="all is told")
        fails.set()
        admin.execute("update jobs_lib.offsets set next_offset = 5")
        wait_for(
            lambda: read_failure(name)[0] == 5, timeout=60, what="the record fails"
        )
        wait_for(lambda: read_told() == {0: 5}, timeout=60, what="the place is told")
        assert read_offset(name) == 5


@pytest.mark.parametrize("records", [3, 20], ids=["shorter", "longer"])
def test_a_topic_made_anew_stops_the_partition_until_somebody_decides(
    consume,
    make_anew,
    admin,
    bootstrap_servers,
    read_offset,
    read_failure,
    read_told,
    wait_for,
    records,
):
    name, app, seen = consume(done=True)
    make_anew(name)
    # Somebody who has not noticed yet has told the offset of the topic before.
    tell(bootstrap_servers, name, 10)
    produce(bootstrap_servers, name, [("k", 100 + n) for n in range(records)])
    with heard("topic.replaced") as replaced, running(app, "consumers"):
        # Again and again, as long as it stands still.
        wait_for(lambda: len(replaced) > 1, timeout=60, what="it is told")
        nothing = [{0: 0}, {0: 0}]
        wait_for(lambda: read_told(name) == nothing, timeout=60, what="nothing is done")
        before = len(replaced)
        wait_for(lambda: len(replaced) > before, timeout=60, what="it stands still")
        assert read_told(name) == nothing
        assert seen == [*range(10)]
        assert read_offset(name) == 10
        assert read_failure(name) == (10, replaced[0][1]["error"])
        admin.execute("update jobs_lib.offsets set topic_id = null, next_offset = 1")
        wait_for(lambda: read_offset(name) == records, timeout=30, what="it goes on")
        assert read_failure(name) == (None, None)
        all_is_in = [{0: records}, {0: records}]
        wait_for(lambda: read_told(name) == all_is_in, timeout=60, what="all is done")
    assert replaced[0][1]["origin"] == f"{name}/0"
    assert replaced[0][1]["next_offset"] == 10
    assert "topic_id = null" in replaced[0][1]["error"]
    assert seen == [*range(10), *(100 + n for n in range(1, records))]


@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize("records", [3, 20], ids=["shorter", "longer"])
def test_a_topic_made_anew_while_a_service_runs_is_noticed(
    consume, make_anew, bootstrap_servers, read_offset, wait_for, records
):
    name, app, seen = consume()
    with heard("topic.replaced") as replaced, running(app, "consumers"):
        produce(bootstrap_servers, name, [("k", 10)])
        wait_for(lambda: read_offset(name) == 11, timeout=30, what="it reads")
        make_anew(name)
        produce(bootstrap_servers, name, [("k", 100 + n) for n in range(records)])
        wait_for(lambda: replaced, timeout=120, what="it is told")
    assert replaced[0][1]["next_offset"] == read_offset(name)
    assert not {100 + n for n in range(11)} & {*seen}


@pytest.mark.guarantee("FK20")
def test_a_topic_made_anew_that_the_client_goes_on_reading_is_noticed(
    consume, bootstrap_servers, read_offset, monkeypatch, wait_for
):
    name, app, seen = consume()
    with heard("topic.replaced") as replaced, running(app, "consumers"):
        produce(bootstrap_servers, name, [("k", 10)])
        wait_for(lambda: read_offset(name) == 11, timeout=30, what="it reads")
        other = {name: uuid4()}
        monkeypatch.setattr(
            "jobs_lib.kafka.topic_ids.read_topic_ids", lambda settings, topics: other
        )
        monkeypatch.setattr(TopicIds, "poll", lambda self: other)
        wait_for(lambda: replaced, timeout=30, what="it is told")
        produce(bootstrap_servers, name, [("k", 11)])
        wait_for(lambda: len(replaced) > 2, timeout=30, what="it stands still")
    assert seen == [*range(11)]
    assert read_offset(name) == 11


def test_the_ids_of_topics_are_asked_for_without_waiting(
    make, topic, make_anew, own_broker, wait_for
):
    name = topic(1)
    settings = make().settings
    ids = TopicIds(settings, [name], interval=0.1)
    wait_for(lambda: ids.poll() == ids.read([name]), timeout=60, what="the id comes")
    before = ids.read([name])
    make_anew(name)
    wait_for(
        lambda: name in (found := ids.poll()) and found != before,
        timeout=60,
        what="another",
    )
    # Nobody answers, then somebody does.
    name = own_broker.create(1)
    servers = own_broker.bootstrap_servers
    there = settings.model_copy(update={"kafka_bootstrap_servers": servers})
    ids = TopicIds(there, [name], interval=0.1)
    wait_for(ids.poll, timeout=60, what="the id comes")
    with own_broker.down():
        began = time.monotonic()
        for _ in range(100):
            ids.poll()
        assert time.monotonic() - began < 5
    wait_for(ids.poll, timeout=60, what="the id comes again")


@pytest.mark.parametrize("records", [3, 20], ids=["shorter", "longer"])
def test_a_read_model_follows_its_topic_when_that_is_made_anew(
    make, topic, make_anew, bootstrap_servers, admin, read_offset, wait_for, records
):
    admin.execute("create table rows (key text primary key, version bigint, n int)")
    name = topic(1)
    app = make()

    @app.read_model(name, table="rows", key="key", group=f"{name}-g")
    def row(record):
        return {"n": record.value}

    def read() -> list[tuple[str, int]]:
        return admin.execute("select key, n from rows order by key").fetchall()

    produce(bootstrap_servers, name, [(f"k{n}", n) for n in range(10)])
    with running(app, "consumers"):
        wait_for(lambda: read_offset(name) == 10, timeout=30, what="all is in")
    make_anew(name)
    headers = {"ce_version": "100"}
    anew = [(f"k{n}", 50) for n in range(records)]
    produce(bootstrap_servers, name, anew, headers=headers)
    with heard("offset.moved") as moved, running(app, "consumers"):
        wait_for(lambda: read_offset(name) == records, timeout=60, what="it goes on")
    ((_, fields),) = moved
    assert (fields["before"], fields["next_offset"]) == (10, 0)
    assert read() == sorted({**{f"k{n}": n for n in range(10)}, **dict(anew)}.items())


@pytest.mark.guarantee("FK20")
def test_records_without_versions_are_newer_in_a_topic_made_anew_meanwhile(
    make, topic, make_anew, bootstrap_servers, admin, read_offset, wait_for
):
    admin.execute("create table rows (key text primary key, version bigint, n int)")
    name = topic(1)
    app = make()

    @app.read_model(name, table="rows", key="key", group=f"{name}-g")
    def row(record):
        return {"n": record.value}

    produce(bootstrap_servers, name, [(f"k{n}", 1) for n in range(10)])
    with running(app, "consumers"):
        wait_for(lambda: read_offset(name) == 10, timeout=30, what="all is in")
        make_anew(name)
        # Their offsets are those of older records.
        produce(bootstrap_servers, name, [(f"k{n}", 2) for n in range(10)][::-1])
        wait_for(
            lambda: admin.execute("select 1 from rows where n = 1").fetchone() is None,
            timeout=120,
            what="the new topic is read",
        )


@pytest.mark.guarantee("FK15")
def test_a_new_group_begins_with_the_oldest_record_that_is_left(
    make, topic, cut, read_offset, wait_for
):
    name = topic(1)
    cut(name, range(10), before=4)
    app = make()
    seen: list[int] = []

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        seen.append(record.value)

    with heard("offset.lost", "offset.moved") as told, running(app, "consumers"):
        wait_for(lambda: read_offset(name) == 10, timeout=30, what="all is in")
    assert seen == [*range(4, 10)]
    assert not told


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_an_empty_database_begins_at_the_oldest_record_whatever_kafka_knows(
    make, topic, bootstrap_servers, read_offset, gate, wait_for, strategy
):
    name = topic(1)
    produce(bootstrap_servers, name, [("k", n) for n in range(10)])
    # As the consumer of an earlier database has left it.
    leave_offset(bootstrap_servers, name, name, 7)
    app = make(assignment_strategy=strategy)
    seen: list[int] = []

    @app.consumer(name, group=name)
    def handle(record, conn) -> None:
        gate.wait(120)
        seen.append(record.value)

    with running(app, "consumers"):
        # Others may wait for this group.
        wait_for(
            lambda: read_committed(bootstrap_servers, name, name) == {0: 0},
            timeout=60,
            what="Kafka knows that nothing is handled",
        )
        gate.set()
        wait_for(lambda: read_offset(name) == 10, timeout=60, what="all is in")
    assert seen == [*range(10)]


@pytest.mark.parametrize(
    "protocol",
    [
        {"assignment_strategy": "range"},
        {"assignment_strategy": "cooperative-sticky"},
        {"group_protocol": "consumer"},
    ],
    ids=["range", "cooperative-sticky", "consumer"],
)
def test_records_that_go_while_a_service_runs_are_told_and_other_partitions_go_on(
    make,
    topic,
    kafka_admin,
    admin,
    bootstrap_servers,
    wait_for,
    monkeypatch,
    protocol,
):
    name = topic(2)
    app = make(consumer_block=1, consumer_prefetch_bytes=MEBIBYTE, **protocol)
    paused = threading.Event()
    pause = GroupMember.pause

    def note_pause(member, partition) -> None:
        paused.set()
        pause(member, partition)

    monkeypatch.setattr(GroupMember, "pause", note_pause)

    @app.consumer(name, group=f"{name}-g")
    def handle(record, conn) -> None:
        if record.value == 5 and record.partition == 0 and not is_cut.is_set():
            raise ValueError("not yet")
        seen.append((record.partition, record.value))

    def read_offsets() -> dict[int, int]:
        rows = admin.execute("select partition, next_offset from jobs_lib.offsets")
        return dict(rows.fetchall())

    seen: list[tuple[int, int]] = []
    is_cut = threading.Event()
    keys = [key_of(n, 2) for n in range(2)]
    # More than may wait in memory.
    produce(bootstrap_servers, name, [(keys[0], n) for n in range(3_000)])
    produce(bootstrap_servers, name, [(keys[1], n) for n in range(10)])
    with (
        heard("offset.lost") as lost,
        heard("record.failed") as failed,
        running(app, "consumers"),
    ):
        wait_for(
            lambda: failed and paused.is_set() and read_offsets() == {0: 5, 1: 10},
            timeout=60,
            what="one partition stands still, and reads no more",
        )
        at = TopicPartition(name, 0, 2_995)
        for deleted in kafka_admin.delete_records([at]).values():
            assert deleted.result().low_watermark == 2_995
        is_cut.set()
        # What was in memory goes in first, one by one.
        wait_for(lambda: lost, timeout=120, what="what has gone is told")
        (_, fields), *_ = lost
        # What was in memory went in.
        assert 5 < fields["next_offset"] < 2_995
        assert (fields["start"], fields["end"]) == (2_995, 3_000)
        produce(bootstrap_servers, name, [(keys[1], n) for n in range(10, 20)])
        wait_for(
            lambda: read_offsets()[1] == 20, timeout=30, what="the other one goes on"
        )
        admin.execute(
            "update jobs_lib.offsets set next_offset = 2995 where partition = 0"
        )
        wait_for(lambda: read_offsets()[0] == 3_000, timeout=30, what="it goes on")
    in_memory = range(fields["next_offset"])
    assert [n for p, n in seen if p == 0] == [*in_memory, *range(2_995, 3_000)]
    assert [n for p, n in seen if p == 1] == [*range(20)]


def test_handlers_of_one_topic_agree_on_gaps(make):
    app = make()

    @app.consumer("orders", group="g", type="placed", on_gap="skip")
    def place(record, conn) -> None: ...

    with pytest.raises(ConfigurationError, match="not 'skip' and 'stop'"):

        @app.consumer("orders", group="g", type="sent")
        def send(record, conn) -> None: ...


def test_an_unknown_word_for_gaps_is_refused(make):
    with pytest.raises(ConfigurationError, match="'stop' or 'skip', not 'ignore'"):

        @make().consumer("orders", group="g", on_gap="ignore")
        def place(record, conn) -> None: ...


@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize(
    ("code", "seconds", "told"),
    [
        (KafkaError.NOT_LEADER_FOR_PARTITION, 9, 0),
        (KafkaError.NOT_LEADER_FOR_PARTITION, 15, 4),
        (KafkaError._UNKNOWN_PARTITION, 9, 0),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, 5, 5),
    ],
)
def test_the_range_of_a_partition_is_asked_for_again_until_it_is_known(
    monkeypatch, code, seconds, told
):
    clock = Mock(monotonic=Mock(return_value=100.0))
    monkeypatch.setattr(poller, "time", clock)
    member = GroupMember(make_app("").settings, "g", ["t"])
    listener = Mock()
    member.listen(listener)
    # The broker of the partition: it has no answer at first.
    broker = Mock()
    broker.get_watermark_offsets.side_effect = KafkaException(KafkaError(code))
    message = fake_record(2, topic="t", partition=3)
    member._note_error(message, KafkaError(KafkaError._AUTO_OFFSET_RESET))
    with heard("loop.failed") as failed:
        for _ in range(seconds * 10):
            clock.monotonic.return_value += 0.1
            member._obey(broker)
    assert told <= len(failed) <= told + 1
    assert not listener.out_of_range.called
    broker.get_watermark_offsets = Mock(return_value=(4, 9))
    member._obey(broker)
    listener.out_of_range.assert_called_once_with(("t", 3), 4, 9)
    assert not member._commands
