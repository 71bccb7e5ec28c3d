"""Look at a cluster's workers before they load, and say plainly why they failed.

A worker needs this Python, this release of the library, and a way to the database.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import ReexportError
from jobs_lib.version import __version__
from spark_bridge.master import check_password, is_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spark_bridge.loader import Target
    from spark_bridge.staging import StateEncoder

PATIENCE = 300.0
"""Seconds for which a cluster may have no executor for us. Spark would wait for ever,
and say so only in its log."""
_LOOK_EVERY = 2.0
_TASKS_EACH, _MOST_TASKS, _ROUNDS = 4, 512, 5
_SHOWN = 5
_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
_WAY_OUT = (
    f"The workers need Python {_PYTHON} and jobs-lib[spark] {__version__}. Install it "
    "there and name the Python by PYSPARK_PYTHON, or send the packages along: "
    "`jobs-lib reexport pack FILE`, with `--module NAME` for one of yours, then "
    "`--packed FILE`"
)
_STATES_WAY_OUT = (
    "Tasks check the states of a DataFrame by the type of the topic's values, so the "
    "workers need the module of that type and what it imports. Install it there, or "
    "send it along: `jobs-lib reexport pack FILE --module NAME`, then `--packed FILE`"
)
_EXECUTOR = re.compile(r"\(TID \d+\) \((\S+) executor [^)]*\): ?")
_RAISED = re.compile(r"^([A-Za-z_]\w*(?:\.\w+)*)(?:: (.*))?$", re.MULTILINE)
_OURS = "jobs_lib.errors."
_SET_UP = re.compile(
    r"ModuleNotFoundError|ImportError|PYTHON_VERSION_MISMATCH|Cannot run program"
    r"|AttributeError: Can't get attribute"
)
"""What the errors of a worker say whose Python or packages are not ours."""


def read_settings(session: Any) -> dict[str, str]:
    """Read the settings of a session, as far as it tells them."""
    return dict(session.conf.getAll)


def check_session(session: Any, target: Target) -> None:
    """Check that the workers of a session can load, and may know the URL.

    Raises:
        ReexportError: one cannot, or the URL's password would cross a network.
    """
    settings = read_settings(session)
    master = settings.get("spark.master", "")
    if is_local(master):
        return  # this very machine and Python
    check_password(master, target.url, settings)
    check_workers(session, target)


def check_workers(session: Any, target: Target) -> None:
    """Ask workers, in a job that loads nothing, what they lack.

    Raises:
        ReexportError: some lack something; it names the host and what that is.
    """
    _ask(
        session,
        make_probe(target.url, target.schema, target.pgbouncer, target.timeout),
    )


def check_encoder(session: Any, encoder: StateEncoder) -> None:
    """Ask workers that can load whether they can also make the bytes of states.

    Raises:
        ReexportError: some cannot; it names the host and what is missing there.
    """
    if not is_local(read_settings(session).get("spark.master", "")):
        _ask(session, make_encoder_probe(encoder))


def _ask(session: Any, probe: Callable[[int], str | None]) -> None:
    """Run a probe on all workers.

    Raises:
        ReexportError: it tells a fault of some.
    """
    from pyspark.sql.functions import udf

    # Not by Arrow, which is one of the packages that a worker may lack.
    ask = udf(probe, "string", useArrow=False)
    told: set[str] = set()
    asked = -1
    # Executors come one after the other: ask once more if there are new ones.
    for _ in range(_ROUNDS):
        if (there := count_executors(session) or 0) <= asked:
            break
        asked = there
        tasks = min(_MOST_TASKS, _TASKS_EACH * max(2, there))
        frame = session.range(0, tasks, 1, tasks)
        with watching(session):
            told |= {fault for (fault,) in frame.select(ask("id")).collect() if fault}
    if faults := sorted(told):
        shown = "; ".join(faults[:_SHOWN])
        if len(faults) > _SHOWN:
            shown += f"; and {len(faults) - _SHOWN} more"
        raise ReexportError(f"workers of Spark cannot load: {shown}")


def make_probe(
    url: str, schema: str, pgbouncer: bool, timeout: float
) -> Callable[[int], str | None]:
    """Make the function that runs on a worker and tells what it lacks, or None.

    It must not need the library to be unpickled, so all that it holds is plain data.
    """
    wanted, way_out = __version__, _WAY_OUT

    def probe(_: int) -> str | None:
        import socket
        import time

        # Long enough that one worker does not take the tasks of another one, too.
        time.sleep(0.25)
        host = socket.gethostname()
        try:
            import numpy  # noqa: F401 - this and the next are looked for
            import pyarrow  # noqa: F401

            from jobs_lib.masking import describe
            from jobs_lib.version import __version__ as found
            from spark_bridge.loader import Target
        except ImportError as error:
            return f"{host} lacks a package ({error}): {way_out}"
        if found != wanted:
            return f"{host} has jobs_lib {found}, and this process {wanted}: {way_out}"
        try:
            database = Target(url, schema, pgbouncer, timeout).database()
            database.connect("re-export probe").close()
        except Exception as error:
            return (
                f"{host} does not reach the database: {describe(error)}. Give a URL "
                "that holds on the workers, too, or load without them: --engine sql"
            )
        return None

    return probe


def make_encoder_probe(encoder: StateEncoder) -> Callable[[int], str | None]:
    """Make the function that tells why a worker cannot encode states, or None."""
    from pyspark import cloudpickle

    # As bytes: the function itself must not need the application to be unpickled.
    pickled, way_out = cloudpickle.dumps(encoder), _STATES_WAY_OUT

    def probe(_: int) -> str | None:
        import pickle
        import socket
        import time

        from jobs_lib.masking import describe

        time.sleep(0.25)
        try:
            import pandas  # noqa: F401 - this is looked for

            pickle.loads(pickled)  # noqa: S301 - these are our own bytes
        # Whatever the application's modules raise when they are imported there.
        except Exception as error:
            host = socket.gethostname()
            return f"{host} cannot encode states ({describe(error)}). {way_out}"
        return None

    return probe


@contextmanager
def watching(session: Any) -> Iterator[None]:
    """Run jobs: end them if no executor is there for too long, and explain errors.

    Raises:
        ReexportError: a job has failed, or the cluster has given no executor.
    """
    try:
        with awaiting_executors(session):
            yield
    except ReexportError:
        raise
    except Exception as error:
        raise explain(error) from error


@contextmanager
def awaiting_executors(session: Any) -> Iterator[None]:
    """Run jobs, and end them if no executor is there for too long.

    Raises:
        ReexportError: the cluster has given no executor.
    """
    patience = PATIENCE
    watch = _Watch(session, patience)
    try:
        with watch:
            yield
    except Exception:
        if watch.has_interrupted:
            raise ReexportError(
                f"Spark had no executor for {patience:g} s, so nothing goes on: does "
                "the cluster have a worker with enough free cores and memory "
                "(spark.executor.memory), and does its master still know this "
                "application? Run it again"
            ) from None
        raise


class _Watch:
    """Interrupts the jobs of this thread if the cluster has no executor too long."""

    def __init__(self, session: Any, patience: float) -> None:
        self.has_interrupted = False
        self._session = session
        self._patience = patience
        self._tag = f"jobs_lib-{uuid.uuid4().hex}"
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if count_executors(self._session) is None:
            return
        # Not by the session's tags: another thread than ours could not interrupt them.
        self._session.sparkContext.addJobTag(self._tag)
        self._thread = threading.Thread(
            target=self._watch, name="executors of Spark", daemon=True
        )
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        self._end.set()
        self._thread.join()
        try:
            self._session.sparkContext.removeJobTag(self._tag)
        except Exception:
            # Whatever has ended Spark, the error of the job says it.
            return

    def _watch(self) -> None:
        seen_at = time.monotonic()
        while not self._end.wait(_LOOK_EVERY):
            try:
                if count_executors(self._session):
                    seen_at = time.monotonic()
                elif time.monotonic() - seen_at > self._patience:
                    self.has_interrupted = True
                    self._session.sparkContext.cancelJobsWithTag(self._tag)
            except Exception:
                # Spark was stopped: the job fails by itself.
                return


def count_executors(session: Any) -> int | None:
    """Count a cluster's executors; None if there are no others than this process.

    Spark Connect does not tell them, so nobody waits for them there.
    """
    try:
        context = session.sparkContext
        if is_local(context.master):
            return None
        # The driver counts as one.
        return len(context._jsc.sc().statusTracker().getExecutorInfos()) - 1
    except Exception:
        return None


def explain_missing(error: BaseException) -> ReexportError | None:
    """Say in one line what a worker lacks; None if the error is of another kind."""
    return explain(error) if _SET_UP.search(_find_reason(str(error))) else None


def explain(error: BaseException) -> ReexportError:
    """Say in one line why a job failed, and on which host.

    Errors of the database may hold values, so of those only the class is told.
    """
    texts = [str(error)]
    # The error of the task alone does not name the host; the one of the job does.
    if error.__context__ is not None:
        texts.append(str(error.__context__))
    host = next((found[1] for text in texts if (found := _EXECUTOR.search(text))), "")
    reason = _find_reason(texts[0])
    where = f" on {host}" if host else ""
    if reason.startswith(_OURS):
        return ReexportError(f"a task of Spark{where}: {reason.partition(': ')[2]}")
    if _SET_UP.search(reason):
        return ReexportError(f"a task of Spark failed{where}: {reason}. {_WAY_OUT}")
    return ReexportError(
        f"a task of Spark failed{where}: {reason}. What is loaded stays: start again "
        "to go on"
    )


def _find_reason(text: str) -> str:
    """The error that a Python worker has raised, else what Spark says."""
    text = text.partition("JVM stacktrace:")[0]
    _, traceback, raised = text.rpartition("Traceback (most recent call last):")
    if traceback and (found := _RAISED.search(raised)):
        name, reason = found[1], found[2] or ""
        return name if name.startswith("psycopg") else f"{name}: {reason}".rstrip(": ")
    if found := _EXECUTOR.search(text):
        text = text[found.end() :]
    lines = [line.strip(": ") for line in text.splitlines() if line.strip()]
    # The first one names the call of Java.
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        lines = lines[1:]
    return lines[0] if lines else "unknown"
