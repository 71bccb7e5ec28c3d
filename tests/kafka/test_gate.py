"""Records that wait until other groups have handled them, on a real Kafka."""

from __future__ import annotations

import random
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib import ConfigurationError, Exact
from jobs_lib.consuming import gated as module
from jobs_lib.kafka.positions import KnownOffsets
from jobs_lib.operating.gates import list_gates
from jobs_lib.service.service import Service
from tests.support.apps import heard, running
from tests.support.groups import Group
from tests.support.records import key_of, make_producer, produce, read_committed
from tests.support.waiting import linger

if TYPE_CHECKING:
    from jobs_lib import App
    from jobs_lib.consuming.progress import Progress

pytestmark = pytest.mark.usefixtures("patient_gates")
REFRESH = 0.05
SHORT = 0.3
PATIENCE = 60.0
"""Seconds: a wait for the first answers of a broker."""
KILLS = 30


@pytest.fixture
def short(monkeypatch) -> None:
    """Let go what waits, and tell of it, after a short time; and tell only once."""
    monkeypatch.setattr(module, "_KEEP_SECONDS", SHORT)
    monkeypatch.setattr(module, "_TELL_SECONDS", SHORT)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.05)
    # The pause between two events might be over before the gate opens.
    monkeypatch.setattr(module, "_TELL_PAUSE", 3_600.0)


def declare(app: App, name: str, seen: str, after: Any, **options: Any) -> str:
    """Declare a consumer that notes its records; returns its group."""
    own = options.pop("group", f"{name}-own")

    @app.consumer(name, group=own, after=after, **options)
    def handle(record, conn) -> None:
        conn.execute(seen, (record.partition, record.value))

    return own


def derive(servers: str, topic: str, *places: str | None) -> None:
    """Produce records that were made of others; their values are numbers from 0 on."""
    producer = make_producer(servers)
    for value, place in enumerate(places):
        headers: dict[str, str | bytes | None] = {}
        if place is not None:
            headers["ce_derivedfrom"] = place
        producer.produce(topic, str(value).encode(), "k", headers=headers)
    assert producer.flush(30) == 0


def find(service: Service, partition: int = 0) -> Progress | None:
    """The progress of a partition that the service's first consumer owns."""
    consumer: Any = next(
        one.worker for one in service._owners if one.measures is not None
    )
    for (_, number), progress in dict(consumer._partitions).items():
        if number == partition:
            found: Progress = progress
            return found
    return None


def is_held(service: Service, partition: int = 0, *, at: int | None = None) -> bool:
    """Whether the partition waits, by default at any record."""
    progress = find(service, partition)
    held = None if progress is None else progress.held
    return held is not None and at in (
        None,
        next(iter(held.places.values())).offset,
    )


def is_let_go(service: Service, partition: int = 0) -> bool:
    """Whether it waits without records in memory."""
    progress = find(service, partition)
    assert progress is not None
    return progress.held is not None and progress.paused and not progress.waiting


def list_topics(kafka_admin: Any, name: str) -> set[str]:
    """The topics in Kafka, without those of other tests."""
    return {
        one
        for one in kafka_admin.list_topics(timeout=30).topics
        if name in one or not one.startswith("test-")
    }


@pytest.mark.guarantee("K1", "K9", "I29", "I30")
def test_each_record_waits_until_all_groups_have_passed_it(
    make, admin, bootstrap_servers, topic, group, wait_for
):
    name, groups, count = topic(3), [group(), group()], 20
    app = make(gate_refresh=REFRESH)
    seen: list[tuple[int, int]] = []

    @app.consumer(name, group=f"{name}-own", after=[(name, g.name) for g in groups])
    def handle(record, conn) -> None:
        for one in groups:
            assert one.read(name, record.partition) > record.offset
        seen.append((record.partition, record.offset))

    def count_seen() -> list[int]:
        return [sum(p == number for p, _ in seen) for number in range(3)]

    keys = [key_of(partition, 3) for partition in range(3)]
    produce(bootstrap_servers, name, [(key, n) for key in keys for n in range(count)])
    at = [{0: 0, 1: 0, 2: 0} for _ in groups]
    chosen = random.Random(7)
    with heard("record.failed") as failed, running(app, "consumers") as service:
        wait_for(
            lambda: all(is_held(service, number) for number in range(3)),
            timeout=30,
            what="nothing is known of the groups",
        )
        while left := [
            (number, partition)
            for number, one in enumerate(at)
            for partition, offset in one.items()
            if offset < count
        ]:
            number, partition = chosen.choice(left)
            step = at[number][partition] + chosen.randint(1, 8)
            at[number][partition] = min(count, step)
            groups[number].commit_soon(name, {partition: at[number][partition]})
            passed = [min(one[n] for one in at) for n in range(3)]
            wait_for(
                lambda passed=passed: count_seen() == passed,
                timeout=30,
                what=str(passed),
            )
    assert not failed
    for partition in range(3):
        assert [o for p, o in seen if p == partition] == [*range(count)]


