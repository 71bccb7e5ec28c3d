"""Each command that starts Spark gives it what its options say, and checks it first."""

from __future__ import annotations

import inspect

import pytest

import jobs_lib.cli.repairs  # noqa: F401 - adds its commands to the group
from jobs_lib.cli.reexport import reexport
from jobs_lib.devstack.ports import free_port
from jobs_lib.errors import ReexportError
from spark_bridge import engine, repairs
from tests.support.apps import count
from tests.support.commands import make_runner
from tests.support.records import produce, read_topic
from tests.support.shop import COMPACTED, Item, Shop

COMMANDS = ["start items", "start items --topic {goal}", "stale items"]
COMMANDS += ["stale items --dry-run", "rebuild items --yes"]


class Begun(Exception):
    """Spark would be started now."""


@pytest.fixture
def shop(admin, database_url, bootstrap_servers, topic):
    shop = Shop(admin, database_url, bootstrap_servers, topic(1, config=COMPACTED))
    shop.fill(1, 2)
    return shop


@pytest.fixture
def goal(shop, topic):
    """The name of a declared topic that is empty."""
    name = topic(1, config=COMPACTED)
    shop.app.topic(name, value=Item, compacted=True)
    return name


@pytest.fixture
def run(shop, goal, monkeypatch):
    """A function that runs a command about re-exports, in its words."""
    runner = make_runner(reexport, shop.app, monkeypatch)

    def run(command: str) -> str:
        given = f"{command} --rate 60".format(goal=goal)
        return runner(*given.split())

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_options_say_arrives_where_spark_is_started(command, run, monkeypatch):
    signature = inspect.signature(engine.SparkEngine)
    told = {}

    def begin(*args, **given):
        bound = signature.bind(*args, **given)
        bound.apply_defaults()
        told.update(bound.arguments)
        raise Begun

    for module in (engine, repairs):
        monkeypatch.setattr(module, "SparkEngine", begin)
    options = "--master local[1] --conf spark.a=b --conf spark.c=d=e --packed p.tar.gz"
    keeps = "stale" not in command
    with pytest.raises(Begun):
        run(f"{command} {options}" + " --keep 7" * keeps)
    assert told == {
        "master": "local[1]",
        "conf": {"spark.a": "b", "spark.c": "d=e"},
        "packed": "p.tar.gz",
        "keep": 7 if keeps else engine.KEEP,
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_a_spark_that_cannot_be_is_refused_before_anything_is_done(
    command, run, shop, admin, monkeypatch
):
    # A command runs in a process of its own; other tests may have a session in this.
    monkeypatch.setattr(engine, "find_session", lambda: None)
    produce(shop.servers, shop.topic.name, [("1", {}), ("9", {})])
    nobody = f"spark://127.0.0.1:{free_port()}"
    for options, told in (
        (f"--master {nobody}", nobody),
        ("--packed /nowhere/p.tar.gz", "there is no file /nowhere/p.tar.gz"),
        ("--conf spark.x.password=y", "has a secret"),
        ("--conf nothing", "is spark.NAME=VALUE"),
        ("--engine sql --conf spark.a=b", "starts no Spark"),
        ("--engine sql --packed p.tar.gz", "starts no Spark"),
        ("--engine sql --master local", "starts no Spark"),
    ):
        with pytest.raises(ReexportError, match=told):
            run(f"{command} {options}")
    assert len(read_topic(shop.servers, shop.topic.name)) == 2
    for table in ("jobs", "reexports", "rebuilds", "topic_copies"):
        assert count(admin, table) == 0, table
