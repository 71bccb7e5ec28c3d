"""PostgreSQL: connections, the named queries, and the channel for hints."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg.rows import TupleRow, tuple_row
from psycopg.types.json import set_json_loads
from psycopg.types.numeric import Int8Dumper
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from jobs_lib.errors import (
    ConfigurationError,
    FencedError,
    JobsError,
    UnavailableError,
)
from jobs_lib.masking import describe, find_passwords, keep_secret, masked_url
from jobs_lib.partitioner import murmur2
from jobs_lib.postgres.queries import load_queries
from jobs_lib.postgres.session import AsyncSession, Session, answered_within
from jobs_lib.postgres.tid_array import TidArray, TidArrayDumper
from jobs_lib.reasons import find_reason
from jobs_lib.schemas.json_limits import read_json
from jobs_lib.settings import require_database_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from uuid import UUID

    from jobs_lib.settings import Settings

_FENCED = {"JB001", "JB002"}
_CHANNEL_LIMIT = 63
_CONNECT_WITHIN = 10
_UPKEEP_WITHIN = 120.0
"""Seconds within which a statement of the upkeep is answered: some delete many rows,
and the server ends most of them after a minute."""
BEGIN = "begin isolation level read committed"
"""Begins each of our transactions that psycopg does not begin itself. A statement that
waited for a lock must see the rows that were committed meanwhile."""
_ISOLATION = "set default_transaction_isolation = 'read committed'"
_SIGNATURE = 12
"""Digits of a process's id; `end_silent_sessions` compares the same number."""
_NAME_LIMIT = 63 - len("jobs_lib ") - len(" ") - _SIGNATURE


DATABASE_VARIABLE = "JOBS_LIB_DATABASE_URL"
"""The setting with the URL of the database."""
DIRECT_VARIABLE = "JOBS_LIB_DIRECT_URL"
"""The setting with the URL past PgBouncer."""


def is_lost(state: str | None) -> bool:
    """Whether an error says that there is no connection, or that it has ended.

    Args:
        state: the error's SQLSTATE; those of libpq have none.
    """
    return state is None or state.startswith(("08", "57P"))


def no_answer(
    url: str, error: BaseException | None, variable: str = DATABASE_VARIABLE
) -> UnavailableError:
    """An error that a person can act on, instead of the driver's."""
    away = UnavailableError(
        f"the database at {masked_url(url)} does not answer: {find_reason(error)}. "
        f"Is it running, and is {variable} right?"
    )
    away.is_passing = True
    return away