@pytest.mark.guarantee("K10", "K7", "K2", "K4")
def test_the_committed_offset_is_the_first_that_is_held(
    make, admin, bootstrap_servers, topic, group, seen, read_seen, wait_for, kafka_admin
):
    name, other = topic(1), group()
    app = make(gate_refresh=REFRESH)
    declare(app, name, seen, [(name, other.name)])
    produce(bootstrap_servers, name, [("k", n) for n in range(8)])
    other.commit(name, 5)
    before = list_topics(kafka_admin, name)
    with running(app, "consumers") as service:
        wait_for(lambda: is_held(service, at=5), timeout=30, what="5 is held")
        assert read_seen() == [*range(5)]
        other.commit(name, 6)
        wait_for(lambda: is_held(service, at=6), timeout=30, what="6 is held")
        assert read_seen() == [*range(6)]
        # No topic is made for it, and it is no member of the group that it waits for.
        assert list_topics(kafka_admin, name) == before
        asked = kafka_admin.describe_consumer_groups([other.name])
        assert asked[other.name].result().members == []
    # It goes on with the same record after a restart.
    other.commit(name, 8)
    with running(app, "consumers"):
        wait_for(lambda: read_seen() == [*range(8)], timeout=30, what="all are in")


@pytest.mark.guarantee("K11", "K20", "FK16")
def test_a_group_that_nobody_knows_holds_everything_and_is_named(
    make, admin, bootstrap_servers, topic, group, seen, read_seen, short, wait_for
):
    name, other = topic(4), group()
    # No short refresh: an answer of a busy broker must not be too old.
    app = make()
    declare(app, name, seen, [(name, other.name)])
    keys = [key_of(partition, 4) for partition in range(4)]
    with (
        heard("gate.closed", "gate.opened") as told,
        running(app, "consumers") as service,
    ):
        # Before that the reason is that Kafka says nothing.
        asked: Any = service._dependencies
        wait_for(
            lambda: asked.ask_handled(other.name, name, within=PATIENCE),
            timeout=PATIENCE,
            what="Kafka has answered",
        )
        produce(bootstrap_servers, name, [(key, 1) for key in keys])
        wait_for(lambda: told, timeout=30, what="it is told")
        (measures,) = service._find_measures()
        wait_for(
            lambda: len(measures.find_waits()) == 4,
            timeout=30,
            what="all partitions wait",
        )
        waits = measures.find_waits()
        assert {one.after for one in waits} == {other.name}
        assert {one.partition for one in waits} == {(name, n) for n in range(4)}
        assert min(one.seconds for one in waits) >= 0
        assert sum(map(len, map(read_seen, range(4)))) == 0
        other.commit(name, 1, 1, 1, 1)
        wait_for(lambda: len(told) > 1, timeout=30, what="it is open")
        wait_for(
            lambda: sum(map(len, map(read_seen, range(4)))) == 4,
            timeout=30,
            what="all are in",
        )
    (_, fields), (_, opened) = told
    assert [event for event, _ in told] == ["gate.closed", "gate.opened"]
    assert fields["after"] == other.name
    assert fields["group"] == opened["group"] == f"{name}-own"
    assert 1 <= fields["count"] <= 4
    assert fields["seconds"] >= SHORT
    assert f"{other.name!r} has committed nothing of {name!r}" in fields["reason"]


