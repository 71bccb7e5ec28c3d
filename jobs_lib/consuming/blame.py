"""Whether an error is the record's fault, or that of a server or of the set-up.

Only a record that is at fault itself may be skipped. All others are tried again: a lost
connection, a deadlock or a missing table would skip one record after the other.
"""

from __future__ import annotations

import errno

from jobs_lib.errors import JobsError, PayloadError, RecordError, StoredPayloadError
from jobs_lib.masking import find_errors

_INNOCENT = {
    "08",  # the connection
    "0A",  # a plan that does not fit any more, or a server without that feature
    "25",  # the transaction: it may only read, such as on a standby
    "26",  # a prepared statement that a pooler has lost
    "28",  # the role
    "3D",  # the database
    "3F",  # the schema
    "40",  # a deadlock, or a serialization failure
    "42",  # a table, a column or a right that is missing: the set-up
    "53",  # memory, disk, connections
    "55",  # a lock
    "57",  # an operator, a time limit
    "58",  # the system
    "F0",  # the server's files
    "HV",  # a foreign server
    "JB",  # this library: another process has the partition
    "XX",  # the server itself
}
"""Classes of SQLSTATEs that say nothing of a record."""
_OF_TYPES = {"42804", "42846", "42883", "42P18"}
"""The exceptions: a value of the record has another type than the statement needs."""
_NAMES = {
    *("OperationalError", "InterfaceError"),  # drivers, without an answer of the server
    *("ConnectionError", "TimeoutError", "ConnectError", "NetworkError"),
    *("Timeout", "TimeoutException"),
    "MemoryError",
}
"""Classes of errors that say nothing of a record: Python's, those of drivers, and of
the usual clients of other services."""
_ERRNOS = {
    *(errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM),  # the process's limits
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS),  # the disk
}
"""Errors of the operating system that say nothing of a record."""
_NO_THREAD = "can't start new thread"


def is_of_record(error: BaseException) -> bool:
    """Whether the record is at fault, as far as its error, and what caused it, tell."""
    try:
        return not any(_is_innocent(one) for one in find_errors(error))
    except Exception:  # any code may run behind an error's attributes
        return False


def _is_innocent(error: BaseException) -> bool:
    """Whether this one error says that something else than the record has failed."""
    # Not by isinstance, which asks the error, and that is the application's code.
    kind = type(error)
    if not issubclass(kind, Exception):
        return True
    if issubclass(kind, JobsError):
        return kind is not JobsError and not issubclass(
            kind, RecordError | PayloadError | StoredPayloadError
        )
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if state:
        return state[:2] in _INNOCENT and state not in _OF_TYPES
    if issubclass(kind, OSError) and getattr(error, "errno", None) in _ERRNOS:
        return True
    if kind is RuntimeError and error.args[:1] == (_NO_THREAD,):
        return True
    # SQLAlchemy's: what it was raised from says more.
    if getattr(error, "orig", None) is not None:
        return False
    return not _NAMES.isdisjoint(one.__name__ for one in kind.__mro__)