class Database:
    """One PostgreSQL database and our schema in it; connects at the first use."""

    def __init__(
        self,
        url: str,
        schema: str = "jobs_lib",
        *,
        direct_url: str = "",
        pgbouncer: bool = False,
        timeout: float = 30.0,
        variable: str = DATABASE_VARIABLE,
    ) -> None:
        keep_secret(find_passwords(url) | find_passwords(direct_url))
        self.url = url
        self.schema = schema
        self.queries = load_queries(schema)
        self.prepares = not pgbouncer
        """Whether a prepared statement is still there at the next use."""
        self.timeout = timeout
        """Seconds without an answer after which a connection counts as lost."""
        self._direct_url = direct_url or ("" if pgbouncer else url)
        self._variable = variable
        """The setting that has the URL, for errors."""
        self._process = ""

    @classmethod
    def of(cls, settings: Settings, *, variable: str = DATABASE_VARIABLE) -> Self:
        """The database that the settings name, reached as they say.

        Services, commands and tasks all get theirs here, so none of them forgets
        PgBouncer, the direct URL or the timeout.

        Args:
            settings: with its URL.
            variable: the setting that has the URL, for errors.

        Raises:
            ConfigurationError: no URL is set.
        """
        return cls(
            require_database_url(settings),
            settings.schema_name,
            direct_url=settings.direct_url,
            pgbouncer=settings.pgbouncer,
            timeout=settings.database_timeout,
            variable=variable,
        )

    def sign(self, process: UUID) -> None:
        """Put the process's id into the name of every connection made from now on.

        Other processes can then end the transactions of one that counts as dead.
        """
        self._process = process.hex[:_SIGNATURE]

    @property
    def listens(self) -> bool:
        """Whether a session can listen to notifications."""
        return bool(self._direct_url)

    @property
    def channel(self) -> str:
        """The channel on which hints of new jobs are sent."""
        return channel(self.schema)

    @property
    def outbox_channel(self) -> str:
        """The channel on which hints of new outbox rows are sent."""
        return channel(self.schema, "outbox")

    def connect(
        self,
        name: str,
        *,
        direct: bool = False,
        impatient: bool = False,
        answer_within: float | None = None,
    ) -> Session[TupleRow]:
        """Open a connection in autocommit mode; operators see ``name``.

        Args:
            name: part of the application's name.
            direct: past PgBouncer, for statements that need a session of their own.
            impatient: a statement without an answer for ``timeout`` seconds fails. For
                loops whose statements are short; TCP alone does not notice a server
                that stays connected and sends nothing.
            answer_within: the same after so many seconds; None to wait for ever.

        Raises:
            UnavailableError: the server does not let us in within ten seconds, or then
                gives no answer for ``timeout`` seconds.
        """
        url = self._direct_url if direct else self.url
        try:
            connection = Session.connect(
                url,
                autocommit=True,
                row_factory=tuple_row,
                **self.options(name),
            )
            # A proxy completes the login although its server is away.
            with answered_within(connection, self.timeout):
                self._set_up(connection, direct=direct, impatient=impatient)
        except psycopg.OperationalError as error:
            if not is_lost(error.sqlstate):
                raise
            variable = self._variable if url == self.url else DIRECT_VARIABLE
            raise no_answer(url, error, variable) from None
        connection.answer_within = self.timeout if impatient else answer_within
        return connection

    def _set_up(
        self, connection: Session[TupleRow], *, direct: bool, impatient: bool
    ) -> None:
        # Handlers' connections are left alone: they may read JSON as they like.
        set_json_loads(read_json, connection)
        prepare_connection(connection)
        if not self.prepares and not direct:
            self._check_isolation(connection)
        if self.prepares:
            # Our statements are written to have one good plan; planning many of them
            # costs more than running them. Behind PgBouncer no setting stays.
            # JIT is off: a generic plan's cost is guessed too high, and JIT would
            # compile for seconds a statement that runs for a millisecond.
            connection.execute(
                f"set plan_cache_mode = force_generic_plan; set jit = off; {_ISOLATION}"
            )
            if impatient:
                # A plan made while a table seemed empty may read the whole table until
                # the next ANALYZE: an old snapshot keeps dead rows in it, and rows
                # that were not committed at that time have been committed since.
                connection.execute(
                    "set enable_seqscan = off; set enable_bitmapscan = off"
                )

    def connect_for_upkeep(self) -> Session[TupleRow]:
        """Open a connection for maintenance, whose statements may take long.

        Raises:
            UnavailableError: as :meth:`connect`.
        """
        return self.connect("maintenance", answer_within=_UPKEEP_WITHIN)

    def pool(self, name: str, size: int) -> ConnectionPool[psycopg.Connection[Any]]:
        """A pool of at most ``size`` connections in autocommit mode, opened lazily."""
        return ConnectionPool(
            self.url,
            min_size=0,
            max_size=size,
            open=True,
            timeout=30,
            connection_class=Session,
            kwargs={"autocommit": True, **self.options(name)},
            configure=self._configure,
        )

    def async_pool(
        self, name: str, size: int
    ) -> AsyncConnectionPool[psycopg.AsyncConnection[Any]]:
        """The same for an event loop, which opens the pool at its first use."""
        return AsyncConnectionPool(
            self.url,
            min_size=0,
            max_size=size,
            open=False,
            timeout=30,
            connection_class=AsyncSession,
            kwargs={"autocommit": True, **self.options(name)},
            configure=self._configure_async,
        )

    def options(self, name: str) -> dict[str, Any]:
        """What every connection of the library is opened with."""
        return connection_options(
            name, self.timeout, prepares=self.prepares, process=self._process
        )

    def _configure(self, connection: psycopg.Connection[Any]) -> None:
        prepare_connection(connection)
        settle_isolation(connection, stays=self.prepares, within=self.timeout)

    async def _configure_async(self, connection: psycopg.AsyncConnection[Any]) -> None:
        connection.adapters.register_dumper(int, Int8Dumper)
        await settle_isolation_async(
            connection, stays=self.prepares, within=self.timeout
        )

    def _check_isolation(self, connection: psycopg.Connection[Any]) -> None:
        """Refuse a default isolation that we cannot change behind PgBouncer."""
        row = connection.execute("show default_transaction_isolation").fetchone()
        if row is not None and row[0] != "read committed":
            connection.close()
            raise ConfigurationError(
                f"behind PgBouncer the default isolation is {row[0]!r}, and jobs_lib "
                "works by 'read committed': give it a role of its own, and run `alter "
                "role ROLE set default_transaction_isolation = 'read committed'`"
            )


