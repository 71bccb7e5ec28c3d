"""The relay: all committed rows reach the topic in order, and nothing else does."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib import telemetry
from jobs_lib.errors import PayloadError
from jobs_lib.outbox.capture import capture_changes
from tests.support.apps import heard, make_app, running
from tests.support.pods import count_shares
from tests.support.records import read_topic

if TYPE_CHECKING:
    from jobs_lib.outbox.topic import Topic
    from tests.support import Worker

pytestmark = pytest.mark.expects("fenced")


@dataclass
class State:
    """A whole state, not a change."""

    name: str
    n: int
    version: int


@dataclass
class Leg:
    """A part of a state."""

    origin: str
    destination: str


@dataclass
class Aircraft:
    """A state with parts, defaults and a null."""

    tail: str
    legs: list[Leg] = field(default_factory=list)
    gate: str | None = None
    version: int = 1


@pytest.fixture
def app(database_url, bootstrap_servers):
    """An app with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)


@pytest.fixture
def states(app, topic):
    """A topic that sends every state, not only the last one."""
    return app.topic(topic(4), value=State, compacted=True, partitions=4, merge=False)


@pytest.fixture
def read_versions(bootstrap_servers, states):
    """A function that reads the versions of each key from the topic, in order."""

    def read_versions() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for record in read_topic(bootstrap_servers, states.name):
            found.setdefault(record.key, []).append(int(record.headers["ce_version"]))
        return found

    return read_versions


@pytest.fixture
def start_relay(start_process, database_url, bootstrap_servers, states):
    """A function that starts a relay of the topic in a process of its own."""

    def start_relay(**options) -> Worker:
        return start_process(
            "relay",
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            topic=states.name,
            **options,
        )

    return start_relay


def send(connection, states: Topic[State], key: str, n: int) -> None:
    """Send the state of a key in its version n."""
    states.send(connection, key=key, value=State(key, n, n), version=n)


def count_repeats(found: dict[str, list[int]], sent: dict[str, list[int]]) -> int:
    """Check that repeats change neither the order nor the end; return their number."""
    assert found.keys() == sent.keys()
    repeats = 0
    for key, versions in found.items():
        firsts = list(dict.fromkeys(versions))
        repeats += len(versions) - len(firsts)
        assert firsts == sent[key]
        assert versions[-1] == sent[key][-1]
    return repeats


def left(admin) -> int:
    return admin.execute("select count(*) from jobs_lib.outbox").fetchone()[0]


@pytest.mark.guarantee("W4")
def test_every_commit_is_a_record_and_a_rollback_is_none(
    app, admin, states, connect, bootstrap_servers, wait_for
):
    expected: dict[str, list[int]] = {}
    with running(app, "relay"):
        for n in range(1, 301):
            key = f"k{n % 7}"
            with connect() as connection:
                send(connection, states, key, n)
                if n % 3 == 0:
                    connection.rollback()
                else:
                    expected.setdefault(key, []).append(n)
        wait_for(lambda: left(admin) == 0, timeout=60, what="the outbox is empty")
    found: dict[str, list[int]] = {}
    for record in read_topic(bootstrap_servers, states.name):
        assert record.json == {
            "name": record.key,
            "n": record.json["n"],
            "version": record.json["n"],
        }
        found.setdefault(record.key, []).append(int(record.headers["ce_version"]))
    assert found == expected


def test_rows_that_are_moved_while_they_are_sent_are_deleted_all_the_same(
    app, admin, states, connect, bootstrap_servers, wait_for
):
    with connect() as connection:
        # Make room before the rows: a rewrite of the table moves them there.
        states.send(connection, key="k", value=State("k", 0, 0), version=0)
        connection.rollback()
        for n in range(50):
            states.send(connection, key="k", value=State("k", n, n), version=n)
    places = "select ctid::text from jobs_lib.outbox order by id"
    before = admin.execute(places).fetchall()
    after: list[Any] = []

    def move(event: str, fields: dict[str, Any]) -> None:
        if event == "block.produced" and not after:
            admin.execute("vacuum full jobs_lib.outbox")
            after.extend(admin.execute(places).fetchall())

    stop = telemetry.listen(move)
    try:
        with heard("loop.failed") as failed, running(app, "relay"):
            wait_for(
                lambda: after and left(admin) == 0,
                timeout=60,
                what="the outbox is empty",
            )
    finally:
        stop()
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert failed == []
    assert len(read_topic(bootstrap_servers, states.name)) == 50


