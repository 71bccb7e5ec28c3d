"""A master that cannot be used is named before anything is begun."""

from __future__ import annotations

import contextlib
import re
import socket

import pytest

from jobs_lib.app import App
from jobs_lib.cli import reexport as module
from jobs_lib.cli.reexport import reexport
from jobs_lib.devstack.ports import free_port
from jobs_lib.errors import ReexportError
from jobs_lib.settings import Settings
from spark_bridge import engine, start
from spark_bridge.master import (
    check_answers,
    check_kafka,
    check_password,
    count_tasks,
    is_encrypted,
    is_here,
    read_defaults,
)
from tests.reexport.helpers import loaded_keys, make_entity, make_table, query
from tests.spark.fleet import Fleet
from tests.support.commands import make_runner

FAR = "spark://192.0.2.77:7077"
"""An address that leads nowhere, and is not this machine's."""
SECRET = "postgresql://keeper:canary-pass@db.example/orders"


@pytest.fixture
def alone(monkeypatch):
    """No session of another test, and no settings of this machine."""
    monkeypatch.setattr(engine, "find_session", lambda: None)
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    monkeypatch.delenv("SPARK_HOME", raising=False)


@pytest.fixture
def begun(database):
    """A function that tells which re-exports have begun."""
    make_table(database, ["a"])
    return lambda: query(database, "select entity from jobs_lib.reexports")


@pytest.mark.parametrize(
    ("where", "here"),
    [
        *(("local", True), ("local[4,2]", True), ("local-cluster[2,1,512]", True)),
        *(("spark://127.0.0.1:7077", True), ("spark://localhost:7077", True)),
        *(("spark://[::1]:7077", True), ("spark://127.0.0.1:1,localhost:2", True)),
        *((FAR, False), ("spark://127.0.0.1:1,10.0.0.1:2", False)),
        *(("spark://127.0.0.1:1,far", False), ("spark://127.0.0.1:1,far:0", False)),
        *(("spark://localhost.example:7077", False), ("spark://", False)),
        *(("k8s://https://127.0.0.1:6443", False), ("yarn", False), ("", False)),
    ],
)
def test_only_a_loopback_master_is_on_this_machine(where, here):
    assert is_here(where) is here


@pytest.mark.guarantee("X15", "FS13")
@pytest.mark.parametrize(
    "url",
    [
        SECRET,
        "postgresql://db.example/orders?user=keeper&password=canary-pass",
        "host=db.example user=keeper password=canary-pass",
        "postgresql://keeper@db.example/orders?sslpassword=canary-pass",
    ],
)
@pytest.mark.parametrize("where", [FAR, "k8s://https://10.0.0.1:6443", "yarn"])
def test_a_password_does_not_cross_a_network_in_the_open(url, where):
    with pytest.raises(ReexportError) as refused:
        check_password(where, url, {})
    text = str(refused.value)
    assert "service=NAME" in text
    assert "spark.network.crypto.enabled" in text
    assert "canary-pass" not in text


@pytest.mark.guarantee("X15", "FS13")
def test_a_secret_of_kafka_does_not_cross_a_network_in_the_open():
    given = {"sasl.username": "keeper", "sasl.password": "canary-pass"}
    with pytest.raises(ReexportError) as refused:
        check_kafka(FAR, given, {})
    assert "spark.network.crypto.enabled" in str(refused.value)
    assert "canary-pass" not in str(refused.value)
    encrypted = {"spark.ssl.rpc.enabled": "true"}
    for allowed in ((FAR, given, encrypted), ("local[2]", given, {})):
        check_kafka(*allowed)
    check_kafka(FAR, {"ssl.key.location": "/run/kafka/key.pem"}, {})


