"""Apps on the same tables: each app owns the origins in a role of its own.

So each app claims its own types in every origin, and no app keeps an origin from
another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from jobs_lib import telemetry
from jobs_lib.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs_lib.ownership.process import Process
    from jobs_lib.postgres.database import Database

_NAMED = 5
"""The number of types that an error names."""


def find_role(
    database: Database, app: str, types: Iterable[str], stale_after: float
) -> str:
    """Find the role in which an app's executors own origins; it never changes.

    Args:
        database: where the origins are.
        app: the app's name.
        types: the job types that it knows.
        stale_after: seconds without a heartbeat until a process counts as dead.
    """
    values = {"app": app, "types": sorted(types), "stale_after": stale_after}
    with (
        database.connect("start", answer_within=database.timeout) as connection,
        connection.transaction(),
    ):
        found = connection.execute(database.queries["read_role"], values).fetchone()
        if found is None:
            connection.execute(database.queries["lock_apps"])
            connection.execute(database.queries["name_role"], values)
            found = connection.execute(database.queries["read_role"], values).fetchone()
    return cast("tuple[str]", found)[0]


def refuse_rivals(
    database: Database, process: Process, role: str, stale_after: float
) -> None:
    """Refuse to run types that the executors of another app run, too.

    Call it after the first heartbeat: two processes that start at once see each other.

    Raises:
        ConfigurationError: a living process of another app knows some of the types.
    """
    with database.connect("start", answer_within=database.timeout) as connection:
        found = connection.execute(
            database.queries["rivals"],
            {"role": role, "types": process.types, "stale_after": stale_after},
        ).fetchone()
    if found is None:
        return
    pod, app, types = found
    whose = f"of the app {app!r}" if app else "of another app"
    raise ConfigurationError(
        f"the executor of pod {pod!r} {whose} knows the job types "
        f"{', '.join(types[:_NAMED])} as well, in the schema {database.schema!r}: both "
        "would run the same jobs. A type belongs to one app: take it out of the other, "
        "or stop the other's executors first, if it has moved here or if the app has a "
        "new name. Apps with types of the same names need a schema each "
        "(JOBS_LIB_SCHEMA)"
    )


def refuse_strangers(
    database: Database, process: Process, role: str, stale_after: float
) -> None:
    """Refuse to share origins with executors of the same app name but other types.

    Executors with some types in common may be of the release before, and only cause an
    event. Call it after the first heartbeat.

    Raises:
        ConfigurationError: a living executor has no type in common with this process.
    """
    with database.connect("start", answer_within=database.timeout) as connection:
        found = connection.execute(
            database.queries["strangers"],
            {
                "id": process.id,
                "role": role,
                "types": process.types,
                "stale_after": stale_after,
            },
        ).fetchone()
    if found is None:
        return
    pod, types = found
    own = {*process.types}
    if not own.isdisjoint(types):
        telemetry.emit(
            "types.differ",
            pod=pod,
            unknown=sorted({*types} - own),
            own=sorted(own - {*types}),
        )
        return
    raise ConfigurationError(
        f"the executor of pod {pod!r} runs under the same app's name in the schema "
        f"{database.schema!r} and has other job types ({', '.join(types[:_NAMED])}; "
        f"here {', '.join(process.types[:_NAMED])}): each would own origins with jobs "
        'that only the other can run. Give each app a name of its own (App("…")), or '
        "declare the types of both in one app. If a release replaces every type, stop "
        "the old executors first"
    )