@pytest.mark.guarantee("W2")
def test_each_value_alone_rebuilds_the_row(
    app, admin, topic, connect, bootstrap_servers, wait_for
):
    aircraft = app.topic(topic(4), value=Aircraft, compacted=True, merge=False)
    sent = [
        Aircraft("a", legs=[Leg("JFK", "LAX")], gate="B4", version=1),
        # Columns with a default or a null belong to the state as well.
        Aircraft("a", legs=[], gate=None, version=2),
    ]
    with running(app, "relay"):
        for state in sent:
            with connect() as connection:
                aircraft.send(connection, key="a", value=state)
        wait_for(lambda: left(admin) == 0, timeout=60, what="the outbox is empty")
    values = [record.json for record in read_topic(bootstrap_servers, aircraft.name)]
    assert values == [asdict(state) for state in sent]


def test_a_relay_sends_although_its_session_lasts_only_a_second(
    database_url, bootstrap_servers, topic, connect, admin, wait_for
):
    # librdkafka refuses transactions of less than a second.
    app = make_app(
        database_url, kafka_bootstrap_servers=bootstrap_servers, session_timeout=1.0
    )
    events = app.topic(topic(), value=int)
    with connect() as connection:
        events.send(connection, key="a", value=1)
    with running(app, "relay"):
        wait_for(lambda: left(admin) == 0, timeout=60, what="it is sent")


@pytest.mark.parametrize("how", ["python", "sql", "trigger"])
def test_a_hint_of_new_rows_wakes_the_relay_before_its_next_poll(
    database_url, bootstrap_servers, topic, connect, admin, wait_for, how
):
    app = make_app(
        database_url,
        kafka_bootstrap_servers=bootstrap_servers,
        relay_poll_interval=600.0,
    )
    states = app.topic(topic(), value=int, compacted=True)

    @app.entity(states, source="things", key="id")
    def load(connection, keys: list[str]) -> dict[str, int]:
        return dict.fromkeys(keys, 1)

    admin.execute("create table things (id text)")
    capture_changes(admin, "things", topic=states.name, key="id")
    with running(app, "relay"):
        # From here on the relay listens: every write sends it a hint.
        wait_for(
            lambda: (
                admin.execute(
                    "select from pg_stat_activity where query like 'listen%'"
                ).rowcount
            ),
            timeout=60,
            what="it listens",
        )
        for n in range(3):
            with connect() as connection:
                if how == "python":
                    states.send(connection, key=f"k{n}", value=n)
                elif how == "sql":
                    connection.execute(
                        "select jobs_lib.send(%s, 'a', '1')", (states.name,)
                    )
                else:
                    connection.execute("insert into things values ('a')")
            wait_for(lambda: left(admin) == 0, timeout=60, what="it is sent")


@pytest.mark.guarantee("W5")
def test_bytes_are_relayed_unchanged(
    app, admin, topic, connect, bootstrap_servers, wait_for
):
    payload = bytes(range(256))
    events = app.topic(topic(1), value=bytes)
    with running(app, "relay"):
        with connect() as connection:
            events.send(connection, key="a", value=payload, headers={"who": "me"})
            events.send(connection, key=None, value=b"")
            events.tombstone(connection, key="a")
        wait_for(lambda: left(admin) == 0, timeout=60, what="the outbox is empty")
    first, *others = sorted(
        read_topic(bootstrap_servers, events.name),
        key=lambda r: int(r.headers["ce_id"].partition("-")[0]),
    )
    assert (first.key, first.value, first.headers["who"]) == ("a", payload, "me")
    assert [(r.key, r.value) for r in others] == [("", b""), ("a", None)]


def test_a_value_or_key_that_does_not_fit_the_topic_is_refused(states, connect):
    with connect() as connection:
        filled_wrongly: Any = {"name": "a", "n": "one", "version": 1}
        for value in ({"name": 1}, None, State(**filled_wrongly), object()):
            with pytest.raises(PayloadError, match="does not fit"):
                states.send(connection, key="a", value=value)
        with pytest.raises(PayloadError, match="needs a key"):
            states.send(connection, key=None, value=State("a", 1, 1))
        with pytest.raises(PayloadError, match="1 to 1000 bytes"):
            states.send(connection, key="", value=State("a", 1, 1))
        assert connection.execute("select 1").fetchone() == (1,)