@pytest.mark.parametrize(
    ("where", "url", "settings"),
    [
        ("local[2]", SECRET, {}),
        ("spark://127.0.0.1:7077", SECRET, {}),
        (FAR, "postgresql://?service=orders", {}),
        (FAR, "postgresql://keeper@db.example/o?passfile=/run/pg/pass", {}),
        (
            FAR,
            SECRET,
            {"spark.authenticate": "true", "spark.network.crypto.enabled": "TRUE"},
        ),
        (FAR, SECRET, {"spark.ssl.rpc.enabled": "true"}),
    ],
)
def test_what_nobody_can_read_on_the_way_is_allowed(where, url, settings):
    check_password(where, url, settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"spark.network.crypto.enabled": "true"},
        {"spark.authenticate": "true"},
        {"spark.authenticate": "true", "spark.network.crypto.enabled": "false"},
        {"spark.ssl.enabled": "true"},
        {"spark.io.encryption.enabled": "true"},
    ],
)
def test_half_an_encryption_is_none(settings):
    assert not is_encrypted(settings)


def test_the_settings_of_spark_defaults_are_read_as_spark_reads_them(
    tmp_path, monkeypatch
):
    (tmp_path / "spark-defaults.conf").write_text(
        "# spark.authenticate false\n"
        "spark.authenticate   true\n"
        "  spark.network.crypto.enabled=true  \n"
        "spark.executor.extraJavaOptions -Da=b -Dc=d\n\n"
    )
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    found = read_defaults()
    assert is_encrypted(found)
    assert found["spark.executor.extraJavaOptions"] == "-Da=b -Dc=d"
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "none"))
    assert read_defaults() == {}


@pytest.mark.guarantee("X15", "FS13")
def test_a_start_with_a_password_over_a_network_is_refused_at_once(
    database, begun, alone
):
    with pytest.raises(ReexportError, match="unencrypted"):
        start(database, make_entity(), rate=60, master=FAR)
    # The settings that the session will have decide: here it would encrypt.
    settings = {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}
    far = f"spark://127.0.0.2:{free_port()},nowhere.invalid:1"
    with pytest.raises(ReexportError, match="does not answer"):
        start(database, make_entity(), rate=60, master=far, conf=settings)
    assert begun() == []


def test_a_given_session_is_asked_for_its_own_master_and_settings(
    database, monkeypatch
):
    class Conf:
        getAll = {"spark.master": FAR}

    class Session:
        conf = Conf()

    monkeypatch.setattr(engine, "find_session", Session)
    with pytest.raises(ReexportError, match=rf"{re.escape(FAR)} unencrypted"):
        start(database, make_entity(), rate=60)
    monkeypatch.setattr(Conf, "getAll", {"spark.master": "local[2]"})
    engine.SparkEngine().check(database)
    engine.SparkEngine("local[2]").check(database)
    with pytest.raises(
        ReexportError, match=r"session on 'local\[2\]' already"
    ) as other:
        start(database, make_entity(), rate=60, master="local[4]")
    assert "the master 'local[4]' would not be used: leave it out" in str(other.value)
    late = engine.SparkEngine(conf={"spark.archives": "x"})
    with pytest.raises(ReexportError, match=r"too late for .*spark\.archives"):
        late.check(database)
    # A session that has them, as one that another call has opened, is as asked.
    has = {"spark.master": "local[2]", "spark.archives": "x"}
    monkeypatch.setattr(Conf, "getAll", has)
    late.check(database)


def test_a_master_that_does_not_answer_is_named(database, begun, alone):
    closed = f"spark://127.0.0.1:{free_port()}"
    with pytest.raises(ReexportError, match=f"{closed} does not answer: .*refused"):
        start(database, make_entity(), rate=60, master=closed)
    with socket.socket() as silent, contextlib.ExitStack() as waiting:
        # Nobody takes connections from its queue, which is full.
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(3):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        with pytest.raises(ReexportError, match="does not answer: timed out"):
            check_answers(f"spark://127.0.0.1:{silent.getsockname()[1]}", 0.2)
    for odd in ("", "host", "host:seven", "a:1:2"):
        with pytest.raises(ReexportError, match=f"{odd!r} names no master"):
            start(database, make_entity(), rate=60, master=f"spark://{odd}")
        # One that answers may not lead, and the other one is a typing error.
        with pytest.raises(ReexportError, match=f"{odd!r} names no master"):
            start(database, make_entity(), rate=60, master=f"{closed},{odd}")
    assert begun() == []


