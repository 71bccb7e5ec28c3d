"""Let readers see another version of a read model."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg import sql

from jobs_lib.consuming import versions
from jobs_lib.consuming.versions import name_model
from jobs_lib.errors import OperatingError
from jobs_lib.kafka.places import count_left, find_places
from jobs_lib.operating.model_versions import (
    ModelVersion,
    choose_version,
    count_untold,
    list_declared,
    read_versions,
)
from jobs_lib.operating.read_models import place_tables
from jobs_lib.operating.readers import copy_readers
from jobs_lib.operating.rewinds import read_places
from jobs_lib.operating.session import IdleError, LockedError, bounded
from jobs_lib.postgres.values import identify, split_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.app import App
    from jobs_lib.consuming.subscription import Subscription
    from jobs_lib.postgres.database import Database

_PAUSE = 0.2
_LOCK_SECONDS = 0.5
"""How long a try may wait for readers that are under way: others wait behind it."""
_IDLE_SECONDS = 1.0
"""How long readers wait for a process that was stopped in the middle of a switch."""


@dataclass(frozen=True, slots=True)
class Switched:
    """What a switch has done."""

    table: str
    before: int
    """The version that readers saw before."""
    after: int
    seconds: float
    """How long readers may have waited."""
    untold: int = 0
    """How many offsets the version before has not come to of which it alone tells."""


class _Reached(NamedTuple):
    """An end that a version has reached, though its offset may lie before it."""

    partition: int
    stored: int
    """Its offset then: from there to the end the topic had no record."""
    end: int


class _Behind(Exception):
    """The version has not applied what the current one has."""

    def __init__(self, records: int) -> None:
        super().__init__(records)
        self.records = records


def switch(
    app: App,
    table: str,
    version: int,
    *,
    patience: float = 60.0,
    with_skipped: bool = False,
) -> Switched:
    """Let readers see another version of a read model, from one moment to the next.

    The version must have applied all that the current one has. The tables change their
    names in one transaction, and consumers of both versions go on within a few
    heartbeats. The version before is kept up to date, so that readers can be switched
    back, until :func:`jobs_lib.operating.dropping.drop_version`.

    Args:
        app: declares the version.
        table: the first table of the read model, by the name that readers know.
        version: that readers see from now on.
        patience: seconds to wait until the version has caught up, and until no reader
            holds a lock for long.
        with_skipped: switch even if the version has skipped records that the current
            one has applied.

    Raises:
        OperatingError: there is no such version, it is current, it is behind, it has
            skipped records, or something depends on the tables; nothing was changed.
        UnavailableError: the database or Kafka does not answer.
    """
    database = place_tables(app)
    declared = _find(app, table, version)
    with database.connect("switch", answer_within=database.timeout) as connection:
        # The process that fills the version may have just been started.
        versions.add(connection, database.queries, app.consumers)
    until = time.monotonic() + patience
    reached = _await_ends(database, app, declared, until)
    while True:
        try:
            return _try(database, table, version, reached, with_skipped=with_skipped)
        except _Behind as behind:
            if time.monotonic() > until:
                raise _refuse_behind(declared, behind.records) from None
        except IdleError:
            if time.monotonic() > until:
                raise
        except LockedError:
            if time.monotonic() > until:
                raise OperatingError(
                    f"others have held locks on the tables of {table} for "
                    f"{patience:g} s: find their transactions in pg_stat_activity, or "
                    "try again when fewer run"
                ) from None
        time.sleep(_PAUSE)


def _find(app: App, table: str, version: int) -> Subscription:
    known = list_declared(app, table)
    for one in known:
        if one.version.number == version:
            if one.is_current:
                raise OperatingError(
                    f"readers see version {version} of {table} already"
                )
            return one
    numbers = ", ".join(str(one.version.number) for one in known)
    raise OperatingError(
        f"the app declares no version {version} of {table!r}; of this table it has: "
        f"{numbers or 'none'}"
    )


def _await_ends(
    database: Database, app: App, declared: Subscription, until: float
) -> list[_Reached]:
    """Wait until a version has reached the ends that its topic has now."""
    group, topic = declared.group, declared.topic
    ends = find_places(app.settings, topic, "end")
    while True:
        stored = read_places(database, group, topic)
        left = count_left(app.settings, group, topic, stored, ends)
        if not left:
            return [_Reached(one, stored.get(one) or 0, ends[one]) for one in ends]
        if time.monotonic() > until:
            raise _refuse_behind(declared, left)
        time.sleep(_PAUSE)


def _refuse_behind(declared: Subscription, left: int) -> OperatingError:
    return OperatingError(
        f"version {declared.version.number} of {declared.first_table} is {left} "
        "offsets behind: wait until `jobs-lib readmodel status` shows that it has "
        "caught up, or what stops it"
    )


def _try(
    database: Database,
    table: str,
    version: int,
    reached: list[_Reached],
    *,
    with_skipped: bool,
) -> Switched:
    """Switch now, if the version has applied all that the current one has.

    If it has not, the consumers of the current one stop for a heartbeat.
    """
    behind = untold = 0
    with database.connect("switch") as connection, _writing(connection, database):
        connection.execute(database.queries["stop_resyncs"])
        found = read_versions(connection, database, table)
        new = choose_version(found, table, version)
        old = next(one for one in found.values() if one.is_current)
        if new is old:
            raise OperatingError(f"readers see version {version} of {table} already")
        _refuse_resyncs(connection, database, table, old, new)
        _refuse_dependents(connection, database, old)
        # No block of either version is under way from here on.
        places = [*old.list_places().values(), *new.list_places().values()]
        # Readers that come from now on wait behind those that are under way.
        began = time.monotonic()
        connection.execute(
            sql.SQL("lock table {} in access exclusive mode").format(
                sql.SQL(", ").join(map(identify, places))
            )
        )
        origins = {
            one.group: _lock_origins(connection, database, one) for one in (old, new)
        }
        if old.topic == new.topic:
            behind = _count_behind(connection, database, old, new, reached)
        if behind:
            _release(connection, database, old.group, origins[old.group])
        else:
            if not with_skipped:
                _refuse_skipped(connection, database, table, old, new)
            copy_readers(connection, database, old, new)
            _rename(connection, old, new)
            _make_current(connection, database, table, old, new)
            untold = count_untold(connection, database, old)
            for group, owned in origins.items():
                _release(connection, database, group, owned)
    if behind:
        raise _Behind(behind)
    seconds = time.monotonic() - began
    return Switched(table, old.number, new.number, seconds, untold)


@contextmanager
def _writing(connection: psycopg.Connection[Any], database: Database) -> Iterator[None]:
    """Open a transaction that waits for locks only for a moment."""
    try:
        with bounded(connection, database, _LOCK_SECONDS, _IDLE_SECONDS):
            yield
    except psycopg.errors.UndefinedTable as error:
        raise OperatingError(
            f"{error.diag.message_primary}: make the table first, as the one that "
            "readers see was made"
        ) from None
    except psycopg.errors.DuplicateTable as error:
        raise OperatingError(
            f"{error.diag.message_primary}: the table before would be named so. Drop "
            "or rename what has this name"
        ) from None


def _refuse_resyncs(
    connection: psycopg.Connection[Any],
    database: Database,
    table: str,
    *versions: ModelVersion,
) -> None:
    names = [name_model(table, one.number) for one in versions]
    rows = connection.execute(
        database.queries["find_resyncs"], {"models": names}
    ).fetchall()
    if rows:
        raise OperatingError(
            f"a re-synchronisation of {rows[0][0]} goes on, and knows the tables by "
            "the names that they have now: wait for its end, or end it with --cancel"
        )


def _refuse_dependents(
    connection: psycopg.Connection[Any], database: Database, old: ModelVersion
) -> None:
    tables = [identify(one).as_string() for one in old.list_places().values()]
    rows = connection.execute(
        database.queries["find_dependents"], {"tables": tables}
    ).fetchall()
    if rows:
        raise OperatingError(
            f"{', '.join(one for (one,) in rows)} would go on to use version "
            f"{old.number}: drop it before the switch, and make it again behind it"
        )


def _name_both(old: ModelVersion, new: ModelVersion) -> dict[str, str]:
    """How statements about a version and the one before it name them."""
    return {"before": old.group, "group": new.group, "topic": new.topic}


def _refuse_skipped(
    connection: psycopg.Connection[Any],
    database: Database,
    table: str,
    old: ModelVersion,
    new: ModelVersion,
) -> None:
    """Refuse a version that lacks what the current one has."""
    names = _name_both(old, new)
    row = connection.execute(database.queries["find_skipped_alone"], names).fetchone()
    if row is None:
        return
    partition, offset, error, count = row
    raise OperatingError(
        f"version {new.number} of {table} has skipped {count} records that version "
        f"{old.number} has not, the first one at offset {offset} of {new.topic}/"
        f"{partition}: {error}. Repair the cause, and apply them with `jobs-lib "
        f"readmodel replay MODULE:APP {new.topic} --group {new.group}`, or switch with "
        "--with-skipped"
    )


def _count_behind(
    connection: psycopg.Connection[Any],
    database: Database,
    old: ModelVersion,
    new: ModelVersion,
    reached: list[_Reached],
) -> int:
    row = connection.execute(
        database.queries["find_behind"],
        {
            **_name_both(old, new),
            "partitions": [one.partition for one in reached],
            "stored": [one.stored for one in reached],
            "reached": [one.end for one in reached],
        },
    ).fetchone()
    assert row is not None
    return int(row[0])


def _rename(
    connection: psycopg.Connection[Any], old: ModelVersion, new: ModelVersion
) -> None:
    # The old ones first: each name is free then.
    for one in (old, new):
        nexts = one.list_next_places(new.number)
        for name, place in one.list_places().items():
            connection.execute(
                sql.SQL("alter table {} rename to {}").format(
                    identify(place), sql.Identifier(split_table(nexts[name])[1])
                )
            )


def _make_current(
    connection: psycopg.Connection[Any],
    database: Database,
    table: str,
    old: ModelVersion,
    new: ModelVersion,
) -> None:
    names = _name_both(old, new)
    model = {"model": table, "version": new.number}
    if old.topic == new.topic:
        connection.execute(database.queries["make_offsets_before"], names)
    connection.execute(database.queries["begin_effects"], names)
    connection.execute(database.queries["end_current_version"], model)
    connection.execute(database.queries["begin_current_version"], model)
    connection.execute(database.queries["note_filled"], names)


def _lock_origins(
    connection: psycopg.Connection[Any], database: Database, one: ModelVersion
) -> list[str]:
    """Lock the partitions of a version: none of its blocks is committed meanwhile."""
    names = {"group": one.group, "topic": one.topic}
    rows = connection.execute(database.queries["lock_consumed"], names).fetchall()
    return [origin for (origin,) in rows]


def _release(
    connection: psycopg.Connection[Any],
    database: Database,
    group: str,
    origins: list[str],
) -> None:
    """Let the consumers take the partitions again, under the tables' new names."""
    connection.execute(
        database.queries["release_consumed"], {"group": group, "origins": origins}
    )
