"""A request makes one event and gets one answer, however often it comes."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError, TopicPartition

from jobs_lib import (
    ConfigurationError,
    PayloadError,
    Published,
    RequestConflictError,
    UnavailableError,
    UnknownPublishError,
)
from jobs_lib.service.maintenance import Maintenance
from jobs_lib.streams.log import Log
from jobs_lib.streams.requests import Requests
from tests.support.canary import VALUE
from tests.support.processes.publishers import MAY_PUBLISH, SET_BACK, STEPS
from tests.support.records import produce
from tests.support.returning import Returning
from tests.support.topics import make_anew
from tests.support.transactions import open_transaction
from tests.support.waiting import linger

if TYPE_CHECKING:
    from tests.support.worker import Worker

STATE = {"id": "t1", "plan": "free"}
MORE = {"sent", "noted"}
"""Steps that are tried where there is more time."""


@pytest.fixture
def start_publisher(database_url, start_process, own_broker, name):
    """A function that starts a process that publishes the state by the request r1."""

    def start(**options) -> Worker:
        worker = start_process(
            "publisher",
            database_url,
            kafka_bootstrap_servers=own_broker.bootstrap_servers,
            topic=name,
            key="t1",
            value=STATE,
            request="r1",
            **options,
        )
        worker.wait_for_line("ready")
        return worker

    return start


def end_senders_time(admin) -> None:
    """Let the time of all senders be over."""
    admin.execute("update jobs_lib.requests set sent_until = clock_timestamp()")


def list_requests(admin) -> list[str]:
    rows = admin.execute("select id from jobs_lib.requests order by id").fetchall()
    return [id_ for (id_,) in rows]


@pytest.mark.guarantee("T14")
def test_five_equal_requests_in_two_processes_make_one_event_and_get_one_answer(
    start_publisher, admin, name, read_log
):
    workers = [start_publisher(calls=3), start_publisher(calls=2)]
    admin.execute(MAY_PUBLISH)
    for worker in workers:
        worker.wait_for_line("done")
    answers = [
        line for one in workers for line in one.lines if line.startswith("answer")
    ]
    assert len(answers) == 5
    (event,) = read_log(name, "t1")
    assert {*answers} == {f"answer {event.partition} {event.offset} {STATE}"}
    assert event.json == STATE
    assert event.headers["ce_request"] == "r1"


@pytest.mark.guarantee("T7", "T14")
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=pytest.mark.slow if step in MORE else ())
        for step in STEPS
    ],
)
def test_a_request_whose_process_was_killed_makes_one_event_when_it_is_repeated(
    start_publisher, make, admin, name, read_log, step
):
    worker = start_publisher(step=step)
    admin.execute(MAY_PUBLISH)
    worker.wait_for_line("dying around")
    worker.wait()
    assert list_requests(admin) == ["r1"]
    end_senders_time(admin)
    stream = make().stream(name)
    answers = [stream.publish("t1", STATE, request="r1") for _ in range(2)]
    (event,) = read_log(name, "t1")
    expected = Published(name, event.partition, event.offset, "t1", STATE, changed=True)
    assert answers == [expected] * 2


@pytest.mark.slow
@pytest.mark.guarantee("T14")
def test_a_repeated_request_waits_until_the_time_of_its_sender_is_over(
    start_publisher, make, admin, name, read_log
):
    worker = start_publisher(step="remembered")
    admin.execute(MAY_PUBLISH)
    worker.wait()
    (left,) = admin.execute(
        "select extract(epoch from sent_until - remembered_at)::float8"
        " from jobs_lib.requests"
    ).fetchone()
    # The time limit of a publish, a stall, and what is on the way.
    assert left == pytest.approx(2 + 1 + 1, abs=0.1)
    make().stream(name).publish("t1", STATE, request="r1")
    (late,) = admin.execute(
        "select clock_timestamp() > remembered_at + interval '4 s'"
        " from jobs_lib.requests"
    ).fetchone()
    assert late
    assert len(read_log(name, "t1")) == 1


@pytest.mark.guarantee("T5", "T14")
@pytest.mark.parametrize(
    "lost", ["the answer", pytest.param("the event", marks=pytest.mark.slow)]
)
def test_what_kafka_has_not_acknowledged_is_found_before_it_is_sent_again(
    make, own_broker, admin, name, read_log, lost
):
    # Without compression the request's id stands in the bytes on the wire.
    # A busy machine may need seconds for the first event.
    app = make(proxied=True, publish_timeout=5, kafka={"compression.type": "none"})
    stream = app.stream(name)
    stream.publish("t1", {"warm": 1}, request="warm")
    proxy = own_broker.proxy
    id_ = str(uuid.uuid4())
    failed: list[Exception] = []

    def publish() -> None:
        try:
            stream.publish("t1", STATE, request=id_)
        except UnknownPublishError as error:
            failed.append(error)

    if lost == "the answer":
        proxy.swallow(id_, hold=True)
    else:
        proxy.hold()
    caller = threading.Thread(target=publish)
    caller.start()
    if lost == "the answer":
        assert proxy.swallowed.wait(30)
    caller.join()
    assert len(failed) == 1
    proxy.restore()
    in_log = len(read_log(name, "t1")) - 1
    assert in_log == (1 if lost == "the answer" else 0)
    end_senders_time(admin)
    answer = make().stream(name).publish("t1", STATE, request=id_)
    _, event = read_log(name, "t1")
    assert (answer.offset, event.json) == (event.offset, STATE)


@pytest.mark.guarantee("T14")
def test_equal_requests_on_an_event_loop_make_one_event(make, name, read_log):
    stream = make().stream(name)

    async def publish() -> list[Published]:
        one = uuid.uuid4()
        calls = [stream.publish_async("t1", STATE, request=one) for _ in range(5)]
        return await asyncio.gather(*calls)

    answers = asyncio.run(publish())
    (event,) = read_log(name)
    assert [one.offset for one in answers] == [event.offset] * 5


@pytest.mark.guarantee("T14")
@pytest.mark.slow
def test_a_cancelled_publish_is_found_when_it_is_repeated(
    make, own_broker, admin, name, read_log, wait_for
):
    stream = make(proxied=True).stream(name)
    stream.publish("t1", {"warm": 1}, request="warm")
    producer = stream._publishing()._publisher._find("all")._producer

    async def cancel() -> None:
        own_broker.proxy.freeze()
        call = asyncio.create_task(stream.publish_async("t1", STATE, request="r1"))
        # Kafka's client has the event, and nobody can call it back.
        while not len(producer):
            await asyncio.sleep(0.01)
        assert list_requests(admin) == ["r1", "warm"]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        own_broker.proxy.thaw()

    asyncio.run(cancel())
    # Within the time of its sender, which ends here, the broker has stored it.
    wait_for(lambda: len(read_log(name)) == 2, timeout=30, what="it is stored")
    end_senders_time(admin)
    answer = make().stream(name).publish("t1", STATE, request="r1")
    assert [one.json for one in read_log(name)] == [{"warm": 1}, STATE]
    assert answer.offset == 1


@pytest.mark.guarantee("T14")
@pytest.mark.parametrize("is_there", [True, False], ids=["there", "not there"])
def test_a_long_search_keeps_its_request_and_what_it_has_read(
    make, own_broker, admin, monkeypatch, is_there
):
    name = own_broker.create(1)
    others = [("t2", n) for n in range(2_500)]
    produce(own_broker.bootstrap_servers, name, others)
    stream = make().stream(name)
    first = stream.publish("t1", STATE, request="r1" if is_there else "r0")
    admin.execute(
        "update jobs_lib.requests"
        " set id = 'r1', record_offset = null, partition = 0, search_from = 0"
    )
    end_senders_time(admin)
    # Each fetch takes the whole time of a part of the search.
    monkeypatch.setattr("jobs_lib.streams.log._PART", -1.0)
    taken: list[tuple[int, int]] = []
    take = Requests.take

    def note(self, event, request, partition, search_from, attempts):
        taken.append((search_from, attempts))
        return take(self, event, request, partition, search_from, attempts)

    monkeypatch.setattr(Requests, "take", note)
    answer = make().stream(name).publish("t1", STATE, request="r1")
    assert answer.offset == first.offset + (not is_there)
    places, attempts = zip(*taken, strict=True)
    assert len({*places}) > 2
    assert sorted(places) == [*places]
    assert attempts == tuple(range(1, len(taken) + 1))


@pytest.mark.guarantee("T14")
@pytest.mark.parametrize(
    "other", [("t1", {"plan": VALUE}), ("t2", STATE), ("t1", None)]
)
def test_a_request_with_another_body_is_refused_with_both_digests(
    make, name, read_log, other
):
    stream = make().stream(name)
    stream.publish("t1", STATE, request="r1")
    told = r"began with [0-9a-f]{16}, and this one's begins with [0-9a-f]{16}\."
    with pytest.raises(RequestConflictError, match=told) as refused:
        stream.publish(*other, request="r1")
    assert VALUE not in str(refused.value)
    assert len(read_log(name)) == 1


@pytest.mark.guarantee("T14")
def test_the_same_body_with_its_fields_in_another_order_is_the_same_request(
    make, name, read_log
):
    stream = make().stream(name)
    first = stream.publish("t1", {"a": 1, "b": 2}, request="r1")
    second = stream.publish("t1", {"b": 2, "a": 1}, request="r1")
    assert second.offset == first.offset
    assert len(read_log(name)) == 1


@pytest.mark.guarantee("T14")
def test_an_answered_request_needs_no_broker(make, own_broker, name):
    stream = make(proxied=True).stream(name)
    first = stream.publish("t1", STATE, request="r1")
    own_broker.proxy.hold()
    again = make(proxied=True, publish_timeout=2).stream(name)
    assert again.publish("t1", STATE, request="r1") == first
    # Of another one nothing is remembered, and nothing was sent.
    with pytest.raises(UnavailableError) as failed:
        again.publish("t1", STATE, request="r2")
    assert not isinstance(failed.value, UnknownPublishError)


@pytest.mark.guarantee("T5")
@pytest.mark.parametrize(
    "code", ["_UNKNOWN_PARTITION", "_DESTROY_BROKER", "_TRANSPORT"]
)
@pytest.mark.parametrize("errors", [2, 1_000_000])
def test_a_publish_waits_for_the_leader_of_a_broker_that_comes_back(
    make, name, read_log, monkeypatch, code, errors
):
    stream = make(publish_timeout=20 if errors == 2 else 0.5).stream(name)
    find = Log._find_client
    made: list[Returning] = []

    def find_client(self):
        if not made:
            made.append(Returning(find(self), getattr(KafkaError, code), errors))
        return made[0]

    monkeypatch.setattr(Log, "_find_client", find_client)
    if errors == 2:
        assert stream.publish("t1", STATE, request="r1").changed
    else:
        with pytest.raises(UnavailableError, match="no Kafka broker"):
            stream.publish("t1", STATE, request="r1")
    assert len(read_log(name)) == (errors == 2)


@pytest.mark.guarantee("T5", "T14")
def test_an_event_whose_place_cannot_be_noted_is_answered_and_found_again(
    make, admin, name, read_log, monkeypatch
):
    stream = make().stream(name)
    ask = Requests._ask

    def lose(self, query, *args, **values):
        if query == "answer_request":
            raise UnavailableError("the database is gone")
        return ask(self, query, *args, **values)

    monkeypatch.setattr(Requests, "_ask", lose)
    first = stream.publish("t1", STATE, request="r1")
    monkeypatch.undo()
    end_senders_time(admin)
    assert stream.publish("t1", STATE, request="r1") == first
    assert len(read_log(name)) == 1


@pytest.mark.guarantee("T14")
def test_a_sender_that_stood_still_lets_another_one_send(
    make, name, read_log, admin, monkeypatch
):
    stream, other = make().stream(name), make().stream(name)
    add = Requests.add
    stopped = threading.Event()

    def stand_still(self, *args):
        attempt = add(self, *args)
        monkeypatch.undo()
        end_senders_time(admin)
        assert other.publish("t1", STATE, request="r1").offset == 0
        # So long that it must ask again whether it may send.
        linger(1.1)
        stopped.set()
        return attempt

    monkeypatch.setattr(Requests, "add", stand_still)
    assert stream.publish("t1", STATE, request="r1").offset == 0
    assert stopped.is_set()
    assert len(read_log(name)) == 1


@pytest.mark.guarantee("T14")
def test_a_clock_that_was_set_back_keeps_no_request_of_a_dead_sender(
    make, admin, name, read_log, passing
):
    stream = make(publish_timeout=10).stream(name)
    first = stream.publish("t1", STATE, request="r1")
    admin.execute(SET_BACK)
    # Another process may take longer than this one.
    admin.execute("update jobs_lib.streams set send_seconds = 15")
    asked_at = passing.now
    assert stream.publish("t1", STATE, request="r1") == first
    assert passing.now > asked_at + 15
    assert len(read_log(name)) == 1


@pytest.mark.guarantee("T14")
def test_two_senders_of_a_request_give_one_answer(
    make, name, read_log, admin, monkeypatch
):
    stream, other = make().stream(name), make().stream(name)
    add = Requests.add
    answers: list[Published] = []

    def overtake(self, *args):
        attempt = add(self, *args)
        monkeypatch.undo()
        # The clock of the database jumps ahead just before the event is sent.
        end_senders_time(admin)
        answers.append(other.publish("t1", STATE, request="r1"))
        return attempt

    monkeypatch.setattr(Requests, "add", overtake)
    answers.append(stream.publish("t1", STATE, request="r1"))
    answers.append(stream.publish("t1", STATE, request="r1"))
    first, *_ = read_log(name)
    assert [one.offset for one in answers] == [first.offset] * 3


@pytest.mark.guarantee("T14")
@pytest.mark.parametrize("more", [0, 5], ids=["shorter", "longer"])
def test_an_event_is_found_in_a_topic_that_was_made_anew_before_it_was_sent(
    make, own_broker, name, admin, read_log, more
):
    stream = make().stream(name)
    for n in range(3):
        stream.publish("t1", {"n": n})
    stream.publish("t1", STATE, request="before")
    make_anew(own_broker.admin, name, 2)
    # The publisher still knows the end of the topic that is gone.
    place = stream.publish("t1", STATE, request="r1")
    for n in range(more):
        stream.publish("t1", {"n": n})
    (search_from,) = admin.execute(
        "update jobs_lib.requests set record_offset = null, sent_until = now()"
        " where id = 'r1' returning search_from"
    ).fetchone()
    assert search_from > place.offset
    assert stream.publish("t1", STATE, request="r1") == place
    assert len(read_log(name)) == 1 + more


@pytest.mark.guarantee("T14")
def test_an_event_behind_an_open_transaction_is_not_sent_again(
    make, own_broker, name, admin, read_log
):
    stream, hasty = make().stream(name), make(publish_timeout=1).stream(name)
    hiding = open_transaction(own_broker.bootstrap_servers, name, 2)
    first = stream.publish("t1", STATE, request="r1")
    admin.execute("update jobs_lib.requests set record_offset = null")
    end_senders_time(admin)
    told = "'r1' was sent.*A transaction may be open.*the same id.*find-hanging"
    with pytest.raises(UnknownPublishError, match=told):
        hasty.publish("t1", STATE, request="r1")
    hiding.abort_transaction(60)
    end_senders_time(admin)
    assert stream.publish("t1", STATE, request="r1") == first
    assert len(read_log(name, "t1")) == 1


def test_a_request_whose_records_are_gone_is_not_sent_again(
    make, own_broker, name, admin, read_log
):
    stream = make().stream(name)
    place = stream.publish("t1", STATE, request="r1")
    stream.publish("t1", {"plan": "paid"})
    admin.execute("update jobs_lib.requests set record_offset = null")
    end_senders_time(admin)
    # Compaction never takes them so early: somebody has deleted them.
    upto = TopicPartition(name, place.partition, 1)
    for deleted in own_broker.admin.delete_records([upto]).values():
        deleted.result()
    with pytest.raises(UnknownPublishError, match="records before 1 are gone"):
        stream.publish("t1", STATE, request="r1")
    assert [one.json for one in read_log(name)] == [{"plan": "paid"}]


@pytest.mark.guarantee("T14")
def test_the_upkeep_removes_old_requests_alone(make, name, admin, database, wait_for):
    stream = make().stream(name)
    for id_ in ("new", "old"):
        stream.publish("t1", STATE, request=id_)
    admin.execute(
        "update jobs_lib.requests set remembered_at = now() - interval '61 s'"
        " where id = 'old'"
    )
    maintenance = Maintenance(database, {1}, request_seconds=60)
    maintenance.start()
    wait_for(lambda: list_requests(admin) == ["new"], what="the old one is removed")
    maintenance.stop()


@pytest.mark.parametrize("id_", ["", "a\n", "x" * 201, "é"])
def test_an_id_that_no_header_can_hold_is_refused(make, name, id_):
    with pytest.raises(PayloadError, match="the id of a request has 1 to 200"):
        make().stream(name).publish("t1", STATE, request=id_)


def test_a_request_needs_an_acknowledgement(make, name):
    stream = make().stream(name, acks=0)
    with pytest.raises(ConfigurationError, match="acks=0"):
        stream.publish("t1", STATE, request="r1")


@pytest.mark.guarantee("T14")
def test_requests_of_two_streams_know_nothing_of_each_other(make, own_broker, read_log):
    app = make()
    names = own_broker.create(), own_broker.create()
    for one in names:
        app.stream(one).publish("t1", {"of": one}, request="r1")
    assert [read_log(one)[0].json for one in names] == [{"of": one} for one in names]


@pytest.mark.guarantee("T14")
def test_many_requests_at_once_are_each_sent_once(make, name, read_log):
    stream = make(transactions=8).stream(name)

    def publish(n: int) -> tuple[int, int | None]:
        answer = stream.publish(f"k{n % 20}", {"n": n % 20}, request=f"r{n % 20}")
        return n % 20, answer.offset

    with ThreadPoolExecutor(10) as pool:
        answers = {*pool.map(publish, range(100))}
    assert len(answers) == 20
    assert sorted(json.loads(one.value)["n"] for one in read_log(name)) == [*range(20)]
