"""PostgreSQL: connections, the named queries, and the channel of the hints."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow, tuple_row
from psycopg.types.json import set_json_loads
from psycopg.types.numeric import Int8Dumper
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from jobs_lib.errors import (
    ConfigurationError,
    FencedError,
    JobsError,
    SchemaVersionError,
    UnavailableError,
)
from jobs_lib.masking import describe, find_passwords, keep_secret, masked_url
from jobs_lib.partitioner import murmur2
from jobs_lib.postgres.queries import load_queries
from jobs_lib.postgres.session import AsyncSession, Session
from jobs_lib.postgres.tid_array import TidArray, TidArrayDumper
from jobs_lib.reasons import find_reason
from jobs_lib.schemas.json_limits import read_json
from jobs_lib.settings import require_database_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from jobs_lib.settings import Settings

_VERSION = re.compile("[0-9]{4}_[a-z0-9_]+")
"""What versions of the tables are called, such as ``0003_jobs``."""
_FENCED = {"JB001", "JB002"}
_CHANNEL_LIMIT = 63
_CONNECT_WITHIN = 10
BEGIN = "begin isolation level read committed"
"""Begins each transaction of ours that psycopg does not begin by itself. A statement
that has waited for a lock must see what was committed meanwhile."""
_ISOLATION = "set default_transaction_isolation = 'read committed'"
_SIGNATURE = 12
"""Digits of a process's id; `end_silent_sessions` compares as many."""
_NAME_LIMIT = 63 - len("jobs_lib ") - len(" ") - _SIGNATURE


def no_answer(url: str, error: BaseException | None) -> UnavailableError:
    """What a person can act on instead of the driver's error."""
    return UnavailableError(
        f"the database at {masked_url(url)} does not answer: {find_reason(error)}. "
        "Is it running, and is JOBS_LIB_DATABASE_URL right?"
    )


