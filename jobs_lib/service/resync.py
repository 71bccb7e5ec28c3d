"""Run a re-synchronisation in this process, until the topic was read to its end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from jobs_lib.app import App
from jobs_lib.consuming.resync import Resync
from jobs_lib.errors import OperatingError
from jobs_lib.operating.read_models import place_tables
from jobs_lib.postgres.database import Database
from jobs_lib.service.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from jobs_lib.consuming.resync import Part
    from jobs_lib.consuming.subscription import Subscription

_LOOK_SECONDS = 0.5
_REPORT_SECONDS = 5.0


def find_model(app: App, table: str) -> Subscription:
    """Find the read model of an app that keeps a table, by the name that it has now.

    Raises:
        OperatingError: none does.
        UnavailableError: the database does not answer.
    """
    place_tables(app)
    for declared in app.consumers:
        if table in [one.name for one in declared.tables]:
            return declared
    known = sorted(one.name for declared in app.consumers for one in declared.tables)
    raise OperatingError(
        f"no read model of this app keeps the table {table!r}; its tables are: "
        f"{', '.join(known) or 'none'}"
    )


def resync(
    app: App,
    table: str,
    at: datetime | None = None,
    *,
    report: Callable[[list[Part]], None] = lambda parts: None,
    stopping: threading.Event | None = None,
) -> int | None:
    """Read a read model's topic again, beside the running service, until its end.

    Any number of processes may do so at once: they share the partitions. If one dies,
    the next call goes on where it was.

    Args:
        app: with the read model.
        table: of the read model.
        at: the time in Kafka from which on records are read; None for all records.
            Then rows whose keys the topic does not show are removed at the end.
        report: called with the progress at the beginning, and every few seconds.
        stopping: stops it when set; what was applied counts.

    Returns the number of keys whose rows were removed at the end, and None if it was
    stopped before.

    Raises:
        OperatingError: there is no such read model; or one has begun that reads from
            another place; or nobody can know which keys the topic has.
        JobsError: the service does not run.
    """
    declared = find_model(app, table)
    # The probes' port belongs to the service that runs beside it.
    settings = app.settings.model_copy(update={"probes_port": None})
    work = Resync(settings, Database.of(settings), declared)
    work.begin(at)
    other = App(app.name, settings=settings)
    other.consumers.append(work.make_subscription())
    service = Service(other, ("consumers",))
    stopping = stopping or threading.Event()
    report(work.list_parts())
    reported_at = time.monotonic()
    service.start()
    try:
        while not stopping.wait(_LOOK_SECONDS):
            parts = work.list_parts()
            if all(part.is_done for part in parts):
                break
            if time.monotonic() > reported_at + _REPORT_SECONDS:
                reported_at = time.monotonic()
                report(parts)
            if service.failure is not None:
                raise service.failure
        else:
            return None
    finally:
        service.stop()
    return work.end()


def cancel_resync(app: App, table: str) -> None:
    """Forget a re-synchronisation: what it has applied stays, and no row is removed.

    Raises:
        OperatingError: there is no such read model.
    """
    settings = app.settings
    Resync(settings, Database.of(settings), find_model(app, table)).forget()