def connection_options(
    name: str, timeout: float, *, prepares: bool, process: str = ""
) -> dict[str, Any]:
    """What every connection of the library is opened with.

    Args:
        name: part of the application's name, for operators.
        timeout: seconds after which TCP gives up a silent host.
        prepares: whether a prepared statement is still there at the next use.
        process: first digits of the process's id; they end the application's name.
    """
    # The server cuts off longer names, and replaces characters outside ASCII.
    name = name.encode("ascii", "replace").decode()[:_NAME_LIMIT]
    return {
        "connect_timeout": _CONNECT_WITHIN,
        # What bypasses psycopg's cursors is UTF-8, whatever the URL, the environment or
        # the database has chosen.
        "client_encoding": "UTF8",
        # One name for all behind PgBouncer: it would set the name each time that it
        # lends a server, and version 1.18 sometimes hangs while it does so.
        "application_name": (
            f"jobs_lib {name} {process}".rstrip() if prepares else "jobs_lib"
        ),
        # Three probes in the second half of the timeout, if the first had no traffic.
        "keepalives_idle": max(1, int(timeout / 2)),
        "keepalives_interval": max(1, int(timeout / 6)),
        "keepalives_count": 3,
        "tcp_user_timeout": int(timeout * 1_000),
        # The driver prepares statements that are executed often.
        "prepare_threshold": 5 if prepares else None,
    }


def prepare_connection(connection: psycopg.Connection[Any]) -> None:
    """Register our dumpers and set the isolation level.

    psycopg sends small integers as smallint and larger ones as int, and prepares a
    statement for each combination. We send all of them as bigint.
    """
    connection.adapters.register_dumper(int, Int8Dumper)
    connection.adapters.register_dumper(TidArray, TidArrayDumper)
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED


def settle_isolation(
    connection: psycopg.Connection[Any], *, stays: bool, within: float | None = None
) -> None:
    """Make every transaction read committed, whatever the server's default is.

    Args:
        connection: to the database, with no transaction open.
        stays: whether a setting of the session lasts until the next use.
        within: seconds without an answer after which a session of ours fails, so that
            it does not keep one of a pool's few threads. None to wait for ever.
    """
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    if stays:
        # For single statements in autocommit mode, which have no BEGIN.
        before = connection.autocommit
        connection.autocommit = True
        with _hurried(connection, within):
            connection.execute(_ISOLATION)
        connection.autocommit = before


async def settle_isolation_async(
    connection: psycopg.AsyncConnection[Any],
    *,
    stays: bool,
    within: float | None = None,
) -> None:
    """The same on an event loop."""
    await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
    if stays:
        before = connection.autocommit
        await connection.set_autocommit(True)
        with _hurried(connection, within):
            await connection.execute(_ISOLATION)
        await connection.set_autocommit(before)


def _hurried(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any],
    within: float | None,
) -> AbstractContextManager[None]:
    if within is None or not isinstance(connection, Session | AsyncSession):
        return nullcontext()
    return answered_within(connection, within)


def channel(schema: str, kind: str = "jobs") -> str:
    """The channel on which a schema's executors, or relays, get hints of new work.

    The SQL function ``channel`` returns the same name; it has at most 63 bytes.
    """
    encoded = schema.encode()
    if len(encoded) + 1 + len(kind) <= _CHANNEL_LIMIT:
        return f"{schema}.{kind}"
    return f"{murmur2(encoded):08x}.{kind}"


@contextmanager
def plain_errors() -> Iterator[None]:
    """Inside a driver's transaction: raise an error that the driver recognises.

    The driver commits if an application's error is false in a boolean test, and does
    not roll back if asking the error for its class fails.
    """
    try:
        yield
    except BaseException as error:
        try:
            plain = error.__class__ is type(error) and bool(error)
        except BaseException:
            plain = False
        if plain:
            raise
        raise JobsError(describe(error)) from None


@contextmanager
def fenced() -> Iterator[None]:
    """Raise a FencedError when the database refuses a stale owner."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate in _FENCED:
            raise FencedError(
                f"refused: {error.diag.message_primary}. Another process has taken "
                "over; nothing was changed"
            ) from None
        raise
