"""Which errors are a record's fault, so that it may be skipped."""

from __future__ import annotations

import errno

import psycopg
import pytest
import sqlalchemy.exc
from psycopg import errors

from jobs_lib.consuming.blame import is_of_record
from jobs_lib.errors import (
    ConfigurationError,
    FencedError,
    JobsError,
    PayloadError,
    RecordError,
    TopicError,
    UnavailableError,
)


class Client(ConnectionError):
    """An error of a client of another service."""


class Timeout(Exception):
    """As `requests` calls it; this is no built-in TimeoutError."""


class Custom(psycopg.Error):
    """An error that a trigger of the application raises, with a state of its own."""

    sqlstate = "ORD01"


class Odd(Exception):
    """An error whose attributes fail."""

    @property
    def sqlstate(self) -> str:
        raise ValueError("no state")


def wrapped(error: Exception) -> Exception:
    """The error as SQLAlchemy raises it."""
    outer = sqlalchemy.exc.DBAPIError.instance("select 1", {}, error, psycopg.Error)
    outer.__cause__ = error
    assert isinstance(outer, Exception)
    return outer


def caused(error: BaseException) -> Exception:
    """An error of the application that another one has caused."""
    outer = LookupError("no order")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    "error",
    [
        RecordError("cannot be read"),
        PayloadError("does not fit"),
        # A handler that commits: it cannot handle the record.
        JobsError("conn.commit() in a handler"),
        KeyError("price"),
        RecursionError(),
        FileNotFoundError("label.pdf"),
        RuntimeError("no such colour"),
        errors.NumericValueOutOfRange(),
        errors.UniqueViolation(),
        errors.CheckViolation(),
        errors.RaiseException(),
        errors.ProgramLimitExceeded(),
        errors.DatatypeMismatch(),
        errors.UndefinedFunction(),
        psycopg.DataError("text fields cannot contain NUL"),
        psycopg.ProgrammingError("cannot adapt type 'dict'"),
        Custom(),
        wrapped(errors.UniqueViolation()),
        wrapped(errors.ProgramLimitExceeded()),
        caused(KeyError("price")),
        ExceptionGroup("several", [KeyError("price")]),
    ],
    ids=repr,
)
def test_an_error_of_the_record(error):
    assert is_of_record(error)


@pytest.mark.parametrize(
    "error",
    [
        psycopg.OperationalError("the connection is lost"),
        psycopg.InterfaceError("the connection is closed"),
        errors.AdminShutdown(),
        errors.ConnectionFailure(),
        errors.CrashShutdown(),
        errors.DeadlockDetected(),
        errors.SerializationFailure(),
        errors.LockNotAvailable(),
        errors.QueryCanceled(),
        errors.TooManyConnections(),
        errors.DiskFull(),
        errors.OutOfMemory(),
        errors.ReadOnlySqlTransaction(),
        errors.InFailedSqlTransaction(),
        errors.UndefinedTable(),
        errors.UndefinedColumn(),
        errors.InsufficientPrivilege(),
        errors.InvalidSchemaName(),
        errors.FdwUnableToEstablishConnection(),
        errors.InternalError_(),
        errors.IoError(),
        RuntimeError("can't start new thread"),
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOSPC, "No space left on device"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        UnavailableError("the registry does not answer"),
        ConfigurationError("no registry is set"),
        FencedError("another process has taken over"),
        TopicError("no home topic"),
        Client("refused"),
        Timeout(),
        TimeoutError(),
        MemoryError(),
        KeyboardInterrupt(),
        SystemExit(1),
        Odd(),
        wrapped(errors.DeadlockDetected()),
        wrapped(psycopg.OperationalError("the connection is lost")),
        caused(errors.DeadlockDetected()),
        caused(ConnectionResetError()),
        ExceptionGroup("several", [KeyError("price"), ConnectionResetError()]),
    ],
    ids=repr,
)
def test_an_error_of_something_else(error):
    assert not is_of_record(error)