@pytest.mark.guarantee("K2", "I30")
def test_a_record_whose_call_fails_behind_an_open_gate_stays_the_first(
    make, bootstrap_servers, topic, group, seen, read_seen, wait_for
):
    name, other = topic(1), group()
    app = make(gate_refresh=REFRESH)
    answers = threading.Event()

    @app.consumer(name, group=f"{name}-own", after=[(name, other.name)])
    def call(record, conn) -> None:
        if not answers.is_set():
            raise ConnectionError("the service has handled it, and is down")
        conn.execute(seen, (record.partition, record.value))

    produce(bootstrap_servers, name, [("k", n) for n in range(3)])
    other.commit(name, 3)
    with heard("record.failed") as failed, running(app, "consumers") as service:
        wait_for(lambda: len(failed) > 1, timeout=60, what="the call is repeated")
        other.commit(name, 0)
        wait_for(lambda: is_held(service, at=0), timeout=30, what="it is held again")
        answers.set()
        assert read_seen() == []
        other.commit(name, 3)
        wait_for(lambda: read_seen() == [0, 1, 2], timeout=60, what="all are in")
    assert {fields["offset"] for _, fields in failed} == {0}


@pytest.mark.guarantee("K12", "FK17")
@pytest.mark.parametrize("how", ["set back", "deleted"])
def test_a_group_that_is_set_back_or_deleted_holds_the_consumer_again(
    make, kafka_admin, bootstrap_servers, topic, group, seen, read_seen, wait_for, how
):
    name, other = topic(1), group()
    app = make(gate_refresh=REFRESH)
    declare(app, name, seen, [(name, other.name)])
    produce(bootstrap_servers, name, [("k", n) for n in range(3)])
    other.commit(name, 3)
    with running(app, "consumers") as service:
        wait_for(lambda: read_seen() == [0, 1, 2], timeout=30, what="all are in")
        if how == "set back":
            other.commit(name, 0)
        else:
            kafka_admin.delete_consumer_groups([other.name])[other.name].result()
        asked: Any = service._dependencies
        wait_for(
            lambda: (
                (known := asked.ask_committed(other.name, name)) is not None
                and known.offsets == ({0: 0} if how == "set back" else {})
            ),
            timeout=30,
            what="the answer has come",
        )
        produce(bootstrap_servers, name, [("k", 3)])
        wait_for(lambda: is_held(service, at=3), timeout=30, what="it is held")
        state = "waits" if how == "set back" else "missing"
        assert [one.state for one in list_gates(app)] == [state]
        other.commit(name, 3)
        other.commit(name, 4)
        wait_for(lambda: read_seen() == [0, 1, 2, 3], timeout=30, what="it goes on")


@pytest.mark.guarantee("K3", "K20")
def test_an_offset_above_the_end_opens_nothing_and_is_named(
    make, admin, bootstrap_servers, topic, group, seen, read_seen, short, wait_for
):
    name, other = topic(1), group()
    # As of a topic that was made anew.
    other.commit(name, 1_000)
    # No short refresh: an answer of a busy broker must not be too old.
    app = make()
    declare(app, name, seen, [(name, other.name)])
    with heard("gate.closed") as told, running(app, "consumers") as service:
        # Before that the reason is that Kafka says nothing.
        asked: Any = service._dependencies
        wait_for(
            lambda: asked.ask_handled(other.name, name, within=PATIENCE),
            timeout=PATIENCE,
            what="Kafka has answered",
        )
        produce(bootstrap_servers, name, [("k", n) for n in range(3)])
        wait_for(lambda: told, timeout=30, what="it is told")
        ((_, fields),) = told
        assert fields["after"] == other.name
        assert f"the offset 1000 of {name}/0, which is above its" in fields["reason"]
        assert [one.state for one in list_gates(app)] == ["above"]
        assert list_gates(app)[0].committed == 1_000
        assert read_seen() == []
        other.commit(name, 2)
        wait_for(lambda: read_seen() == [0, 1], timeout=30, what="two are in")


