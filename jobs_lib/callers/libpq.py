"""Run one statement on a psycopg connection in one round trip, BEGIN included.

psycopg's cursors cost more time here than the server: they adapt and prepare, and send
BEGIN on its own. Cases that this module does not cover use a cursor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import generators, pq
from psycopg.errors import error_from_result

from jobs_lib.errors import ConfigurationError
from jobs_lib.reasons import POOLER, hints_at_pooler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGconn, PGresult

    from jobs_lib.callers import Rows, Statement

_IDLE = pq.TransactionStatus.IDLE
_OPEN = pq.TransactionStatus.INTRANS
_NO_PIPELINE = pq.PipelineStatus.OFF
_prepared: WeakKeyDictionary[psycopg.Connection[Any], set[bytes]] = WeakKeyDictionary()
"""The names of the statements prepared on the library's own connections."""
_BEGIN = {
    None: b"BEGIN",
    psycopg.IsolationLevel.READ_COMMITTED: b"BEGIN ISOLATION LEVEL READ COMMITTED",
}
_GOOD = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)


def exchange(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any],
    statement: Statement,
    parameters: Mapping[str, str | bytes | None],
) -> PQGen[Rows] | None:
    """Return what the connection must wait for; None if a cursor must be used.

    Hold the connection's lock until the wait is over. The statement is not prepared:
    after a rollback psycopg drops all prepared statements, ours among them.
    """
    pgconn = connection.pgconn
    status = pgconn.transaction_status
    if (
        pgconn.pipeline_status != _NO_PIPELINE
        or pgconn.parameter_status(b"client_encoding") != b"UTF8"
    ):
        return None
    values, formats = _encode(statement, parameters)
    if status == _OPEN:
        return _send(pgconn, statement.numbered, values, formats)
    if (
        status == _IDLE
        and not connection.autocommit
        and connection.isolation_level in _BEGIN
        and connection.read_only is None
        and connection.deferrable is None
    ):
        begin = _BEGIN[connection.isolation_level]
        return _begin_and_send(pgconn, begin, statement.numbered, values, formats)
    return None


def send_alone(
    connection: psycopg.Connection[Any],
    statement: Statement,
    parameters: Mapping[str, str | bytes | None],
) -> PQGen[Rows]:
    """Run a statement on one of the library's own connections in autocommit mode.

    The statement is prepared there, under a name that psycopg does not use; but not
    behind PgBouncer, where nothing stays prepared.

    Raises:
        ConfigurationError: there is a pooler that the settings do not mention.
    """
    pgconn = connection.pgconn
    values, formats = _encode(statement, parameters)
    if connection.prepare_threshold is None:
        return (yield from _send(pgconn, statement.numbered, values, formats))
    prepared = _prepared.setdefault(connection, set())
    if statement.name in prepared:
        try:
            return (yield from _send_prepared(pgconn, statement, values, formats))
        except psycopg.errors.InvalidSqlStatementName:
            # psycopg dropped it with its own after a rollback; it has not run yet.
            prepared.clear()
    try:
        pgconn.send_prepare(statement.name, statement.numbered)
        yield from _receive(pgconn)
        prepared.add(statement.name)
        return (yield from _send_prepared(pgconn, statement, values, formats))
    except psycopg.Error as error:
        text = str(error.diag.message_primary)
        if hints_at_pooler(error.sqlstate, text):
            raise ConfigurationError(f"{text}. {POOLER}") from None
        raise


def abandon(pgconn: PGconn) -> None:
    """Make a connection usable again, or close it, after a wait that failed."""
    if pgconn.pipeline_status == _NO_PIPELINE:
        return
    try:
        pgconn.exit_pipeline_mode()
    except psycopg.Error:
        pgconn.finish()


def _encode(
    statement: Statement, parameters: Mapping[str, str | bytes | None]
) -> tuple[list[bytes | None], list[int] | None]:
    given = [parameters[name] for name in statement.names]
    values = [v.encode() if isinstance(v, str) else v for v in given]
    if not any(isinstance(v, bytes) for v in given):
        return values, None
    return values, [int(isinstance(v, bytes)) for v in given]


def _send(
    pgconn: PGconn,
    query: bytes,
    values: list[bytes | None],
    formats: list[int] | None,
) -> PQGen[Rows]:
    pgconn.send_query_params(query, values, param_formats=formats)
    return (yield from _receive(pgconn))


def _send_prepared(
    pgconn: PGconn,
    statement: Statement,
    values: list[bytes | None],
    formats: list[int] | None,
) -> PQGen[Rows]:
    pgconn.send_query_prepared(statement.name, values, param_formats=formats)
    return (yield from _receive(pgconn))


def _begin_and_send(
    pgconn: PGconn,
    begin: bytes,
    query: bytes,
    values: list[bytes | None],
    formats: list[int] | None,
) -> PQGen[Rows]:
    pgconn.enter_pipeline_mode()
    pgconn.send_query_params(begin, None)
    pgconn.send_query_params(query, values, param_formats=formats)
    pgconn.pipeline_sync()
    yield from generators.send(pgconn)
    begun = yield from generators.fetch_many(pgconn)
    results = yield from generators.fetch_many(pgconn)
    yield from generators.fetch_many(pgconn)
    pgconn.exit_pipeline_mode()
    for result in begun:
        _rows(result)
    return _rows(results[0])


def _receive(pgconn: PGconn) -> PQGen[Rows]:
    (result,) = yield from generators.execute(pgconn)
    return _rows(result)


def _rows(result: PGresult) -> Rows:
    if result.status not in _GOOD:
        raise error_from_result(result)
    return [
        tuple(_text(result.get_value(row, column)) for column in range(result.nfields))
        for row in range(result.ntuples)
    ]


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