class Database:
    """One PostgreSQL and the schema in it; connects when it is first needed."""

    def __init__(
        self,
        url: str,
        schema: str = "jobs_lib",
        *,
        direct_url: str = "",
        pgbouncer: bool = False,
        timeout: float = 30.0,
    ) -> None:
        keep_secret(find_passwords(url) | find_passwords(direct_url))
        self.url = url
        self.schema = schema
        self.queries = load_queries(schema)
        self.prepares = not pgbouncer
        """Whether a statement that was prepared is there again next time."""
        self.timeout = timeout
        """Seconds without an answer after which a connection counts as lost."""
        self._direct_url = direct_url or ("" if pgbouncer else url)
        self._process = ""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The database that the settings name, reached as they say.

        Services, commands and tasks all get theirs here, so none of them forgets
        PgBouncer, the direct URL or the timeout.

        Raises:
            ConfigurationError: no URL is set.
        """
        return cls(
            require_database_url(settings),
            settings.schema_name,
            direct_url=settings.direct_url,
            pgbouncer=settings.pgbouncer,
            timeout=settings.database_timeout,
        )

    def sign(self, process: UUID) -> None:
        """Let the connections made from now on say whose they are.

        So others can end the transactions of a process that counts as dead.
        """
        self._process = process.hex[:_SIGNATURE]

    @property
    def listens(self) -> bool:
        """Whether a session can listen to notifications."""
        return bool(self._direct_url)

    @property
    def channel(self) -> str:
        """Where hints of new jobs are notified."""
        return channel(self.schema)

    @property
    def outbox_channel(self) -> str:
        """Where hints of new outbox rows are notified."""
        return channel(self.schema, "outbox")

    def connect(
        self, name: str, *, direct: bool = False, impatient: bool = False
    ) -> psycopg.Connection[TupleRow]:
        """A connection of its own in autocommit mode; ``name`` is what operators see.

        Args:
            name: part of the application's name.
            direct: past PgBouncer, for what needs a session of its own.
            impatient: a statement without an answer for ``timeout`` seconds fails. For
                loops whose statements are short; TCP alone does not notice a server
                that is there and says nothing.

        Raises:
            UnavailableError: the server does not answer within ten seconds.
        """
        url = self._direct_url if direct else self.url
        try:
            connection = Session.connect(
                url,
                autocommit=True,
                row_factory=tuple_row,
                **self.options(name),
            )
        except psycopg.OperationalError as error:
            raise no_answer(url, error) from None
        connection.answer_within = self.timeout if impatient else None
        # Not where handlers get a connection: what they read is their business.
        set_json_loads(read_json, connection)
        prepare_connection(connection)
        if not self.prepares and not direct:
            self._check_isolation(connection)
        if self.prepares:
            # Our statements are made to have one good plan; making it anew each time
            # would cost more than many of them. Behind PgBouncer no setting stays.
            # And no compiling: costs of plans for any parameters are high guesses, and
            # JIT takes seconds for what runs a millisecond.
            connection.execute(
                f"set plan_cache_mode = force_generic_plan; set jit = off; {_ISOLATION}"
            )
            if impatient:
                # A plan that was made while a table seemed empty may read all of it,
                # until the next ANALYZE: an old snapshot keeps dead rows there, and
                # rows that were not committed then have come since.
                connection.execute(
                    "set enable_seqscan = off; set enable_bitmapscan = off"
                )
        return connection

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
        """The same for an event loop; opened there, at its first use."""
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
        settle_isolation(connection, stays=self.prepares)

    async def _configure_async(self, connection: psycopg.AsyncConnection[Any]) -> None:
        connection.adapters.register_dumper(int, Int8Dumper)
        await settle_isolation_async(connection, stays=self.prepares)

    def _check_isolation(self, connection: psycopg.Connection[Any]) -> None:
        """Refuse a default that no setting of ours can change behind PgBouncer."""
        row = connection.execute("show default_transaction_isolation").fetchone()
        if row is not None and row[0] != "read committed":
            connection.close()
            raise ConfigurationError(
                f"behind PgBouncer the default isolation is {row[0]!r}, and jobs_lib "
                "works by 'read committed': give it a role of its own, and run `alter "
                "role ROLE set default_transaction_isolation = 'read committed'`"
            )

    def check_version(self, expected: str) -> str:
        """Return the version of the tables, if a release made for another can use them.

        Raises:
            SchemaVersionError: there are no tables, or they do not fit.
        """
        version = sql.Identifier(self.schema, "jobs_lib_version")
        installation = sql.Identifier(self.schema, "installation")
        with self.connect("check") as connection:
            try:
                row = connection.execute(
                    sql.SQL("select version_num from {}").format(version)
                ).fetchone()
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                row = None
            if row is None:
                raise SchemaVersionError(
                    f"schema {self.schema!r} of the database at "
                    f"{masked_url(self.url)} has no tables of jobs_lib: run "
                    "`jobs-lib migrate`"
                )
            installed = str(row[0])
            check_lineage(self.schema, installed)
            serves = installed
            if installed > expected:
                (serves,) = connection.execute(
                    sql.SQL("select compatible_from from {}").format(installation)
                ).fetchone() or (installed,)
        check_fit(self.schema, expected, installed, serves)
        return installed


def check_lineage(schema: str, installed: str) -> None:
    """Refuse tables of a version that no release has, such as a bare number.

    Versions are compared as text, and Alembic takes ``0005`` for short of
    ``0005_completion``. So such tables would be taken for others.

    Args:
        schema: where they are.
        installed: the version that they have.

    Raises:
        SchemaVersionError: its name is not a number and a subject.
    """
    if not _VERSION.fullmatch(installed):
        raise SchemaVersionError(
            f"the tables in schema {schema!r} have version {installed}, which no "
            "release of jobs_lib has, so no migration leads on from it: drop the "
            "schema with all that waits in it, and run `jobs-lib migrate`"
        )


def check_fit(schema: str, expected: str, installed: str, compatible_from: str) -> None:
    """Refuse tables that a release cannot work with.

    Args:
        schema: where they are.
        expected: the version that the release is made for.
        installed: the version that the tables have.
        compatible_from: the oldest version whose releases the tables still serve.

    Raises:
        SchemaVersionError: they are older, or newer by too much.
    """
    if installed < expected:
        raise SchemaVersionError(
            f"the tables in schema {schema!r} have version {installed}, this release "
            f"needs {expected}: run `jobs-lib migrate`"
        )
    if expected < compatible_from:
        raise SchemaVersionError(
            f"the tables in schema {schema!r} have version {installed}, which is newer "
            f"and serves releases made for {compatible_from} or later. This one is "
            f"made for {expected}: install a newer release of jobs_lib"
        )


def connection_options(
    name: str, timeout: float, *, prepares: bool, process: str = ""
) -> dict[str, Any]:
    """What every connection of the library is opened with.

    Args:
        name: part of the application's name, for operators.
        timeout: seconds after which TCP gives a silent host up.
        prepares: whether a statement that was prepared is there again next time.
        process: how the id of its process begins, which ends the application's name.
    """
    # The server cuts longer ones off, and replaces what is not ASCII.
    name = name.encode("ascii", "replace").decode()[:_NAME_LIMIT]
    return {
        "connect_timeout": _CONNECT_WITHIN,
        # Behind PgBouncer one name: it would set another each time that it lends a
        # server, and 1.18 sometimes does not come back from that.
        "application_name": (
            f"jobs_lib {name} {process}".rstrip() if prepares else "jobs_lib"
        ),
        # After half the time without traffic three questions, in the other half.
        "keepalives_idle": max(1, int(timeout / 2)),
        "keepalives_interval": max(1, int(timeout / 6)),
        "keepalives_count": 3,
        "tcp_user_timeout": int(timeout * 1_000),
        # By itself the driver prepares what is executed often.
        "prepare_threshold": 5 if prepares else None,
    }


def prepare_connection(connection: psycopg.Connection[Any]) -> None:
    """Set what our own connections need.

    psycopg sends small integers as smallint and larger ones as int, each combination a
    prepared statement of its own: ours are all bigint.
    """
    connection.adapters.register_dumper(int, Int8Dumper)
    connection.adapters.register_dumper(TidArray, TidArrayDumper)
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED


def settle_isolation(connection: psycopg.Connection[Any], *, stays: bool) -> None:
    """Let each transaction read what is committed, whatever the server's default is.

    Args:
        connection: to the database, with no transaction open.
        stays: whether a setting of the session is there again next time.
    """
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    if stays:
        # For single statements in autocommit mode, which nothing begins.
        before = connection.autocommit
        connection.autocommit = True
        connection.execute(_ISOLATION)
        connection.autocommit = before


async def settle_isolation_async(
    connection: psycopg.AsyncConnection[Any], *, stays: bool
) -> None:
    """The same on an event loop."""
    await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
    if stays:
        before = connection.autocommit
        await connection.set_autocommit(True)
        await connection.execute(_ISOLATION)
        await connection.set_autocommit(before)


def channel(schema: str, kind: str = "jobs") -> str:
    """The channel on which executors, or relays, of a schema are told of new work.

    The same name as the SQL function ``channel`` gives; 63 bytes at the most.
    """
    encoded = schema.encode()
    if len(encoded) + 1 + len(kind) <= _CHANNEL_LIMIT:
        return f"{schema}.{kind}"
    return f"{murmur2(encoded):08x}.{kind}"


@contextmanager
def plain_errors() -> Iterator[None]:
    """Inside a driver's transaction: raise what it can take for an error.

    The driver commits if an error of the application's says that it is false, and does
    not roll back if it fails when asked for its class.
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
    """Turn the database's refusal of a stale owner into a FencedError."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate in _FENCED:
            raise FencedError(
                f"refused: {error.diag.message_primary}. Another process has taken "
                "over; nothing was changed"
            ) from None
        raise