@pytest.mark.guarantee("K13", "K15", "K9")
def test_a_partition_that_waits_lets_its_records_go_and_others_flow(
    make, admin, bootstrap_servers, topic, group, seen, read_seen, short, wait_for
):
    name, other = topic(2), group()
    app = make(gate_refresh=REFRESH, heartbeat_interval=0.1, stale_after=1.0)
    own = declare(app, name, seen, [(name, other.name)])
    keys = [key_of(partition, 2) for partition in range(2)]
    produce(bootstrap_servers, name, [(keys[0], n) for n in range(9)])
    other.commit(name, 4, 0)
    with running(app, "consumers") as service:
        wait_for(
            lambda: is_held(service, at=4) and is_let_go(service),
            timeout=30,
            what="its records are let go",
        )
        produce(bootstrap_servers, name, [(keys[1], n) for n in range(50)])
        other.commit(name, 4, 50)
        wait_for(
            lambda: read_committed(bootstrap_servers, own, name) == {0: 4, 1: 50},
            timeout=30,
            what="the other one flows",
        )
        # Kafka hears of positions with each look at the offsets.
        consumer: Any = service._owners[0].worker
        looks = consumer._looks._looked_at
        wait_for(
            lambda: consumer._looks._looked_at > looks + 10 * 0.1,
            timeout=30,
            what="ten more heartbeats",
        )
        committed = wait_for(
            lambda: read_committed(bootstrap_servers, own, name),
            timeout=30,
            what="Kafka answers",
        )
        assert committed == {0: 4, 1: 50}
        assert read_seen(0) == [*range(4)]
        other.commit(name, 9, 50)
        wait_for(lambda: read_seen(0) == [*range(9)], timeout=30, what="it goes on")
        wait_for(
            lambda: read_committed(bootstrap_servers, own, name) == {0: 9, 1: 50},
            timeout=30,
            what="Kafka is told",
        )


@pytest.mark.guarantee("K17", "K5")
def test_a_read_model_moves_in_the_leaps_of_its_dependency(
    make, admin, bootstrap_servers, topic, group, wait_for
):
    name, elsewhere, other = topic(1), topic(1), group()
    app = make(gate_refresh=REFRESH, consumer_block=30)
    admin.execute("create table rm (id text primary key, version bigint, n int)")

    @app.read_model(
        name, table="rm", key="id", group=f"{name}-own", after=[(name, other.name)]
    )
    def rm(record) -> dict[str, Any]:
        return {"n": record.value}

    produce(bootstrap_servers, name, [(f"k{n}", n) for n in range(300)])
    # What the group has done of another topic does not count.
    other.commit(elsewhere, 300)
    with heard("records.committed") as committed, running(app, "consumers") as service:
        for leap in (100, 200, 250):
            other.commit(name, leap)
            wait_for(
                lambda leap=leap: is_held(service, at=leap),
                timeout=30,
                what=f"{leap} is held",
            )
            (count,) = admin.execute("select count(*) from rm").fetchone()
            assert count == leap
    ends = [fields["next_offset"] for _, fields in committed]
    assert {100, 200, 250} <= {*ends}
    assert ends == sorted(ends)


@pytest.mark.guarantee("K3", "K21")
def test_nothing_is_handled_that_a_read_model_does_not_have(
    make, admin, bootstrap_servers, topic, wait_for
):
    name, count = topic(4), 10_000
    app = make(gate_refresh=REFRESH)
    admin.execute("create table rm (id text primary key, version bigint)")
    handled: list[int] = []

    @app.read_model(name, table="rm", key="id", group=f"{name}-b")
    def rm(record) -> dict[str, Any]:
        return {}

    @app.consumer(name, group=f"{name}-a", per="block", after=[(name, f"{name}-b")])
    def handle(records, conn) -> None:
        keys = [record.key for record in records]
        query = "select count(*) from rm where id = any (%s)"
        (found,) = conn.execute(query, (keys,)).fetchone()
        assert found == len(keys)
        handled.append(found)

    with heard("record.failed") as failed, running(app, "consumers"):
        produce(bootstrap_servers, name, [(f"k{n}", n) for n in range(count)])
        wait_for(lambda: sum(handled) == count, timeout=60, what="all are handled")
    assert not failed


