"""Drop a version of a read model that readers do not see."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from jobs_lib.consuming.versions import name_model
from jobs_lib.errors import OperatingError
from jobs_lib.kafka.places import delete_group
from jobs_lib.operating.model_versions import (
    ModelVersion,
    choose_version,
    count_untold,
    list_declared,
    read_versions,
)
from jobs_lib.operating.read_models import place_tables
from jobs_lib.operating.session import bounded
from jobs_lib.postgres.values import identify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.app import App
    from jobs_lib.postgres.database import Database

_KEYS = 10_000
"""How many keys of a version are forgotten at a time."""


def drop_version(
    app: App, table: str, version: int, *, loses_effects: bool = False
) -> list[str]:
    """Drop the tables of a version that readers do not see, and what is known of it.

    If it was ended in the middle, another call ends the work.

    Args:
        app: the app, which must not declare it any more.
        table: the first table of the read model, by the name that readers know.
        version: to be dropped.
        loses_effects: drop it even if it has records left of which it alone calls
            `on_change`: nobody does so then.

    Returns the tables that were dropped.

    Raises:
        OperatingError: there is no such version, it is current, it has effects left,
            or it is still kept; its tables are there.
        UnavailableError: the database does not answer.
    """
    database = place_tables(app)
    declared = list_declared(app, table)
    has_effects = not declared or any(one.has_effects for one in declared)
    if any(one.version.number == version for one in declared):
        raise OperatingError(
            f"the app still declares version {version} of {table}: take the "
            "declaration out and deploy that first"
        )
    with database.connect("drop") as connection:
        with bounded(connection, database):
            dropped = _find_dropped(connection, database, table, version)
            untold = count_untold(connection, database, dropped)
            if untold and has_effects and not loses_effects:
                raise OperatingError(
                    f"version {version} of {table} has {untold} offsets left of which "
                    "it alone calls `on_change`: keep it until it has read them, see "
                    "`jobs-lib readmodel status`, or drop it with --lose-effects"
                )
            _refuse_kept(connection, database, table, dropped)
            # A process that keeps the version after all begins with the oldest record
            # from here on, and writes the keys again.
            connection.execute(
                database.queries["forget_progress"],
                {"group": dropped.group, "topic": dropped.topic},
            )
        known = {"name": name_model(table, version), "group": dropped.group}
        _forget_keys(connection, database, known)
        with _dropping(connection, database):
            dropped = _find_dropped(connection, database, table, version)
            _refuse_kept(connection, database, table, dropped)
            places = [*dropped.list_places().values()]
            for place in reversed(places):
                connection.execute(
                    sql.SQL("drop table if exists {}").format(identify(place))
                )
            connection.execute(
                database.queries["forget_version"],
                {**known, "model": table, "version": version},
            )
    delete_group(app.settings, dropped.group)
    return places


@contextmanager
def _dropping(
    connection: psycopg.Connection[Any], database: Database
) -> Iterator[None]:
    """Open a transaction of a drop that has begun."""
    begun = "its tables are there, and what was known of its keys is going"
    try:
        with bounded(connection, database, so_far=begun):
            yield
    except psycopg.errors.DependentObjectsStillExist as error:
        raise OperatingError(
            f"{error.diag.message_primary}: {error.diag.message_detail}; {begun}. Drop "
            "what depends on it, and call this again"
        ) from None


def _find_dropped(
    connection: psycopg.Connection[Any], database: Database, table: str, version: int
) -> ModelVersion:
    """Find a version that is to be dropped, if readers do not see it."""
    dropped = choose_version(read_versions(connection, database, table), table, version)
    if dropped.is_current:
        raise OperatingError(
            f"readers see version {version} of {table}: switch to another first"
        )
    return dropped


def _refuse_kept(
    connection: psycopg.Connection[Any],
    database: Database,
    table: str,
    one: ModelVersion,
) -> None:
    rows = connection.execute(
        database.queries["find_readers_of_version"], {"group": one.group}
    ).fetchall()
    if rows:
        raise OperatingError(
            f"these pods still keep version {one.number} of {table}: "
            f"{', '.join(pod for (pod,) in rows)}. Deploy the release without it "
            "first"
        )


def _forget_keys(
    connection: psycopg.Connection[Any], database: Database, known: dict[str, Any]
) -> None:
    """Delete what is known of a version's keys, in steps: there may be millions."""
    after: str | None = ""
    while after is not None:
        with _dropping(connection, database):
            ((after,),) = connection.execute(
                database.queries["forget_version_keys"],
                {**known, "after": after, "rows": _KEYS},
            ).fetchall()
