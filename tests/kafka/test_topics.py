"""The topics of a service: created, counted once, and one of them the home."""

from __future__ import annotations

import sys
import threading
import types
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from jobs_lib.cli.main import cli
from jobs_lib.errors import ConfigurationError, TopicError, UnavailableError
from jobs_lib.operating import topics as topic_plan
from jobs_lib.operating.home_topic import declare_topic
from jobs_lib.operating.topics import Change, apply_topics, plan_topics
from tests.support.apps import make_app

if TYPE_CHECKING:
    from jobs_lib import Job

pytestmark = pytest.mark.expects("fenced")


@pytest.fixture
def app(database_url, bootstrap_servers):
    """An app with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)


def known(admin) -> dict[str, tuple[int, bool]]:
    rows = admin.execute("select topic, partitions, home from jobs_lib.topics")
    return {name: (count, home) for name, count, home in rows.fetchall()}


def test_pods_that_start_at_once_agree_on_the_home(app, admin, topic):
    name = topic(5)
    failures: list[BaseException] = []

    def declare() -> None:
        try:
            declare_topic(app, name, home=True)
        except BaseException as error:
            failures.append(error)

    pods = [threading.Thread(target=declare) for _ in range(4)]
    for pod in pods:
        pod.start()
    for pod in pods:
        pod.join()
    assert failures == []
    assert known(admin) == {"local": (16, False), name: (5, True)}


def test_the_home_does_not_move_while_jobs_wait(app, admin, topic, connect):
    @app.job()
    def work(job: Job) -> None: ...

    with connect() as connection:
        work.enqueue(connection)
    name = topic(5)
    with pytest.raises(TopicError, match="while jobs wait"):
        declare_topic(app, name, home=True)
    assert known(admin) == {"local": (16, True)}


def test_a_topic_that_kafka_does_not_have_is_named(app):
    with pytest.raises(TopicError, match=r"no topic 'nowhere'.*create it first"):
        declare_topic(app, "nowhere")


@pytest.mark.guarantee("W44", "W47", "W48")
def test_the_declared_topics_are_created_once(
    database_url, bootstrap_servers, kafka_admin, topic, wait_for
):
    name = topic(1) + "-more"
    app = make_app(
        database_url, home=f"{name}-work", kafka_bootstrap_servers=bootstrap_servers
    )
    app.topic(name, compacted=True, partitions=4)
    app.topic(f"{name}-events")
    app.topic(f"{name}-work")
    assert sorted(change.topic for change in apply_topics(app)) == [
        name,
        f"{name}-events",
        f"{name}-work",
    ]
    # A broker shows a new topic some time after it has made it.
    wait_for(lambda: plan_topics(app) == [], timeout=60, what="Kafka names them")
    assert apply_topics(app) == []
    for created, partitions in (
        (name, 4),
        (f"{name}-events", 3),
        (f"{name}-work", 100),
    ):
        found = kafka_admin.list_topics(created, timeout=10).topics[created]
        assert len(found.partitions) == partitions
        kafka_admin.delete_topics([created])[created].result()


@pytest.mark.guarantee("U4")
def test_a_broker_that_does_not_answer_is_named_with_the_way_out(database_url):
    app = make_app(database_url, kafka_bootstrap_servers="127.0.0.1:1")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1.*Is it running"):
        declare_topic(app, "orders")


@pytest.mark.guarantee("W47")
def test_a_plan_applies_all_differences_of_a_topic_except_its_partitions(
    app, topic, wait_for
):
    name = topic(2, config={"delete.retention.ms": "60000", "segment.ms": "70000"})
    declared = app.topic(
        name, compacted=True, entities=200_000, config={"segment.ms": "80000"}
    )
    assert declared.partitions == 8
    expected = {
        ("partitions", "2", "8", False),
        ("cleanup.policy", "delete", "compact", True),
        ("compression.type", "producer", "lz4", True),
        ("delete.retention.ms", "60000", "172800000", True),
        ("segment.ms", "70000", "80000", True),
    }
    planned = plan_topics(app)
    assert {(c.what, c.found, c.wanted, c.applies) for c in planned} == expected
    assert apply_topics(app) == planned
    # Keys would move, so the operator decides the number of partitions.
    wait_for(
        lambda: [change.what for change in plan_topics(app)] == ["partitions"],
        timeout=60,
        what="all else is as declared",
    )


@pytest.mark.guarantee("W47", "W48")
def test_a_plan_leaves_what_an_operator_has_set_instead_of_a_default(app, topic):
    week, day = "604800000", "86400000"
    keeps = {"cleanup.policy": "compact", "compression.type": "zstd"}
    longer, shorter, declared, stream = (
        topic(1, config=keeps | {"delete.retention.ms": kept})
        for kept in (week, day, week, week)
    )
    for name in (longer, shorter):
        app.topic(name, compacted=True, partitions=1)
    two_days = {"delete.retention.ms": "172800000", "compression.type": "lz4"}
    app.topic(declared, compacted=True, partitions=1, config=two_days)
    app.stream(stream, partitions=1)
    assert {(c.topic, c.what, c.found, c.wanted) for c in plan_topics(app)} == {
        (shorter, "delete.retention.ms", day, "172800000"),
        (declared, "delete.retention.ms", week, "172800000"),
        (declared, "compression.type", "zstd", "lz4"),
        (stream, "min.compaction.lag.ms", "0", "93600000"),
    }


@pytest.mark.guarantee("U4")
def test_the_command_fails_where_it_could_not_apply(app, topic, monkeypatch):
    name = topic(2)
    app.topic(name, partitions=5)
    module = types.ModuleType("topics_of_test")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "topics_of_test", module)
    for _ in range(2):
        done = CliRunner().invoke(cli, ["topics", "apply", "topics_of_test:app"])
        assert done.exit_code == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"not applied: the topic {name!r} has 2 partitions and")
        assert "with 5." in line
        assert "declare partitions=2, or add partitions in Kafka" in line
    app.topics.clear()
    app.topic(name, partitions=2)
    done = CliRunner().invoke(cli, ["topics", "apply", "topics_of_test:app"])
    assert (done.exit_code, done.stderr) == (0, "")


def test_apply_fails_when_a_topic_is_created_meanwhile(app, topic, monkeypatch):
    name = topic(2)
    app.topic(name)
    missing = Change(name, "exists", "no", "100 partitions", applies=True)
    monkeypatch.setattr(topic_plan, "plan_topics", lambda app: [missing])
    with pytest.raises(TopicError, match=f"{name}' was created by .*: run this again"):
        apply_topics(app)


@pytest.mark.guarantee("W44")
@pytest.mark.parametrize(
    ("entities", "partitions"),
    [(None, 3), (100_000, 3), (100_001, 8), (1_000_000, 8), (1_000_001, 16)],
)
def test_topics_get_partitions_by_the_number_of_entities(app, entities, partitions):
    for name, compacted in (("states", True), ("events", False)):
        declared = app.topic(name, compacted=compacted, entities=entities)
        assert declared.partitions == partitions


@pytest.mark.guarantee("W47")
def test_tombstones_are_kept_for_two_days_at_least(app):
    with pytest.raises(ConfigurationError, match="two days"):
        app.topic("states", compacted=True, config={"delete.retention.ms": "1000"})