@pytest.mark.guarantee("W10")
def test_a_row_that_appears_during_the_send_survives_the_delete(
    app, admin, states, connect, bootstrap_servers, wait_for
):
    # While the block is in Kafka and not yet deleted, a row with a lower id is
    # committed.
    late = connect()
    states.send(late, key="late", value=State("late", 1, 1))
    produced, go_on = threading.Event(), threading.Event()

    def hold(event, fields):
        if event == "block.produced" and not produced.is_set():
            produced.set()
            assert go_on.wait(60)

    with connect() as connection:
        # The key is chosen so that it lies in the same shard.
        for n in range(200):
            states.send(connection, key=f"k{n}", value=State("x", n, 1))
        connection.execute("update jobs_lib.outbox set shard = 0")
    late.execute("update jobs_lib.outbox set shard = 0 where key = 'late'")
    stop = telemetry.listen(hold)
    try:
        with running(app, "relay"):
            assert produced.wait(60)
            late.commit()
            go_on.set()
            wait_for(lambda: left(admin) == 0, timeout=60, what="the outbox is empty")
    finally:
        stop()
    keys = [record.key for record in read_topic(bootstrap_servers, states.name)]
    assert sorted(keys) == sorted(["late", *(f"k{n}" for n in range(200))])


@pytest.mark.guarantee("W12")
def test_a_row_with_the_lowest_id_that_commits_last_is_sent(
    app, admin, states, connect, bootstrap_servers, wait_for
):
    oldest = connect()
    states.send(oldest, key="oldest", value=State("oldest", 0, 1))
    with running(app, "relay"):
        for n in range(50):
            with connect() as connection:
                states.send(connection, key=f"k{n}", value=State("x", n, 1))
        wait_for(
            lambda: left(admin) == 0, timeout=60, what="all committed rows are sent"
        )
        oldest.commit()
        wait_for(
            lambda: (
                "oldest"
                in {record.key for record in read_topic(bootstrap_servers, states.name)}
            ),
            timeout=60,
            what="the oldest is sent too",
        )


def test_order_per_key_holds_with_concurrent_writers_and_late_commits(
    app, admin, states, connect, read_versions, wait_for
):
    admin.execute("create table counters (key text primary key, n int)")
    admin.execute(
        "insert into counters select 'k' || g, 0 from generate_series(0, 4) g"
    )

    def write(seed: int) -> None:
        with connect() as connection:
            for n in range(60):
                key = f"k{(n * seed) % 5}"
                (count,) = connection.execute(
                    "update counters set n = n + 1 where key = %s returning n", (key,)
                ).fetchone()
                send(connection, states, key, count)
                if (n + seed) % 4:
                    connection.commit()
                else:
                    connection.rollback()

    writers = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2, 3, 7)]
    with running(app, "relay"):
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        wait_for(lambda: left(admin) == 0, timeout=60, what="the outbox is empty")
    rows = admin.execute("select key, n from counters where n > 0").fetchall()
    assert read_versions() == {key: list(range(1, n + 1)) for key, n in rows}


@pytest.mark.guarantee("W11")
def test_a_crash_between_send_and_delete_repeats_and_loses_nothing(
    admin, states, app, connect, start_relay, read_versions, wait_for
):
    sent: dict[str, list[int]] = {}
    with connect() as connection:
        for n in range(1, 31):
            key = f"k{n % 3}"
            send(connection, states, key, n)
            sent.setdefault(key, []).append(n)
    assert start_relay(dies_at={"block.produced": 1}).wait(timeout=60) == -9
    assert left(admin) > 0
    with heard("block.deleted"), running(app, "relay"):
        wait_for(lambda: left(admin) == 0, timeout=60, what="the next relay goes on")
    found = read_versions()
    assert count_repeats(found, sent) > 0
    for key, versions in found.items():
        # A repeat replays the sequence; the sequence never goes back for good.
        assert all(a < b or b == sent[key][0] for a, b in pairwise(versions))


@pytest.mark.slow
def test_relays_share_the_shards_and_take_over_those_of_a_dead_relay(
    admin, states, connect, start_relay, read_versions, wait_for
):
    first, _ = start_relay(), start_relay()
    wait_for(
        lambda: len(shares := count_shares(admin, "relay")) == 2 and sum(shares) == 16,
        timeout=30,
        what="two relays share 16 shards",
    )
    keys = ("a", "b", "c", "d", "e")
    for n in range(1, 201):
        with connect() as connection:
            for key in keys:
                send(connection, states, key, n)
        if n == 100:
            first.kill()
    wait_for(lambda: left(admin) == 0, timeout=60, what="the survivor sent the rest")
    count_repeats(read_versions(), {key: [*range(1, 201)] for key in keys})
