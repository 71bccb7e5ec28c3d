"""Every error that jobs_lib raises on purpose.

    JobsError
    ├── ConfigurationError        a setting is missing, unknown or out of range
    ├── UnavailableError          a server does not answer
    │   ├── AccessError           Kafka refuses who asks, or what is asked
    │   ├── GrowingError          a stream gets more partitions, and takes no events
    │   ├── UnknownCommitError    the connection was lost while committing
    │   └── UnknownPublishError   Kafka has not acknowledged an event in time
    ├── SchemaVersionError        the tables are older or newer than this release
    ├── DevStackError             the embedded PostgreSQL or Kafka could not be had
    ├── EnqueueError              refused before any SQL was sent
    │   ├── NoTransactionError
    │   ├── PayloadError
    │   ├── PlaceError        its type waits for groups, and it comes from no record
    │   └── TopicError
    ├── StoredPayloadError        a waiting job does not fit its handler any more
    ├── OutOfTurnError            a job would commit before one ahead of it in its group
    ├── RecordError               a record cannot be read, or nobody handles its type
    ├── RefusedError              a check of a stream refuses an event
    ├── RequestConflictError      the id of a request was used with another body
    ├── AnswerError               a read model cannot be asked, or given an entity, so
    ├── OffsetError               a part of a topic cannot be read as it was asked
    ├── FencedError               another process owns what this one tried to change
    ├── OperatingError            an operator's command cannot be carried out
    └── ReexportError             a re-export cannot be started or changed

Each message says what happened, with the values, and the way out. None of them ever
carries a password: see :func:`jobs_lib.masking.masked_url`.
"""

from __future__ import annotations


class JobsError(Exception):
    """Base of all errors of this library."""

    subject: str | None = None
    """A cause that fails many loops at once, such as Kafka: it gets one log line."""


class ConfigurationError(JobsError):
    """A setting is missing, unknown or out of range."""


class UnavailableError(JobsError):
    """A needed server does not answer."""

    lost_since: float | None = None
    """When a job's own transaction that lost its connection had begun; minus infinity
    if the server refused a statement of it."""
    is_of_job: bool = False
    """Whether a statement has failed by which the library runs a job: its handler is
    not at fault, and no rule of its type counts."""
    is_passing: bool = False
    """Whether the library has found a server away that a handler needs: its job waits
    without spending an attempt."""


class AccessError(UnavailableError):
    """Kafka refuses a password or certificate, or lacks one, or denies a permission."""


class GrowingError(UnavailableError):
    """A stream gets more partitions, and takes no events meanwhile.

    Nothing was sent.
    """


class UnknownCommitError(UnavailableError):
    """The connection was lost while committing: nobody knows whether it committed."""


class UnknownPublishError(UnavailableError):
    """Kafka has not acknowledged an event in time: nobody knows whether it has it.

    The same call with the same request id finds that out before it sends again.
    """


class SchemaVersionError(JobsError):
    """The tables in the database do not fit this release."""


class DevStackError(JobsError):
    """The embedded PostgreSQL or Kafka could not be fetched, started or stopped."""


class EnqueueError(JobsError):
    """Refused before any SQL was sent: the caller's transaction is intact."""


class NoTransactionError(EnqueueError):
    """The connection has no transaction open and would not open one."""


class PayloadError(EnqueueError):
    """The payload does not fit the handler's signature, or cannot be stored."""


class PlaceError(EnqueueError):
    """Its type waits for other groups, and no record says how far they must be."""


class StoredPayloadError(JobsError):
    """A waiting job does not fit its declaration any more; the job is kept."""


class OutOfTurnError(JobsError):
    """A job's transaction is asked for before that of a job ahead of it in its group.

    Both jobs are items of one call of a batch handler. The transaction was not opened,
    and an item that fails by this error runs later, which costs it no attempt.
    """


class TopicError(EnqueueError):
    """No home topic is declared, or the topic is not known."""


class RecordError(JobsError):
    """A record cannot be read, or nobody handles its type; its partition waits."""


class RefusedError(JobsError):
    """An event must not be published; raised by the check of a stream.

    Nothing was sent. The text is the application's.
    """


class RequestConflictError(JobsError):
    """The id of a request was used before, with another key or value.

    Nothing was sent.
    """


class AnswerError(JobsError):
    """A read model cannot be asked, or given an entity, as it was tried.

    The caller's transaction is intact, and nothing was written.
    """


class OffsetError(JobsError):
    """A part of a partition cannot be read: its records are gone, or do not come.

    Attributes:
        partition: the topic and the number of the partition.
        position: the offset at which to go on; None if it is none of an offset.
        start: the offset of the oldest record; None if it was not asked for.
        end: the offset that the next record will have, likewise.
    """

    def __init__(
        self,
        text: str,
        partition: tuple[str, int],
        position: int | None,
        start: int | None = None,
        end: int | None = None,
    ) -> None:
        super().__init__(text)
        self.partition = partition
        self.position = position
        self.start = start
        self.end = end


class FencedError(JobsError):
    """Another process owns what this one tried to change; nothing was changed."""


class OperatingError(JobsError):
    """An operator's command cannot be carried out, or not to its end.

    Nothing was changed by it unless it says so.
    """


class ReexportError(JobsError):
    """A re-export cannot be started or changed as asked."""
