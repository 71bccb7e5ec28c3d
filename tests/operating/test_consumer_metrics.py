"""Metrics of consumers: how far they are, what they skip, and where they stop."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from confluent_kafka import Producer

from jobs_lib.devstack.ports import free_port
from jobs_lib.operating import check, depths
from jobs_lib.operating.depths import Blocked, Consumed, read_consumed
from jobs_lib.service import metrics
from jobs_lib.service.metrics import describe_consumed, describe_consumers
from jobs_lib.settings import load_settings
from tests.operating.test_metrics import read, scrape
from tests.support.apps import make_app, running
from tests.support.records import make_producer

if TYPE_CHECKING:
    from collections.abc import Callable

    Look = Callable[[str], dict[tuple[str, ...], float]]

SKIP = (
    "insert into jobs_lib.skipped (consumer_group, topic, partition, record_offset,"
    " error) select %s, %s, 0, n, 'e' from generate_series(1, %s) n"
)
STAND_STILL = (
    "insert into jobs_lib.offsets (consumer_group, topic, partition, next_offset,"
    " failed_offset, failing_since) select %s, %s, n, 5, 5,"
    " now() - make_interval(secs => 1000 - n) from generate_series(0, %s) n"
)


@pytest.fixture
def port(monkeypatch) -> int:
    """The port of a service, which reads its database anew for each scrape."""
    reader = metrics._Reader

    def hurry(database, groups, pause, **more):
        return reader(database, groups, 0.05, **more)

    monkeypatch.setattr(metrics, "_Reader", hurry)
    return free_port()


@pytest.fixture
def look(port) -> Look:
    """A function that scrapes a metric of consumers, by the values of its labels."""
    return lambda name: read(scrape(port), f"jobs_lib_consumer_{name}")


@pytest.fixture
def make(database_url, bootstrap_servers, port):
    """A function that makes an app with Kafka and metrics."""
    return lambda: make_app(
        database_url, probes_port=port, kafka_bootstrap_servers=bootstrap_servers
    )


def test_the_lag_is_that_of_partitions_that_stand_still_and_then_none(
    make, topic, bootstrap_servers, look, wait_for, gate
):
    name = topic(3)
    app, group = make(), f"{name}-g"

    @app.consumer(name, group=group)
    def handle(record, connection) -> None:
        if record.partition < 2 and record.offset == 4 and not gate.is_set():
            raise LookupError("not yet")

    producer = make_producer(bootstrap_servers)
    for partition, count in enumerate([10, 30, 5]):
        for n in range(count):
            producer.produce(name, str(n), partition=partition)
    assert producer.flush(30) == 0
    of = (group, name)
    with running(app, "consumers"):
        wait_for(
            lambda: look("lag") == {of: 6 + 26} and look("lag_highest") == {of: 26},
            timeout=60,
            what="two are behind",
        )
        gate.set()
        wait_for(lambda: look("lag").get(of) == 0, timeout=60, what="all are read")
        assert look("lag_highest") == {of: 0}
        assert look("apply_seconds")[of] > 0
        assert list(look("apply_seconds")) == [of]


def test_the_markers_of_transactions_are_no_lag(
    make, topic, bootstrap_servers, admin, look, wait_for
):
    name = topic(2)
    app, group = make(), f"{name}-g"

    @app.consumer(name, group=group)
    def handle(record, connection) -> None: ...

    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "transactional.id": f"lag-{uuid4().hex[:8]}",
        }
    )
    producer.init_transactions(60)
    producer.begin_transaction()
    for n in range(5):
        producer.produce(name, str(n), partition=0)
    producer.commit_transaction(60)
    with running(app, "consumers") as service:
        wait_for(
            lambda: look("lag") == {(group, name): 0}, timeout=60, what="none is left"
        )
        stored = "select next_offset from jobs_lib.offsets where partition = 0"
        wait_for(
            lambda: admin.execute(stored).fetchone() == (5,),
            timeout=60,
            what="all are stored",
        )
        producer.begin_transaction()
        producer.produce(name, "6", partition=0)
        assert producer.flush(30) == 0
        producer.abort_transaction(60)
        positions = service.positions
        assert positions is not None

        def find_ends() -> dict[int, int]:
            found = positions.ask_ends(name)
            return {} if found is None else dict(found.offsets)

        wait_for(
            lambda: find_ends() == {0: 8, 1: 0}, timeout=60, what="its end is known"
        )
        wait_for(lambda: look("lag") == {(group, name): 0}, timeout=60, what="none")


@pytest.mark.guarantee("O3")
def test_ages_skips_and_partitions_that_stand_still_are_those_of_the_database(
    make, topic, bootstrap_servers, admin, look, wait_for
):
    name = topic(2)
    app, group = make(), f"{name}-g"

    @app.consumer(name, group=group)
    def handle(record, connection) -> None: ...

    of = (group, name)
    admin.execute(SKIP, (group, name, 3))
    admin.execute(SKIP, ("another", name, 5))
    admin.execute(STAND_STILL, ("another", name, 1))
    with running(app, "consumers"):
        wait_for(lambda: look("skipped_records") == {of: 3}, timeout=60, what="skipped")
        wait_for(
            lambda: look("blocked_partitions") == {of: 0},
            timeout=60,
            what="none stands still",
        )
        assert look("blocked_offset") == look("blocked_seconds") == {}
        assert look("applied_age_seconds") == {}
        producer = make_producer(bootstrap_servers)
        for partition in range(2):
            producer.produce(name, "1", partition=partition)
        assert producer.flush(30) == 0
        stored = "select from jobs_lib.offsets where consumer_group = %s"
        wait_for(
            lambda: (
                admin.execute(f"{stored} and next_offset = 1", (group,)).rowcount == 2
            ),
            timeout=60,
            what="both are applied",
        )
        wait_for(lambda: look("applied_age_seconds"), timeout=60, what="applied")
        assert 0 <= look("applied_age_seconds")[of] < 60
        admin.execute(
            "update jobs_lib.offsets set failed_offset = 7, failing_since = now()"
            " - interval '5 minutes', appended_at = now() - interval '1 hour'"
            " where partition = 1 and consumer_group = %s",
            (group,),
        )
        wait_for(
            lambda: look("blocked_partitions") == {of: 1},
            timeout=60,
            what="it stands still",
        )
        # Labels are read in the order of their names.
        assert look("blocked_offset") == {(group, "1", name): 7}
        assert 300 <= look("blocked_seconds")[group, "1", name] < 400
        assert look("applied_age_seconds")[of] < 120


def test_figures_are_those_of_the_groups_that_are_asked_for(database, admin):
    admin.execute(SKIP, ("g", "t", 3))
    admin.execute(SKIP, ("h", "t", 4))
    admin.execute(STAND_STILL, ("g", "t", 149))
    admin.execute(STAND_STILL, ("h", "t", 0))
    admin.execute(
        "insert into jobs_lib.offsets (consumer_group, topic, partition, appended_at)"
        " values ('g', 'u', 0, now() - interval '1 minute'),"
        " ('g', 'u', 1, now() - interval '1 hour'),"
        " ('g', 'future', 0, now() + interval '1 hour')"
    )
    found = read_consumed(database, ["g"])
    assert found.skipped == {("g", "t"): 3, ("g", "u"): 0, ("g", "future"): 0}
    assert found.blocked == {("g", "t"): 150, ("g", "u"): 0, ("g", "future"): 0}
    assert 60 <= found.ages.pop(("g", "u")) < 160
    assert found.ages == {("g", "future"): 0}
    # More would be too many labels: those are left out that have just stopped.
    assert [one.partition for one in found.partitions] == [*range(100)]
    first = found.partitions[0]
    assert first.seconds is not None
    assert 1000 <= first.seconds < 1100
    assert (first.group, first.topic, first.offset) == ("g", "t", 5)
    # Somebody passes the record over, and no other one follows.
    admin.execute(
        "update jobs_lib.offsets set next_offset = 6 where consumer_group = 'g'"
        " and topic = 't'"
    )
    found = read_consumed(database, ["g"])
    assert found.blocked["g", "t"] == 0
    assert found.partitions == []


def test_partitions_that_a_topic_made_anew_does_not_have_are_left_out(database, admin):
    # It had three partitions, and is made anew with one.
    old, new = uuid4(), uuid4()

    def count_stopped() -> int:
        found = check(database, load_settings())
        return sum(
            one.check == "stopped partitions" and one.level != "ok" for one in found
        )

    admin.execute(STAND_STILL, ("g", "t", 2))
    admin.execute("update jobs_lib.offsets set failure = 'LookupError: price'")
    admin.execute("update jobs_lib.offsets set topic_id = %s", (old,))
    assert read_consumed(database, ["g"]).blocked == {("g", "t"): 3}
    assert count_stopped() == 3
    admin.execute(
        "update jobs_lib.offsets set topic_id = %s where partition = 0", (new,)
    )
    found = read_consumed(database, ["g"])
    assert found.blocked == {("g", "t"): 1}
    assert [one.partition for one in found.partitions] == [0]
    assert count_stopped() == 1


def test_very_many_skipped_records_are_estimated_by_a_sample(
    database, admin, monkeypatch
):
    rows = 50_000
    admin.execute(SKIP, ("g", "t", rows))
    (pages,) = admin.execute(
        "select pg_relation_size('jobs_lib.skipped') / 8192"
    ).fetchone()
    monkeypatch.setattr(depths, "_PAGES", pages // 5)
    found = read_consumed(database, ["g"])
    assert 0.6 * rows < found.skipped["g", "t"] < 1.4 * rows


def test_without_groups_nothing_is_read():
    class NoDatabase:
        pass

    assert read_consumed(NoDatabase(), []) == Consumed()  # type: ignore[arg-type]


def test_what_is_not_known_has_no_samples():
    unknown = [*describe_consumers([], None), *describe_consumed(None)]
    assert not [sample for family in unknown for sample in family.samples]
    since_unknown = Consumed(partitions=[Blocked("g", "t", 1, 7, None)])
    found = {family.name: family.samples for family in describe_consumed(since_unknown)}
    assert not found["jobs_lib_consumer_blocked_seconds"]
    (sample,) = found["jobs_lib_consumer_blocked_offset"]
    assert sample.value == 7
