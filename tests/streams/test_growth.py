"""A stream gets more partitions, and each key keeps its order."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from jobs_lib import Event, GrowingError, OperatingError, UnavailableError
from jobs_lib.cli.main import cli
from jobs_lib.kafka import partitions as kafka_partitions
from jobs_lib.kafka.client import count_partitions
from jobs_lib.operating import growth
from jobs_lib.operating.growth import LEASE, explain_growth, grow, list_stopped
from jobs_lib.partitioner import choose_partition
from jobs_lib.streams import log
from jobs_lib.streams import once as once_module
from jobs_lib.streams.publisher import EventProducer
from tests.support.apps import heard, make_app, running
from tests.support.beside import Threads
from tests.support.groups import Group
from tests.support.processes.publishers import GROWTH_STEPS
from tests.support.proxy import Proxy
from tests.support.records import produce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs_lib import App

BEFORE, AFTER = 3, 6
KEYS = [f"t{n}" for n in range(16)]
BEHIND = 200
"""So far the consumer may be behind."""
QUICK: dict[str, Any] = {"publish_timeout": 3}
"""What is on its way is waited for by this and four seconds."""
MOVES = next(key for key in KEYS if choose_partition(key, AFTER) >= BEFORE)
"""A key that gets another partition."""


@pytest.fixture
def name(own_broker) -> str:
    return own_broker.create(BEFORE)


@pytest.fixture
def flows() -> Iterator[threading.Event]:
    """The consumer handles records of the old partitions while this is set."""
    event = threading.Event()
    event.set()
    yield event
    event.set()


@pytest.fixture
def make_reader(make, name, admin, flows) -> Callable[..., App]:
    """A function that makes an app with the stream and a slow consumer of it."""
    admin.execute(
        "create table seen (key text, n int, partition int,"
        " place bigint generated always as identity)"
    )

    def make_reader(**options) -> App:
        app = make(
            **QUICK, kafka={"topic.metadata.refresh.interval.ms": "500"}, **options
        )
        app.stream(name)

        @app.consumer(name, group=f"{name}-g")
        def note(record, conn) -> None:
            if record.partition < BEFORE:
                flows.wait()
            conn.execute("select pg_sleep(0.002)")
            conn.execute(
                "insert into seen (key, n, partition) values (%s, %s, %s)",
                (record.key, record.value, record.partition),
            )

        return app

    return make_reader


@pytest.fixture
def read_seen(admin) -> Callable[[], list[tuple[str, int, int]]]:
    """A function that reads what the consumer has handled, in its order."""
    query = "select key, n, partition from seen order by place"
    return lambda: admin.execute(query).fetchall()


@pytest.fixture
def nobody_publishes(monkeypatch) -> None:
    """No event of a publisher is on its way, so that `grow` waits for none."""
    monkeypatch.setattr(growth, "GOOD_SECONDS", 0.0)


def find_refusal(stream) -> UnavailableError | None:
    """Publish an event of another key; returns why that was refused."""
    try:
        stream.publish("other", 0)
    except UnavailableError as error:
        return error
    return None


class Publishers(Threads):
    """Threads that publish a sequence of each key, over two apps and in two ways."""

    def __init__(self, apps: list[App], name: str, count_seen: Callable[[], int]):
        self.sent = dict.fromkeys(KEYS, 0)
        self.partitions: set[int] = set()
        self._count_seen = count_seen
        streams = [app.streams[name] for app in apps]
        super().__init__(
            partial(self._publish, KEYS[n::4], streams[n % 2], n) for n in range(4)
        )

    def _publish(self, keys: list[str], stream: Any, kind: int) -> None:
        while not self.stopping.wait(0.001):
            if sum(self.sent.values()) - self._count_seen() > BEHIND:
                continue
            for key in keys:
                n = self.sent[key]
                request = f"{key}-{n}" if kind >= 2 else None
                try:
                    if kind % 2:
                        call = stream.publish_async(key, n, request=request)
                        answer = asyncio.run(call)
                    else:
                        answer = stream.publish(key, n, request=request)
                except GrowingError:
                    continue
                self.partitions.add(answer.partition)
                self.sent[key] += 1


@pytest.mark.guarantee("T20")
def test_each_key_keeps_its_order_while_its_stream_grows(
    make, make_reader, name, admin, read_seen, wait_for, flows, monkeypatch
):
    # What is known of partitions would count for longer than the command takes.
    monkeypatch.setattr(log, "_FRESH_SECONDS", 3_600)
    reader = make_reader()
    other = make(**QUICK)
    other.stream(name)

    # The threads must not share a connection.
    lock = threading.Lock()

    def count_seen() -> int:
        with lock:
            return admin.execute("select count(*) from seen").fetchone()[0]

    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if "offsets behind" in text and not flows.is_set():
            # By now every publisher has seen the stop.
            with pytest.raises(GrowingError):
                other.streams[name].publish(KEYS[0], -1)
            # The consumer goes on only when the command waits for it.
            flows.set()

    with (
        running(reader, "consumers"),
        Publishers([reader, other], name, count_seen) as publishers,
    ):
        wait_for(lambda: count_seen() > 100, timeout=40, what="records are handled")
        with heard("stream.stopped", "stream.opened") as events:
            flows.clear()
            stopped = grow(reader, name, AFTER, seconds=120, tell=tell)
            wait_for(
                lambda: publishers.partitions == {*range(AFTER)},
                timeout=40,
                what="all partitions get events",
            )
            flows.set()
            wait_for(
                lambda: len(events) == 4, timeout=60, what="both apps have told of it"
            )
        begun = count_seen()
        wait_for(lambda: count_seen() > begun + 100, timeout=40, what="it goes on")
        publishers.__exit__()
        total = sum(publishers.sent.values())
        wait_for(lambda: count_seen() == total, timeout=60, what="all are handled")
    assert stopped > 3 + 2 + 2
    assert "waiting for events on their way" in told[0]
    assert any("offsets behind" in text for text in told)
    by_key: dict[str, list[int]] = {key: [] for key in KEYS}
    for key, n, _ in read_seen():
        by_key[key].append(n)
    assert by_key == {key: [*range(sent)] for key, sent in publishers.sent.items()}
    assert explain_growth(reader, name, AFTER) == [
        f"declare partitions={AFTER} for {name!r}"
    ]


@pytest.mark.guarantee("T20")
def test_a_group_that_does_not_follow_in_time_leaves_all_as_it_was(
    make_reader, name, own_broker, nobody_publishes
):
    app = make_reader()
    produce(own_broker.bootstrap_servers, name, [(MOVES, 0)])
    with pytest.raises(OperatingError, match=r"'.*-g', which is 1 offsets behind"):
        grow(app, name, AFTER, seconds=0.5)
    assert list_stopped(app) == []
    after = app.streams[name].publish(MOVES, 1, request="r1")
    assert (after.partition, after.offset) == (choose_partition(MOVES, BEFORE), 1)
    assert count_partitions(app.settings, name) == BEFORE


@pytest.mark.guarantee("T20")
def test_a_group_that_was_set_back_after_kafka_was_told_is_waited_for(
    make_reader, name, own_broker, admin, nobody_publishes
):
    app, partition = make_reader(), choose_partition(MOVES, BEFORE)
    produce(own_broker.bootstrap_servers, name, [(MOVES, 0)])
    group = Group(own_broker.bootstrap_servers, f"{name}-g")
    group.commit_one(name, {partition: 1})
    group.close()
    admin.execute(
        "insert into jobs_lib.offsets (consumer_group, topic, partition, next_offset)"
        " values (%s, %s, %s, 0)",
        (f"{name}-g", name, partition),
    )
    with pytest.raises(OperatingError, match=r"'.*-g', which is 1 offsets behind"):
        grow(app, name, AFTER, seconds=0.5)
    assert count_partitions(app.settings, name) == BEFORE


@pytest.mark.guarantee("T20")
def test_jobs_of_the_events_and_groups_of_other_apps_are_waited_for(
    make, own_broker, name, wait_for, monkeypatch, nobody_publishes
):
    monkeypatch.setattr(growth, "_TELL_PAUSE", 0.0)
    app, servers = make(**QUICK), own_broker.bootstrap_servers
    app.stream(name)
    may_end = threading.Event()

    @app.job()
    def register(job) -> None:
        may_end.wait()

    @app.consumer(name, group=f"{name}-g", done=True)
    def handle(record, conn) -> None:
        register.enqueue(conn)

    produce(servers, name, [(MOVES, 0)])
    other = Group(servers)
    told: list[str] = []
    growing = threading.Thread(
        target=grow,
        args=(app, name, AFTER),
        kwargs={"groups": [other.name], "tell": told.append},
    )
    jobs_wait = f"the group '{name}-g.done', which is 1 offsets behind"
    other_waits = f"the group {other.name!r}, which is 1 offsets behind"
    both = "; ".join(sorted([jobs_wait, other_waits]))

    def await_waiting(waits: str) -> None:
        wait_for(
            lambda: f"waiting for {waits}" in told,
            timeout=60,
            what=lambda: f"it waits for {waits}: {told}",
        )
        assert count_partitions(app.settings, name) == BEFORE

    with running(app, "consumers", "executor"):
        growing.start()
        await_waiting(both)
        may_end.set()
        await_waiting(other_waits)
        other.commit_soon(name, {choose_partition(MOVES, BEFORE): 1})
        growing.join()
    assert count_partitions(app.settings, name) == AFTER
    other.close()


@pytest.mark.guarantee("T20")
def test_functions_in_transactions_of_kafka_are_waited_for(
    make, own_broker, name, flows, wait_for, nobody_publishes
):
    app = make(**QUICK)
    app.stream(name)
    totals = app.stream(own_broker.create(1))
    # It has the markers of the function's transactions.
    ends = app.stream(own_broker.create(1))

    @app.transactional(name, group=f"{name}-sum", value=dict)
    def sum_up(record) -> Event:
        flows.wait()
        return totals.event(record.key, record.value)

    @app.transactional(totals.name, group=f"{name}-end", value=dict)
    def end(record) -> Event:
        return ends.event(record.key, record.value)

    flows.clear()
    produce(own_broker.bootstrap_servers, name, [(MOVES, {"n": 1})])
    told: list[str] = []

    def grow_both() -> None:
        for topic, partitions in ((name, AFTER), (totals.name, 2)):
            grow(app, topic, partitions, tell=told.append)

    thread = threading.Thread(target=grow_both)
    with running(app, "consumers"):
        thread.start()
        behind = f"waiting for the group '{name}-sum', which is 1 offsets behind"
        wait_for(lambda: behind in told, timeout=60, what=lambda: f"it waits: {told}")
        assert count_partitions(app.settings, name) == BEFORE
        flows.set()
        thread.join()
    assert count_partitions(app.settings, name) == AFTER
    assert count_partitions(app.settings, totals.name) == 2
    assert told[0] == (
        f"not stopping what @app.transactional sends, for the groups '{name}-end', "
        f"'{name}-sum': if one of them sends to '{name}', stop its processes first, or "
        "keys may lose their order"
    )


@pytest.mark.guarantee("T20")
@pytest.mark.slow
def test_of_two_commands_at_once_one_is_refused_and_shown(
    make_reader, name, own_broker, wait_for, read_seen, nobody_publishes
):
    app = make_reader()
    stream = app.streams[name]
    produce(own_broker.bootstrap_servers, name, [(MOVES, 0)])
    told: list[str] = []
    growing = threading.Thread(
        target=grow, args=(app, name, AFTER), kwargs={"tell": told.append}
    )
    growing.start()
    (stopped,) = wait_for(
        lambda: list_stopped(app), timeout=60, what="publishers are stopped"
    )
    assert (stopped.topic, stopped.partitions) == (name, AFTER)
    assert 0 < stopped.seconds_left <= LEASE
    with pytest.raises(OperatingError, match="another command adds partitions"):
        grow(app, name, AFTER)
    # A process that has begun to ask before may publish for a moment.
    refusal = wait_for(
        lambda: find_refusal(stream), timeout=60, what="a publish is refused"
    )
    assert isinstance(refusal, GrowingError)
    assert "gets more partitions, and took no events for 3 s" in str(refusal)
    wait_for(
        lambda: any("offsets behind" in text for text in told),
        timeout=30,
        what="it tells for which group it waits",
    )
    with running(app, "consumers"):
        growing.join(60)
        assert stream.publish(MOVES, 1).partition >= BEFORE
        wait_for(lambda: (MOVES, 1) in {one[:2] for one in read_seen()}, timeout=60)
    assert list_stopped(app) == []
    # There is nothing to do for the next one.
    assert grow(app, name, AFTER) == 0.0
    with pytest.raises(OperatingError, match="takes none away"):
        grow(app, name, BEFORE)


@pytest.mark.slow
@pytest.mark.guarantee("T20")
@pytest.mark.parametrize("step", GROWTH_STEPS)
def test_a_command_that_was_killed_stops_nobody_for_good(
    make_reader,
    start_process,
    database_url,
    own_broker,
    name,
    read_seen,
    step,
    wait_for,
):
    app = make_reader()
    stream = app.streams[name]
    stream.publish(MOVES, 0)
    with running(app, "consumers"):
        worker = start_process(
            "grower",
            database_url,
            kafka_bootstrap_servers=own_broker.bootstrap_servers,
            topic=name,
            group=f"{name}-g",
            partitions=AFTER,
            step=step,
        )
        worker.wait_for_line("dying around", timeout=60)
        worker.wait()
        is_there = step in ("added", "shown")
        count = AFTER if is_there else BEFORE
        assert count_partitions(app.settings, name) == count
        with pytest.raises(OperatingError, match="another command"):
            grow(app, name, AFTER + 1)
        wait_for(lambda: not list_stopped(app), timeout=LEASE + 10, what="it is over")
        answer = stream.publish(MOVES, 1)
        assert answer.partition == choose_partition(MOVES, count)
        # Some who publish may not know of the partitions that are there.
        assert grow(app, name, AFTER) > 3 + 2 + 2
        answer = stream.publish(MOVES, 2)
        assert answer.partition == choose_partition(MOVES, AFTER)
        wait_for(lambda: len(read_seen()) == 3, timeout=60, what="all are handled")
    assert [n for _, n, _ in read_seen()] == sorted(n for _, n, _ in read_seen())


@pytest.fixture
def cut_off(database_url, own_broker, name) -> Iterator[tuple[App, Proxy]]:
    """An app behind a proxy before the database."""
    with Proxy.before(database_url) as proxy:
        app = make_app(
            proxy.url(database_url),
            kafka_bootstrap_servers=own_broker.bootstrap_servers,
            database_timeout=2,
            **QUICK,
        )
        app.stream(name)
        yield app, proxy
        app.close()


@pytest.mark.slow
@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("T20")
def test_a_publisher_that_is_cut_off_from_the_database_publishes_nothing(
    make_reader, cut_off, name, read_log, wait_for
):
    app, proxy = cut_off
    stream, reader = app.streams[name], make_reader()
    stream.publish(MOVES, 0)
    proxy.hold()

    # For a moment its last answer counts.
    refusal = wait_for(lambda: find_refusal(stream), timeout=60, what="it is refused")
    assert not isinstance(refusal, GrowingError)
    assert "has not said within 3 s" in str(refusal)
    sent = len(read_log(name))
    with running(reader, "consumers"):
        grow(reader, name, AFTER)
    assert find_refusal(stream)
    assert len(read_log(name)) == sent
    proxy.restore()

    def publish() -> int | None:
        try:
            return stream.publish(MOVES, 1).partition
        except UnavailableError:
            return None

    found = wait_for(publish, timeout=30, what="it publishes again")
    assert found == choose_partition(MOVES, AFTER)


@pytest.mark.slow
@pytest.mark.guarantee("T20")
def test_a_request_that_waits_for_its_topic_goes_to_the_new_partition(
    make_reader, make, name, read_log, monkeypatch
):
    """Its partition was chosen, and its request noted, before the topic grew."""
    # A process that stands still chooses anew anyway.
    monkeypatch.setattr(once_module, "_STALL_SECONDS", 3_600)
    reader = make_reader()
    app = make(publish_timeout=4)
    stream = app.stream(name)
    stream.publish(MOVES, 0)
    once = stream._publishing()._once
    choose, chosen, grown = once._choose, threading.Event(), threading.Event()

    def stand_still(call):
        target = yield from choose(call)
        if not chosen.is_set():
            chosen.set()
            grown.wait(90)
        return target

    once._choose = stand_still
    answers: list[Any] = []
    caller = threading.Thread(
        target=lambda: answers.append(stream.publish(MOVES, 1, request="r1"))
    )
    caller.start()
    assert chosen.wait(15)
    with running(reader, "consumers"):
        stopped = grow(reader, name, AFTER)
    grown.set()
    caller.join()
    # The command waits for what may be on its way from this process, not its own.
    assert stopped > 4 + 2 + 2
    assert answers[0].partition == choose_partition(MOVES, AFTER)
    assert [one.json for one in read_log(name, MOVES)] == [0, 1]


@pytest.mark.guarantee("T20")
def test_what_cannot_grow_is_refused(make, make_reader, name):
    app = make_reader()
    app.topic("states")
    cases: dict[str, tuple[str, int, dict[str, Any]]] = {
        "declares no stream 'tenants'; its streams are": ("tenants", 6, {}),
        "is written by the outbox": ("states", 6, {}),
        "give more than that": (name, 6, {"seconds": 2.0}),
        "takes none away": (name, 2, {}),
    }
    for says, (topic, partitions, options) in cases.items():
        with pytest.raises(OperatingError, match=says):
            grow(app, topic, partitions, **options)
    other = make()
    other.stream(name)
    with pytest.raises(OperatingError, match="no consumer or read model of"):
        grow(other, name, 6)


@pytest.mark.guarantee("T20")
@pytest.mark.slow
def test_a_long_limit_of_a_process_that_is_gone_is_forgotten_if_it_is_said(
    make, make_reader, name, admin
):
    def read_seconds() -> float:
        return admin.execute("select send_seconds from jobs_lib.streams").fetchone()[0]

    reader, slow = make_reader(), make(publish_timeout=600)
    stream = slow.stream(name)
    stream.publish(MOVES, 0)
    slow.close()
    with running(reader, "consumers"):
        with pytest.raises(OperatingError, match=r"for 604 s .*--publish-timeout"):
            grow(reader, name, AFTER)
        assert 1 + 2 + 2 < grow(reader, name, AFTER, publish_timeout=1) < 60
        assert read_seconds() == 1 + 2
        # It comes again, and says so before it publishes.
        assert stream.publish(MOVES, 1).partition >= BEFORE
        assert read_seconds() == 600 + 2


@pytest.mark.guarantee("T20")
def test_a_longer_limit_of_a_process_that_goes_on_is_waited_for(
    make, make_reader, name, admin
):
    reader = make_reader()

    def note(_: str) -> None:
        # So does a process whose events flow.
        admin.execute("update jobs_lib.streams set send_seconds = 602")

    told = "still waits for events on their way, for 604 s"
    with pytest.raises(OperatingError, match=told):
        grow(reader, name, AFTER, seconds=6, publish_timeout=1, tell=note)
    assert count_partitions(reader.settings, name) == BEFORE


@pytest.fixture
def grow_at_once(make_reader, name, nobody_publishes) -> Callable[..., float]:
    """A function that grows the stream, of which no event can be on its way."""
    app = make_reader()

    def grow_now(**options: Any) -> float:
        return grow(app, name, AFTER, **options)

    return grow_now


@pytest.mark.guarantee("T20")
def test_a_command_whose_time_is_over_says_that_it_has_added_partitions(
    grow_at_once, own_broker, name, admin, monkeypatch
):
    count = kafka_partitions.count_on_brokers

    def expire(*given: Any) -> dict[str, int]:
        admin.execute("update jobs_lib.streams set stopped_until = clock_timestamp()")
        return dict.fromkeys(count(*given), BEFORE)

    monkeypatch.setattr(growth, "count_on_brokers", expire)
    told = rf"go on\. Kafka was asked for {AFTER} partitions .* call it again"
    with pytest.raises(OperatingError, match=told) as failed:
        grow_at_once()
    assert "No partition was added" not in str(failed.value)
    assert len(own_broker.admin.list_topics(name).topics[name].partitions) == AFTER


@pytest.mark.guarantee("T20")
def test_a_second_command_waits_for_the_brokers_while_publishers_are_stopped(
    grow_at_once, name, admin, monkeypatch
):
    assert grow_at_once() > 0
    count = kafka_partitions.count_on_brokers
    behind = iter([BEFORE, BEFORE])
    stopped: list[bool] = []

    def count_behind(*given: Any) -> dict[str, int]:
        query = "select grower is not null from jobs_lib.streams where topic = %s"
        stopped.append(admin.execute(query, (name,)).fetchone()[0])
        return {one: next(behind, shown) for one, shown in count(*given).items()}

    monkeypatch.setattr(growth, "count_on_brokers", count_behind)
    told: list[str] = []
    assert grow_at_once(tell=told.append) > 0
    assert told == ["waiting for the brokers to show the partitions"]
    assert stopped == [False, True, True]
    assert grow_at_once() == 0.0


@pytest.mark.slow
@pytest.mark.guarantee("T20")
def test_a_growth_that_has_failed_at_the_brokers_is_done_again_as_a_whole(
    make, make_reader, name, monkeypatch
):
    reader, app = make_reader(), make(**QUICK)
    stream = app.stream(name)
    with running(reader, "consumers"):
        assert stream.publish(MOVES, 0).partition < BEFORE
        with monkeypatch.context() as lagging:
            # A broker is behind, and the client of the publisher asks this one.
            counts = {"localhost:9092": BEFORE}
            lagging.setattr(growth, "count_on_brokers", lambda *_: counts)
            lagging.setattr(growth, "_SHOWN_SECONDS", 0.0)
            # Only the second command must wait for events on their way.
            lagging.setattr(growth, "GOOD_SECONDS", 0.0)
            lagging.setattr(EventProducer, "learn", learn_nothing)
            with pytest.raises(UnavailableError, match="not all brokers show"):
                grow(reader, name, AFTER)
            assert stream.publish(MOVES, 1).partition < BEFORE
        # Now all show them, and the publisher's client does not know it yet.
        assert grow(reader, name, AFTER) > 3 + 2 + 2
        target = choose_partition(MOVES, AFTER)
        assert stream.publish(MOVES, 2).partition == target
        assert stream.publish(MOVES, 3, request="r1").partition == target
        assert grow(reader, name, AFTER) == 0.0


def learn_nothing(producer: EventProducer, topic: str, period: int) -> None:
    """Get an answer of a broker that does not show new partitions yet."""
    producer.known[topic] = period


@pytest.mark.guarantee("T20")
def test_a_broker_that_does_not_show_the_partitions_yet_misleads_no_command(
    grow_at_once, name, monkeypatch
):
    assert grow_at_once() > 0
    monkeypatch.setattr(growth, "list_partitions", lambda *_: {name: BEFORE})
    # It asks for them once more, and Kafka says that they are there.
    assert grow_at_once() > 0


@pytest.mark.guarantee("T20")
def test_publishers_stay_stopped_while_each_broker_may_be_slow(
    grow_at_once, admin, monkeypatch
):
    add, ask = kafka_partitions.add_partitions, kafka_partitions._count_on
    find = kafka_partitions._list_brokers
    marks: list[Any] = []

    def read_now(query: str) -> Any:
        return admin.execute(f"select {query} from jobs_lib.streams").fetchone()[0]

    def add_slowly(*given: Any) -> None:
        add(*given)
        marks.append(read_now("clock_timestamp()"))

    def list_twice(*given: Any) -> list[str]:
        return 2 * find(*given)

    def ask_slowly(*given: Any) -> int:
        # Each may take so long that the stop must be renewed before the next one.
        assert read_now("renewed_at") > marks[-1]
        count = ask(*given)
        marks.append(read_now("clock_timestamp()"))
        return count

    monkeypatch.setattr(growth, "add_partitions", add_slowly)
    monkeypatch.setattr(kafka_partitions, "_count_on", ask_slowly)
    monkeypatch.setattr(kafka_partitions, "_list_brokers", list_twice)
    grow_at_once()
    assert len(marks) > 2


@pytest.mark.guarantee("T20")
def test_the_commands_grow_a_stream_and_show_it(make_reader, name, monkeypatch, admin):
    app = make_reader()
    app.streams[name].publish(MOVES, 0)
    # Of a process that is gone.
    admin.execute("update jobs_lib.streams set send_seconds = 602")
    module = types.ModuleType("service_of_test")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "service_of_test", module)
    with running(app, "consumers"):
        given = f"{name} --partitions 4 --publish-timeout 3".split()
        done = CliRunner().invoke(
            cli, ["topics", "grow", "service_of_test:app", *given]
        )
    assert done.exit_code == 0, done.output
    assert f"{name} has 4 partitions; publishers were stopped for" in done.stdout
    assert f"to do: declare partitions=4 for '{name}'" in done.stderr
    shown = CliRunner().invoke(cli, ["topics", "status", "service_of_test:app"])
    assert shown.exit_code == 0, shown.output
    assert "seconds_left" in shown.stdout