@pytest.mark.guarantee("K19")
def test_each_consumer_waits_for_its_own_groups(
    make, admin, bootstrap_servers, topic, group, seen, read_seen, wait_for
):
    name, late, quick = topic(1), group(), group()
    app = make(gate_refresh=REFRESH)
    handled: list[int] = []

    @app.consumer(name, group=f"{name}-a", after=[(name, quick.name)])
    def handle_soon(record, conn) -> None:
        handled.append(record.value)

    after = [(name, late.name), (Exact(name), quick.name)]
    declare(app, name, seen, after, group=f"{name}-b")
    produce(bootstrap_servers, name, [("k", n) for n in range(5)])
    quick.commit(name, 5)
    late.commit(name, 2)
    with running(app, "consumers"):
        wait_for(lambda: read_seen() == [0, 1], timeout=30, what="two are in")
        wait_for(lambda: handled == [*range(5)], timeout=30, what="the others go on")
        assert read_seen() == [0, 1]
        late.commit(name, 5)
        wait_for(lambda: read_seen() == [*range(5)], timeout=30, what="all are in")


@pytest.mark.guarantee("K8")
def test_the_first_record_of_a_new_partition_needs_no_question(
    make, admin, bootstrap_servers, topic, group, seen, read_seen, wait_for
):
    name, other = topic(2), group()
    other.commit(name, 10, 10)
    apps = [make(gate_refresh=3600.0, pod=f"pod-{n}") for n in range(2)]
    for app in apps:
        declare(app, name, seen, [(name, other.name)])
    with running(apps[0], "consumers") as stays:
        asked: Any = stays._dependencies
        rounds: list[str] = []
        read = asked._kafka.read

        def count(kind: Any, group: str, *more: Any) -> Any:
            rounds.append(group)
            return read(kind, group, *more)

        with running(apps[1], "consumers") as leaves:
            both = (stays, leaves)
            wait_for(
                lambda: (
                    sorted(len(one._owners[0].ownership.owned) for one in both)
                    == [1, 1]
                ),
                timeout=30,
                what="each has a partition",
            )
            wait_for(
                lambda: asked.ask_handled(other.name, name, within=3600.0),
                timeout=PATIENCE,
                what="the first answer has come",
            )
            # The group has passed records that are there only later, when nobody asks.
            (high,) = [one for one in asked._answers if one.kind == "high"]
            ends = KnownOffsets(2, {0: 10, 1: 10}, time.monotonic())
            asked._answers[high] = ends
            asked._kafka.read = count
        keys = [key_of(partition, 2) for partition in range(2)]
        produce(bootstrap_servers, name, [(keys[0], 0), (keys[1], 1)])
        wait_for(
            lambda: (read_seen(0), read_seen(1)) == ([0], [1]),
            timeout=30,
            what="both are in",
        )
    assert not rounds


@pytest.mark.guarantee("K9")
@pytest.mark.parametrize("is_kept", [True, False], ids=["in-memory", "let-go"])
def test_an_offset_that_is_set_while_a_partition_waits_is_noticed(
    make,
    admin,
    bootstrap_servers,
    topic,
    group,
    seen,
    read_seen,
    request,
    wait_for,
    is_kept,
):
    if not is_kept:
        request.getfixturevalue("short")
    name, other = topic(1), group()
    app = make(gate_refresh=REFRESH)
    declare(app, name, seen, [(name, other.name)])
    produce(bootstrap_servers, name, [("k", n) for n in range(9)])
    other.commit(name, 5)
    with heard("offset.moved") as moved, running(app, "consumers") as service:
        wait_for(lambda: is_held(service, at=5), timeout=30, what="5 is held")
        if not is_kept:
            wait_for(lambda: is_let_go(service), timeout=30, what="it is let go")
        admin.execute("update jobs_lib.offsets set next_offset = 3")
        wait_for(
            lambda: read_seen() == [0, 1, 2, 3, 4, 3, 4], timeout=30, what="it is back"
        )
        wait_for(lambda: is_held(service, at=5), timeout=30, what="5 is held again")
        admin.execute("update jobs_lib.offsets set next_offset = 7")
        wait_for(lambda: is_held(service, at=7), timeout=30, what="7 is held")
        other.commit(name, 9)
        wait_for(
            lambda: read_seen()[-3:] == [4, 7, 8], timeout=30, what="the rest is in"
        )
    assert moved[0][1]["next_offset"] == 3