@pytest.mark.parametrize("more", [65_536, -65_536])
def test_a_port_that_cannot_be_is_no_other_one(more):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        check_answers(f"spark://127.0.0.1:{port}")
        with pytest.raises(ReexportError, match="names no master"):
            check_answers(f"spark://127.0.0.1:{port + more}")
    with pytest.raises(ReexportError, match="names no master"):
        check_answers("spark://127.0.0.1:0")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_port_that_is_no_master_of_this_release_is_named(
    database, run_process, tmp_path
):
    # It takes connections and says nothing, as a master does that knows no message.
    fleet = Fleet(database, run_process, tmp_path)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        master = f"spark://127.0.0.1:{silent.getsockname()[1]}"
        worker = fleet.start(master)
        assert worker.wait(timeout=600) == 2, worker.output
    assert f"Spark did not start on '{master}'" in worker.errors[-1]
    assert "is its release that of the installed pyspark?" in worker.errors[-1]
    assert loaded_keys(database) == []


def test_one_of_several_masters_is_enough():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        check_answers(f"spark://127.0.0.1:{free_port()},127.0.0.1:{port}")
    # How the masters of other clusters are reached, Spark alone knows.
    check_answers("k8s://https://nowhere.invalid")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("executor.memory=1g", "spark.NAME=VALUE"),
        ("spark.executor.memory", "spark.NAME=VALUE"),
        ("spark.authenticate.secret=canary-pass", "spark-defaults.conf"),
        ("spark.ssl.rpc.keyStorePassword=canary-pass", "spark-defaults.conf"),
        ("spark.hadoop.fs.s3a.secret.key=canary-pass", "spark-defaults.conf"),
        ("spark.executorEnv.PGPASSWORD=canary-pass", "spark-defaults.conf"),
        (f"spark.executorEnv.URL={SECRET}", "spark-defaults.conf"),
    ],
)
def test_a_setting_that_is_none_or_a_secret_is_refused(
    database, begun, monkeypatch, option, told
):
    app = App("test", settings=Settings(database_url=database.url))
    app.entities["aircraft"] = make_entity()
    run = make_runner(reexport, app, monkeypatch)
    with pytest.raises(ReexportError, match=told) as refused:
        run("start", "aircraft", "--rate", "60", "--conf", option)
    assert "canary-pass" not in str(refused.value)
    assert begun() == []


def test_the_settings_of_the_command_reach_the_session(database, monkeypatch):
    app = App("test", settings=Settings(database_url=database.url))
    app.entities["aircraft"] = make_entity()
    given = {}

    def fake(_database, _entity, **options):
        given.update(options)
        raise ReexportError("far enough")

    monkeypatch.setattr(module, "start_reexport", fake)
    run = make_runner(reexport, app, monkeypatch)
    with pytest.raises(ReexportError, match="far enough"):
        run(
            *("start", "aircraft", "--rate", "60", "--packed", "a.tar.gz"),
            *("--conf", "spark.cores.max=4", "--conf", "spark.a=b=c"),
        )
    assert given["conf"] == {"spark.cores.max": "4", "spark.a": "b=c"}
    assert given["packed"] == "a.tar.gz"


def test_a_url_that_is_none_has_no_password_to_refuse():
    check_password(FAR, "no url at all", {})


@pytest.mark.parametrize(
    ("master", "pieces", "tasks"),
    [
        ("local", 100, 1),
        ("local[2]", 100, 2),
        ("local[2,4]", 100, 2),
        ("local[4,4]", 3, 3),
        ("local[0]", 100, 1),
        ("spark://host:7077", 100, 64),
        ("spark://host:7077", 7, 7),
        ("local-cluster[2,1,1024]", 100, 64),
        ("", 100, 64),
    ],
)
def test_each_thread_of_this_machine_gets_a_task(master, pieces, tasks):
    assert count_tasks(master, pieces) == tasks


def test_all_processors_get_tasks(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert count_tasks("local[*]", 100) == count_tasks("local[*,4]", 100) == 3
