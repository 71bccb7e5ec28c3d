"""The commands that show read models, and let their topics be read again."""

from __future__ import annotations

import json
import sys
import types

import pytest
from click.testing import CliRunner
from confluent_kafka import TopicPartition

from jobs_lib.cli.main import cli
from jobs_lib.settings import default_settings
from tests.support.apps import running
from tests.support.records import produce

pytestmark = pytest.mark.expects("origins.lost", "fenced")
APP = "service_of_commands:app"
MODEL = "replay {app} {topic} --group {topic}-model"


@pytest.fixture
def name(topic, bootstrap_servers):
    """A topic of one partition with ten keys."""
    name = topic(1)
    produce(bootstrap_servers, name, [(f"k{n}", {"n": n}) for n in range(10)])
    return name


@pytest.fixture
def app(make, admin, name, monkeypatch):
    """An app with a read model and a handler, which commands can load."""
    app = make(heartbeat_interval=0.5, stale_after=5.0)
    admin.execute("create table model (id text primary key, version bigint, n int)")

    @app.read_model(name, table="model", key="id", group=f"{name}-model")
    def row(record):
        return {"n": record.value["n"]}

    @app.consumer(name, group=f"{name}-handler")
    def handle(record, conn) -> None: ...

    module = types.ModuleType("service_of_commands")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "service_of_commands", module)
    return app


def call(*words: str):
    """Call the command; returns its result."""
    return CliRunner().invoke(cli, ["readmodel", *words])


@pytest.mark.guarantee("W61")
def test_a_topic_is_read_again_from_its_start_a_time_or_an_offset(
    app, name, admin, wait_for
):
    group = ("--group", f"{name}-model")

    def is_right() -> bool:
        rows = admin.execute("select id, n from model order by id").fetchall()
        return rows == [(f"k{n}", n) for n in range(10)]

    def left() -> list[int]:
        rows = json.loads(call("status", APP, "--json").output)
        return [row["left"] for row in rows if row["table"] == "model"]

    with running(app, "consumers"):
        wait_for(is_right, timeout=60, what="the model is filled")
        wait_for(lambda: left() == [0], timeout=30, what="nothing is left")
        nothing = call("replay", APP, name, *group)
        assert (nothing.exit_code, "nothing to apply again" in nothing.output) == (
            0,
            True,
        )
        for place, first in [
            (("--from-start",), 0),
            (("--from-time", "2020-01-01"), 0),
            (("--partition", "0", "--from-offset", "7"), 7),
        ]:
            result = call("replay", APP, name, *group, *place, "--json")
            assert result.exit_code == 0, result.output
            (rewound,) = json.loads(result.output)
            assert (rewound["before"], rewound["after"]) == (10, first)
            wait_for(lambda: left() == [0], timeout=30, what="all is applied again")
        admin.execute("delete from model where id = 'k3'")
        result = call("resync", APP, "model")
        assert result.exit_code == 0, result.output
        assert "model was read again to the end; 0 keys removed" in result.output
        assert is_right()
        admin.execute("update model set n = -1")
        part = ("--partition", "0", "--from-offset", "7")
        result = call("resync", APP, "model", *part)
        assert result.exit_code == 0, result.output
        rows = admin.execute("select id from model where n >= 0").fetchall()
        assert sorted(rows) == [("k7",), ("k8",), ("k9",)]


@pytest.mark.guarantee("W71")
def test_a_replay_names_skipped_records_that_are_gone(
    app, name, admin, kafka_admin, wait_for
):
    group = f"{name}-model"

    def is_done() -> bool:
        rows = admin.execute(
            "select next_offset from jobs_lib.offsets where consumer_group = %s",
            (group,),
        )
        return rows.fetchall() == [(10,)]

    with running(app, "consumers"):
        wait_for(is_done, timeout=60, what="the model is filled")
    for offset in (3, 7):
        admin.execute(
            "insert into jobs_lib.skipped"
            " (consumer_group, topic, partition, record_offset, error)"
            " values (%s, %s, 0, %s, 'none')",
            (group, name, offset),
        )
    for deleted in kafka_admin.delete_records([TopicPartition(name, 0, 6)]).values():
        deleted.result()
    result = call("replay", APP, name, "--group", group, "--json")
    assert result.exit_code == 0, result.output
    (rewound,) = json.loads(result.stdout)
    assert [rewound[one] for one in ("before", "after", "skipped", "gone")] == [
        10,
        6,
        1,
        1,
    ]
    assert f"{name}/0: skipped records that are gone" in result.stderr
    assert "a cut log: 1." in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("replay {app} other", "no consumer of this app reads 'other'"),
        ("replay {app} {topic}", "several groups of this app read"),
        ("replay {app} {topic} --group {topic}-handler", "declare repeatable=True"),
        (f"{MODEL} --from-offset 3", "--partition"),
        (
            f"{MODEL} --from-offset 3 --partition 4",
            "has the partitions 0 to 0",
        ),
        (
            f"{MODEL} --from-start --from-time 2020-01-01",
            "give one",
        ),
        (
            f"{MODEL} --from-offset 3 --partition 0",
            "has read nothing",
        ),
        ("resync {app} other", "its tables are: model"),
        ("resync {app} model --from-offset 3", "--partition"),
        (
            "resync {app} model --partition 0 --from-offset 10",
            "its next one gets the offset 10",
        ),
        (
            "resync {app} model --partition 0 --from-offset 1 --from-time 2020-01-01",
            "give one",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(app, name, words, told):
    result = call(*words.format(app=APP, topic=name).split())
    assert result.exit_code != 0
    assert told in f"{result.output}{result.exception}"


@pytest.mark.guarantee("W3")
def test_a_read_model_is_verified_against_its_source_or_a_file_of_it(
    app, admin, database_url, tmp_path, monkeypatch
):
    admin.execute("create table items (id text primary key, version bigint)")
    for table in ("items", "model"):
        admin.execute(
            f"insert into {table} (id, version) select 'k' || n, n"
            " from generate_series(1, 50) n"
        )
    monkeypatch.setenv("SOURCE_DATABASE_URL", database_url)
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    default_settings.cache_clear()
    columns = ("--table", "items", "--key", "id")
    assert call("verify", APP, "model", *columns).exit_code == 0
    file = str(tmp_path / "keys.gz")
    assert f"50 keys are in {file}" in call("keys", file, *columns).output
    monkeypatch.setattr("jobs_lib.operating.verification.time.sleep", lambda _: None)
    monkeypatch.delenv("SOURCE_DATABASE_URL")
    admin.execute("update model set version = 3 where id = 'k7'")
    result = call("verify", APP, "model", "--file", file, "--json")
    assert result.exit_code == 1
    wanted = {"key": "k7", "source": 7, "model": 3, "what": "older"}
    assert json.loads(result.output) == [wanted]
    neither = call("verify", APP, "model", *columns)
    told = "its database's URL in SOURCE_DATABASE_URL, with --table and --key"
    assert told in str(neither.exception)
