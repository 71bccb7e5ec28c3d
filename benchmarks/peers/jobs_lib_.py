"""This library, through its public interface and with its default settings."""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from benchmarks.peers import limited
from benchmarks.peers.adapter import (
    database_address,
    make_sink,
    payload_of,
    read_command,
    say,
    say_enqueued,
    timetable,
)
from benchmarks.peers.steps import Steps
from jobs_lib import App, Job
from jobs_lib.postgres.migrate import migrate
from jobs_lib.service.service import Service
from jobs_lib.settings import load_settings

# The other adapters give at most this many to one call; millions do not fit at once.
_SLICE = 100_000
_BLOCKED_BEHIND = 3
_TENANTS = 1_000
_PAD = "x" * 64 * 1024
# The remains of operators and failures: as many of each as there are jobs.
_CROWD = (
    """
    insert into jobs_lib.discarded
        (id, origin, type, "group", attempt, payload, enqueued_at)
    select -n, 'local/1', 'noop', 'd' || n, 5, '{}', clock_timestamp()
    from generate_series(1, %(rows)s::int) n
    """,
    """
    insert into jobs_lib.pauses (kind, name)
    select 'group', 'p' || n from generate_series(1, %(rows)s::int) n
    """,
    """
    insert into jobs_lib.cancellations (id, origin)
    select -n, 'local/1' from generate_series(1, %(rows)s::int) n
    """,
)


def open_app(given: dict[str, Any]) -> App:
    """An app without any job type."""
    host, port = os.environ["PGHOST"], os.environ["PGPORT"]
    user, database = os.environ["PGUSER"], os.environ["PGDATABASE"]
    password = os.environ["PGPASSWORD"]
    url = f"postgresql://{user}:{password}@{host}:{port}/{database}"
    settings = load_settings(database_url=url, **given.get("settings", {}))
    return App("bench", settings=settings)


def read_limit(given: dict[str, Any]) -> Any:
    """The limit of jobs at once, as an application declares it."""
    limit = given.get("limit")
    return (int(limit[0]), str(limit[1])) if isinstance(limit, list) else limit


def make_app(given: dict[str, Any], sink: Any = None) -> App:
    """An app with one type of jobs that do nothing."""
    app = open_app(given)

    @app.job(group="k", limit=read_limit(given))
    def noop(
        job: Job, i: int, k: str | None = None, pad: str = "", tenant: str = ""
    ) -> None:
        sink.note(i, k)

    return app


def settings(given: dict[str, Any]) -> None:
    """Report the settings that a worker uses."""
    shown = {"workers", "batch", "poll_interval", "history_days"}
    say(**make_app(given).settings.model_dump(include=shown))


def setup(given: dict[str, Any]) -> None:
    """Make the tables."""
    migrate(make_app(given).settings.database_url)


def enqueue(given: dict[str, Any]) -> None:
    """Enqueue one job per transaction, in a thread for each connection."""
    app = make_app(given)
    noop = app.jobs["noop"]
    latencies: list[float] = []
    gate = threading.Barrier(given["connections"])

    def one() -> None:
        noop.enqueue(app, i=0)
        gate.wait()
        until = time.perf_counter() + given["seconds"]
        while (called := time.perf_counter()) < until:
            noop.enqueue(app, i=1)
            latencies.append(time.perf_counter() - called)

    _in_threads([one] * given["connections"])
    say_enqueued(latencies, given["seconds"])


def bulk(given: dict[str, Any]) -> None:
    """Enqueue many jobs in one call and one transaction."""
    noop = make_app(given).jobs["noop"]
    jobs, mode = given["jobs"], given["mode"]
    with psycopg.connect(database_address()) as connection:
        began = time.perf_counter()
        if mode == "blocked":
            _enqueue_blocked(noop, connection, jobs)
        if mode == "crowded":
            for statement in _CROWD:
                connection.execute(statement, {"rows": jobs})
        for start in range(0, jobs, _SLICE):
            numbers = range(start, min(start + _SLICE, jobs))
            if mode == "heavy":
                payloads = [{"i": number, "pad": _PAD} for number in numbers]
            elif mode == "tenants":
                payloads = [{"i": n, "tenant": f"t{n % _TENANTS}"} for n in numbers]
            else:
                payloads = [payload_of(number, mode) for number in numbers]
            noop.enqueue_many(connection, payloads)
            connection.commit()
        say(jobs=jobs, seconds=time.perf_counter() - began)


def _enqueue_blocked(noop: Any, connection: Any, groups: int) -> None:
    """Enqueue groups whose first job is due far ahead, as after a failure, and more."""
    heads = ({"i": -1, "k": f"b{n}"} for n in range(groups))
    later = datetime.now(UTC) + timedelta(days=1)
    noop.options(run_at=later).enqueue_many(connection, heads)
    connection.commit()
    for _ in range(_BLOCKED_BEHIND):
        behind = ({"i": -1, "k": f"b{n}"} for n in range(groups))
        noop.enqueue_many(connection, behind)
        connection.commit()


def work(given: dict[str, Any]) -> None:
    """Run jobs until the process is ended."""
    sink = Steps(given["steps"]) if given.get("steps") else make_sink(given)
    service = Service(make_app(given, sink), ["executor"])
    say(event="ready", at=time.monotonic_ns())
    service.run()


def fill_limited(given: dict[str, Any]) -> None:
    """Enqueue jobs of 50 tenants that note when they run."""
    limited_type = limited.declare(open_app(given), read_limit(given))
    with psycopg.connect(database_address()) as connection:
        for start in range(0, given["jobs"], _SLICE):
            numbers = range(start, min(start + _SLICE, given["jobs"]))
            limited_type.enqueue_many(
                connection, [{"i": n, "tenant": n % limited.TENANTS} for n in numbers]
            )
            connection.commit()
    say(jobs=given["jobs"])


def work_limited(given: dict[str, Any]) -> None:
    """Run these jobs until the process is ended."""
    limited.work(open_app(given), read_limit(given), given["log"])


def send(given: dict[str, Any]) -> None:
    """Enqueue one job after the other, each on a free connection when it is due."""
    noop = make_app(given).jobs["noop"]
    due_jobs = timetable(given)
    taking = threading.Lock()
    sent: list[str] = []

    def one() -> None:
        with psycopg.connect(database_address()) as connection:
            while True:
                with taking:
                    number, due = next(due_jobs, (None, 0.0))
                if number is None:
                    return
                time.sleep(max(0.0, due - time.monotonic()))
                before = time.monotonic_ns()
                noop.enqueue(connection, i=number)
                connection.commit()
                sent.append(f"{number} {before} {time.monotonic_ns()}\n")

    _in_threads([one] * given["connections"])
    with open(given["log"], "w") as log:
        log.writelines(sent)


def _in_threads(functions: list[Any]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    command, given = read_command()
    globals()[command](given)