@pytest.mark.guarantee("K5")
def test_a_derived_record_waits_for_groups_on_the_common_topic(
    make, admin, bootstrap_servers, topic, group, seen, read_seen, wait_for
):
    first, derived, other = topic(1), topic(1), group()
    app = make(gate_refresh=REFRESH)
    declare(app, derived, seen, [(first, other.name)])
    produce(bootstrap_servers, first, [("k", n) for n in range(42)])
    other.commit(first, 41)
    other.commit(derived, 1_000)
    with running(app, "consumers") as service:
        places = [f"{first}/0/{offset}" for offset in (7, 40, 41)]
        derive(bootstrap_servers, derived, *places)
        wait_for(lambda: is_held(service, at=41), timeout=30, what="41 is held")
        assert read_seen() == [0, 1]
        other.commit(first, 42)
        wait_for(lambda: read_seen() == [0, 1, 2], timeout=30, what="all are in")


def test_a_record_that_names_no_place_stops_its_partition_or_is_skipped(
    make, admin, bootstrap_servers, topic, group, seen, read_seen, wait_for
):
    first, derived, other = topic(1), topic(1), group()
    app = make(gate_refresh=REFRESH)
    declare(app, derived, seen, [(first, other.name)])
    skips = make(gate_refresh=REFRESH)
    declare(
        *(skips, derived, seen, [(first, other.name)]),
        group=f"{derived}-skips",
        on_error="skip",
    )
    produce(bootstrap_servers, first, [("k", n) for n in range(10)])
    other.commit(first, 10)
    derive(bootstrap_servers, derived, f"{first}/0/1", None, f"{first}/0/1")
    with heard("record.failed") as failed, running(app, "consumers"):
        wait_for(lambda: len(failed) > 1, timeout=30, what="it is named")
        assert read_seen() == [0]
    assert {fields["offset"] for _, fields in failed} == {1}
    error = failed[0][1]["error"]
    assert f"{derived}/0 offset 1" in error
    assert f"{first}/<partition>/<offset>" in error
    with heard("record.skipped") as skipped, running(skips, "consumers"):
        wait_for(lambda: read_seen() == [0, 0, 2], timeout=30, what="others go on")
    assert [fields["offset"] for _, fields in skipped] == [1]


@pytest.mark.guarantee("FK12")
def test_records_that_wait_and_hold_bytes_that_are_no_text_are_named_and_others_go_on(
    make, admin, bootstrap_servers, topic, group, seen, read_seen, wait_for
):
    first, derived, other = topic(1), topic(1), group()
    app = make(gate_refresh=REFRESH)
    declare(app, derived, seen, [(first, other.name)], on_error="skip")
    produce(bootstrap_servers, first, [("k", n) for n in range(10)])
    other.commit(first, 10)
    place, odd = f"{first}/0/1".encode(), b"\xff\xfe"
    producer = make_producer(bootstrap_servers)
    for n, (key, value, header, more) in enumerate(
        [
            (b"k", b"0", place, b""),
            (b"k", b"1", odd, b""),
            (odd, b"2", place, b""),
            (b"k", odd, place, b""),
            (b"k", b"4", place, odd),
            (b"k", b"5", place + odd, b""),
            (b"k", b"6", place, b""),
        ]
    ):
        headers: Any = {"ce_derivedfrom": header, "more": more}
        producer.produce(derived, value, key, headers=headers)
        assert producer.flush(30) == 0, n
    with running(app, "consumers"):
        wait_for(lambda: read_seen() == [0, 4, 6], timeout=30, what="others go on")
    rows = admin.execute("select record_offset, error from jobs_lib.skipped")
    errors = dict(rows.fetchall())
    assert errors.keys() == {1, 2, 3, 5}
    assert all(f"{derived}/0 offset {at}" in errors[at] for at in errors)
    assert "its header ce_derivedfrom is something else" in errors[1]
    assert "its key is not UTF-8" in errors[2]


def test_topics_that_are_not_cut_alike_are_refused_at_the_start(make, topic, seen):
    name, first = topic(2), topic(3)
    app = make()
    declare(app, name, seen, [(first, "others")])
    says = (
        f"{name!r}, which has 2 partitions, .*{first!r}, which has 3.*the same number"
    )
    with pytest.raises(ConfigurationError, match=says):
        Service(app, ("consumers",)).start()


def test_consumers_that_wait_for_each_other_are_refused_at_the_start(make, topic, seen):
    name = topic(1)
    app = make()
    declare(app, name, seen, [(name, "b")], group="a")
    declare(app, name, seen, [(name, "c")], group="b")
    declare(app, name, seen, [(name, "b")], group="c")
    says = f"wait for each other for ever: 'b' on '{name}' for 'c' on '{name}' for 'b'"
    with pytest.raises(ConfigurationError, match=says):
        Service(app, ("consumers",)).start()


