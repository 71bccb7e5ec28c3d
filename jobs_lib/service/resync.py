"""Run a re-synchronisation in this process, until the topic was read to its end."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg

from jobs_lib import telemetry
from jobs_lib.app import App
from jobs_lib.consuming.resync import Resync
from jobs_lib.errors import OperatingError, TopicError, UnavailableError
from jobs_lib.operating.read_models import place_tables
from jobs_lib.postgres.database import Database
from jobs_lib.service.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from jobs_lib.consuming.resync import Ended, Part
    from jobs_lib.consuming.subscription import Subscription

_LOOK_SECONDS = 0.5
_REPORT_SECONDS = 5.0


def find_model_of(app: App, table: str) -> Subscription:
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


def begin_resync(
    app: App,
    table: str,
    at: datetime | int | None = None,
    partition: int | None = None,
) -> str:
    """Begin a re-synchronisation, or find the one that has begun.

    Args:
        app: with the read model.
        table: of the read model.
        at: the time in Kafka, or the offset of the partition, from which on records are
            read; None for all records. Unless all records of all partitions are read,
            no row is removed at the end.
        partition: read only this one; None for all.

    Returns its consumer group, which :func:`resync` takes.

    Raises:
        OperatingError: there is no such read model; or one has begun that reads from
            another place; or there is no such partition, or no record there.
        JobsError: the database or Kafka does not answer.
    """
    work = _prepare(app, table)
    work.begin(at, partition)
    assert work.group is not None
    return work.group


def resync(
    app: App,
    table: str,
    at: datetime | int | None = None,
    partition: int | None = None,
    *,
    group: str | None = None,
    report: Callable[[list[Part]], None] = lambda parts: None,
    stopping: threading.Event | None = None,
) -> Ended | None:
    """Read a read model's topic again, beside the running service, until its end.

    Any number of processes may do so at once: they share the partitions. If one dies,
    the others go on with its partitions, or the next call does.

    Args:
        app: with the read model.
        table: of the read model.
        at: as for :func:`begin_resync`.
        partition: likewise.
        group: of one that has begun: begin no other one. If it has ended already,
            nothing is done.
        report: called with the progress at the beginning, and every few seconds.
        stopping: stops it when set; what was applied counts.

    Returns what this process has done at the end, and None if it was stopped before.

    Raises:
        OperatingError: as for :func:`begin_resync`; or nobody can know which keys the
            topic has, or it was made anew; or the database has lost what was applied
            in the last moment. Another call goes on then. Or it has ended, and records
            were skipped.
        JobsError: the service does not run.
    """
    work = _prepare(app, table)
    work.join(group or begin_resync(app, table, at, partition))
    stopping = stopping or threading.Event()
    while True:
        if parts := work.list_parts():
            report(parts)
            if not _read(app.name, work, report, stopping):
                with _patient():
                    work.leave()
                return None
        if (ended := work.end()) is not None:
            return ended


def _prepare(app: App, table: str) -> Resync:
    declared = find_model_of(app, table)
    # The port of the probes belongs to the service that runs beside it. A static member
    # would keep its partitions from the others for a while when it ends, and bear the
    # name of the other processes of this pod.
    other = {"probes_port": None, "static_membership": False}
    settings = app.settings.model_copy(update=other)
    return Resync(settings, Database.of(settings), declared)


def _read(
    name: str,
    work: Resync,
    report: Callable[[list[Part]], None],
    stopping: threading.Event,
) -> bool:
    """Read until all ends are reached; returns False if it was stopped before."""
    declared = work.make_subscription()
    other = App(name, settings=work.settings)
    other.consumers.append(declared)
    service = Service(other, ("consumers",))
    reported_at = time.monotonic()
    pause = _LOOK_SECONDS
    # The start waits for servers that do not answer.
    with _asking_to_stop(service, stopping):
        service.start()
    try:
        while not stopping.wait(pause):
            if service.failure is not None:
                raise service.failure
            parts = _look(work, service)
            pause = _LOOK_SECONDS if parts is not None else _REPORT_SECONDS
            if parts is None:
                continue
            if all(part.is_done for part in parts):
                with _patient():
                    if not work.raise_ends():
                        return True
                    pause = 0.0
                continue
            if time.monotonic() > reported_at + _REPORT_SECONDS:
                reported_at = time.monotonic()
                with _patient():
                    work.check_topic()
                report(parts)
        return False
    finally:
        service.stop()


@contextmanager
def _asking_to_stop(service: Service, stopping: threading.Event) -> Iterator[None]:
    """Inside, ask the service to stop when the work is to be stopped."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            if stopping.wait(_LOOK_SECONDS):
                service.ask_to_stop()
                return

    threading.Thread(target=watch, name="jobs_lib resync", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _look(work: Resync, service: Service) -> list[Part] | None:
    """How far it is; None if a server does not answer: consumers wait for it."""
    assert work.group is not None
    assert service.positions is not None
    told = service.positions.ask_committed(work.group, work.topic)
    with _patient():
        return work.list_parts(None if told is None else told.offsets)
    return None


@contextmanager
def _patient() -> Iterator[None]:
    """Report that a server does not answer, and go on: consumers wait for it.

    Kafka may not know the topic for a moment.
    """
    try:
        yield
    except (UnavailableError, TopicError, psycopg.OperationalError) as error:
        telemetry.emit("loop.failed", loop="resync", error=error)


def cancel_resync(app: App, table: str) -> None:
    """Forget a re-synchronisation: what it has applied stays, and no row is removed.

    Raises:
        OperatingError: there is no such read model.
    """
    _prepare(app, table).forget()
