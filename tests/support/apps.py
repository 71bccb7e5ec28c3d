"""Apps and running executors for the tests of the library."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from jobs_lib import App, telemetry
from jobs_lib.executor import Executor
from jobs_lib.ownership import Ownership, Process, Source, StaticSource
from jobs_lib.service.service import Service
from jobs_lib.settings import load_settings
from tests.support.expectations import watch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HOME = [f"local/{n}" for n in range(16)]
"""The origins of a database in which no home topic was ever declared."""
QUICK: dict[str, Any] = {
    "poll_interval": 0.01,
    "relay_poll_interval": 0.01,
    "heartbeat_interval": 0.2,
    "stale_after": 1.0,
    "session_timeout": 6.0,
    "group_heartbeat_interval": 0.3,
    "follow_interval": 0.1,
    "handover_timeout": 2.0,
}
"""Settings that make tests short."""


def count(admin: Any, table: str) -> int:
    """Count the rows of one of our tables."""
    number: int = admin.execute(f"select count(*) from jobs_lib.{table}").fetchone()[0]
    return number


def count_unsent(admin: Any) -> tuple[int, int]:
    """Count waiting and held rows in one snapshot, since rows move between them."""
    waiting, held = admin.execute(
        "select (select count(*) from jobs_lib.outbox),"
        " (select count(*) from jobs_lib.held_rows)"
    ).fetchone()
    return waiting, held


def make_app(
    url: str, *, home: str | None = None, name: str = "test", **settings: Any
) -> App:
    """An app on the database at ``url``, with quick settings."""
    return App(
        name,
        home=home,
        settings=load_settings(**{**QUICK, **settings}, database_url=url),
    )


@contextlib.contextmanager
def running(app: App, *parts: str, sidecar: bool = False) -> Iterator[Service]:
    """Run the given parts of an app in this process; by default all of them."""
    parts = parts or ("consumers", "executor", "relay")
    service = Service(app, parts, sidecar=sidecar)
    service.start()
    try:
        yield service
    finally:
        service.stop()


@contextlib.contextmanager
def executing(
    app: App,
    origins: Iterable[str] | Source,
    *,
    workers: int = 4,
    batch: int = 100,
) -> Iterator[Process]:
    """Run an executor on these origins, or on those of a source.

    Several executors may run in one test. A test that has a source gives and takes
    origins by it.
    """
    source = origins if isinstance(origins, Source) else StaticSource(origins)
    settings = app.settings
    database = app.database()
    name = f"pod-{uuid4().hex[:6]}"
    process = Process(
        database,
        name,
        ["execute"],
        0.2,
        types=app.jobs,
        stale_after=settings.stale_after,
    )
    executor = Executor(
        database,
        app.jobs,
        process.id,
        UUID(int=1),
        settings.model_copy(update={"workers": workers, "batch": batch}),
        app.middleware,
        lambda: process.lease,
        lambda: process.sees_others,
    )
    process.report = executor.report
    ownership = Ownership(
        database,
        process,
        "execute",
        source,
        executor,
        interval=0.1,
        stale_after=settings.stale_after,
        handover_timeout=settings.handover_timeout,
        jobs=executor,
    )
    process.start()
    executor.start()
    ownership.start()
    try:
        yield process
    finally:
        ownership.stop()
        executor.stop()
        process.stop()


@contextlib.contextmanager
def heard(*events: str) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Collect the events of these names that are emitted meanwhile, in order."""
    found: list[tuple[str, dict[str, Any]]] = []
    lock = threading.Lock()

    def listener(event: str, fields: dict[str, Any]) -> None:
        if event in events:
            with lock:
                found.append((event, fields))

    stop = telemetry.listen(listener)
    try:
        with watch.expecting(events):
            yield found
    finally:
        stop()