@pytest.mark.slow
@pytest.mark.guarantee("K14", "K15")
def test_waiting_for_longer_than_the_poll_interval_costs_no_rebalance(
    make, admin, bootstrap_servers, topic, group, seen, read_seen, short, wait_for
):
    name, other = topic(1), group()
    app = make(
        gate_refresh=REFRESH,
        session_timeout=6.0,
        kafka={"max.poll.interval.ms": "6000"},
    )
    declare(app, name, seen, [(name, other.name)])
    produce(bootstrap_servers, name, [("k", n) for n in range(3)])
    with (
        heard("origins.released", "origins.lost", "loop.failed") as lost,
        running(app, "consumers") as service,
    ):
        wait_for(lambda: is_held(service), timeout=30, what="it is held")
        until = time.monotonic() + 15
        wait_for(lambda: time.monotonic() > until, timeout=30, what="time goes by")
        assert not lost
        other.commit(name, 3)
        wait_for(lambda: read_seen() == [0, 1, 2], timeout=30, what="it goes on")
        assert not lost


@pytest.mark.slow
@pytest.mark.guarantee("K15")
def test_a_million_records_that_wait_need_no_more_memory_than_the_first(
    database_url, bootstrap_servers, topic, group, start_process, wait_for
):
    name, other = topic(4), group()
    other.commit(name, 0, 0, 0, 0)
    worker = start_process(
        *("gated", database_url),
        topic=name,
        after=other.name,
        kafka_bootstrap_servers=bootstrap_servers,
    )

    def fill(count: int) -> None:
        producer = make_producer(bootstrap_servers)
        for number in range(count):
            producer.produce(name, b"1" * 100, partition=number % 4)
            if not number % 10_000:
                producer.flush(30)
        assert producer.flush(30) == 0

    def read_rss() -> float:
        """The process's memory in MB."""
        text = Path(f"/proc/{worker.pid}/status").read_text(encoding="utf-8")
        found = re.search(r"VmRSS:\s+(\d+)", text)
        assert found is not None
        return int(found[1]) / 1024

    fill(200_000)
    wait_for(
        lambda: "gate.closed" in worker.output,
        timeout=60,
        what="the records are let go",
    )
    before = read_rss()
    fill(800_000)
    highest = 0.0
    until = time.monotonic() + 10
    while time.monotonic() < until:
        highest = max(highest, read_rss())
        linger(0.1)
    assert highest < before + 10
    assert not [line for line in worker.lines if line.startswith("handled")]


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("K4", "K18", "I29", "I30")
def test_a_consumer_that_waits_outlives_a_broker_that_is_killed_again_and_again(
    own_broker, database_url, start_process, wait_for
):
    name, other = own_broker.create(), Group(own_broker.bootstrap_servers)
    produce(own_broker.bootstrap_servers, name, [("k", n) for n in range(KILLS + 5)])
    worker = start_process(
        *("gated", database_url),
        topic=name,
        after=other.name,
        kafka_bootstrap_servers=own_broker.bootstrap_servers,
    )

    def read_handled() -> list[int]:
        lines = [line.split() for line in worker.lines]
        return [int(words[1]) for words in lines if words[:1] == ["handled"]]

    for kill in range(KILLS):
        other.commit_soon(name, {0: kill + 1})
        wait_for(
            lambda kill=kill: kill in read_handled() or not worker.running,
            timeout=90,
            what=lambda kill=kill: f"{kill} is handled\n{worker.output}",
        )
        failures = worker.lines.count("failed")
        with own_broker.down():
            wait_for(
                lambda failures=failures: (
                    worker.lines.count("failed") > failures or not worker.running
                ),
                timeout=90,
                what="the process has asked in vain",
            )
        assert worker.running, worker.output
        assert read_handled() == [*range(kill + 1)]
    other.commit_soon(name, {0: KILLS + 5})
    wait_for(
        lambda: read_handled() == [*range(KILLS + 5)], timeout=90, what="all are in"
    )
    other.close()
    topics = {
        one for one in own_broker.admin.list_topics(timeout=10).topics if name in one
    }
    assert topics == {name}
