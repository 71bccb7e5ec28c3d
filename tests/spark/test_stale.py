"""Spark finds the keys that a topic has and the entity's table has not."""

from __future__ import annotations

import pytest

from jobs_lib import App
from jobs_lib.errors import ReexportError
from jobs_lib.settings import load_settings
from spark_bridge import repairs, workers
from spark_bridge.loader import Target
from spark_bridge.repairs import SparkFinder, find_stale, start_stale
from spark_bridge.topic import TopicPart
from tests.reexport.helpers import make_entity, make_table, query
from tests.support.records import produce
from tests.support.shop import COMPACTED


@pytest.fixture
def states(database, bootstrap_servers, topic):
    """An entity whose topic is there."""
    settings = load_settings(
        database_url=database.url, kafka_bootstrap_servers=bootstrap_servers
    )
    app = App("test", settings=settings)
    declared = app.topic(topic(3, config=COMPACTED), compacted=True)
    entity = make_entity()
    return type(entity)("aircraft", declared, "aircraft", "tail", entity.load)


def find(database, settings, states):
    with SparkFinder().find(database, settings, states) as stale:
        return stale.count, stale.unreadable, sorted(stale.keys)


@pytest.mark.guarantee("X10", "W26")
def test_keys_that_only_the_topic_has_are_found(
    spark, database, bootstrap_servers, states
):
    settings = load_settings(kafka_bootstrap_servers=bootstrap_servers)
    make_table(database, [f"N{n}" for n in range(50)])
    name = states.topic.name
    produce(
        bootstrap_servers,
        name,
        [(f"N{n}", {}) for n in range(80)],
        headers={"ce_version": "3"},
    )
    produce(bootstrap_servers, name, [("N79", None), ("ключ", {})])
    produce(bootstrap_servers, name, [("nul\0", {}), ("", {}), ("b" * 1_001, {})])
    expected = [(f"N{n}", 3) for n in range(50, 79)] + [("ключ", None)]
    assert find(database, settings, states) == (30, 3, sorted(expected))
    begun = start_stale(database, settings, states, rate=60, chunk=10)
    assert (begun.total, begun.stale, begun.state) == (30, True, "running")
    payloads = query(database, "select type, payload from jobs_lib.jobs")
    assert {one for one, _ in payloads} == {"jobs_lib.reexport.stale"}
    assert all(len(p["keys"]) == len(p["versions"]) <= 10 for _, p in payloads)
    loaded: dict[str, int | None] = {}
    for _, one in payloads:
        loaded |= dict(zip(one["keys"], one["versions"], strict=True))
    assert loaded == {key: version and version + 1 for key, version in expected}


@pytest.mark.guarantee("X10")
def test_the_keys_of_a_table_are_never_all_in_one_process(
    spark, database, bootstrap_servers, states
):
    settings = load_settings(kafka_bootstrap_servers=bootstrap_servers)
    make_table(database, ["N1"])
    produce(bootstrap_servers, states.topic.name, [("N1", {}), ("N2", {})])
    part = TopicPart.of(settings, states.topic.name)
    stale = find_stale(spark, Target.of(database), states, part)
    assert [row["key"] for row in stale.collect()] == ["N2"]
    # Spark knows how many ranges there are, and takes them for as few keys.
    plan = stale._jdf.queryExecution().executedPlan().toString()
    assert "SortMergeJoin" in plan
    assert "Broadcast" not in plan


def test_a_comparison_ends_in_one_line_when_spark_does_not_go_on(
    spark, database, bootstrap_servers, states, monkeypatch, tmp_path
):
    settings = load_settings(kafka_bootstrap_servers=bootstrap_servers)
    mode = tmp_path / "mode"
    monkeypatch.setattr(repairs, "find_stale", lambda *_: make_found(spark, str(mode)))
    monkeypatch.setattr(workers, "count_executors", lambda _: 0)
    monkeypatch.setattr(workers, "_LOOK_EVERY", 0.05)
    mode.write_text("fail")
    with pytest.raises(ReexportError, match=r"a task of Spark failed.*: odd") as told:
        find(database, settings, states)
    assert "\n" not in str(told.value)
    mode.write_text("")
    with SparkFinder().find(database, settings, states) as stale:
        assert stale.count == 1
        # As with the executors that have counted, what they kept is gone.
        spark.catalog.clearCache()
        mode.write_text("wait")
        monkeypatch.setattr(workers, "PATIENCE", 0.2)
        with pytest.raises(ReexportError, match=r"no executor for 0\.2 s"):
            list(stale.keys)
    with pytest.raises(ReexportError, match=r"no executor for 0\.2 s"):
        find(database, settings, states)


def make_found(spark, mode):
    """One stale key, which a task gives at once, late or never, as a file says."""
    columns = "key string, highest long, records long"

    def give(batches):
        import pathlib
        import time

        yield from batches
        told = pathlib.Path(mode).read_text()
        if told == "wait":
            time.sleep(2)
        if told == "fail":
            raise RuntimeError("odd")

    return spark.createDataFrame([("N1", 3, 1)], columns).mapInArrow(give, columns)
