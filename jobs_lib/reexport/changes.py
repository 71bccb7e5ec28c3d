"""Give the changes of a transaction to a re-export, instead of sending them at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.callers import Fetch, Statements, is_autocommit, perform
from jobs_lib.errors import NoTransactionError
from jobs_lib.reexport.control import check_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from jobs_lib.callers import Steps
    from jobs_lib.callers.caller import AsyncCaller, Caller
    from jobs_lib.outbox.topic import Entity
    from jobs_lib.postgres.queries import Queries


def give_changes(
    conn: Caller | AsyncCaller,
    queries: Callable[[], Queries],
    entity: Entity,
    rate: int,
) -> int | Coroutine[Any, Any, int]:
    """Let what follows in the transaction leave with a re-export; returns its id.

    Args:
        conn: the caller's connection, in a transaction.
        queries: for the library's schema.
        entity: what ``@app.entity`` declared.
        rate: of a new re-export; one that is open keeps its own.

    Raises:
        NoTransactionError: nothing would follow in this transaction.
        ReexportError: the rate is out of range.
    """
    check_rate(rate)
    if is_autocommit(conn):
        raise NoTransactionError(
            "an app's own connection commits each statement by itself, so no change "
            "would follow in this transaction: give the connection of "
            "`with app.transaction() as conn:`"
        )
    return perform(conn, _give(Statements(queries), entity, rate))


def _give(statements: Statements, entity: Entity, rate: int) -> Steps[int]:
    rows = yield Fetch(
        statements["give_changes"],
        {
            "entity": entity.name,
            # SQL puts the declared name into the environment's template.
            "topic": entity.topic.declared,
            "rate": str(rate),
        },
    )
    return int(rows[0][0])
