"""Put records into a producer's transaction, and explain those that it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException

from jobs_lib.kafka.refusal import OF_RECORD, OF_TOPIC
from jobs_lib.masking import describe
from jobs_lib.outbox.block import KeptBack, Refusal, make_messages
from jobs_lib.schemas.json_limits import Unreadable

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from jobs_lib.outbox.block import Message, OutboxRecord, Records

_ANY_PARTITION = -1
"""The partitioner chooses."""
_NOW = 0
_HEADERS_WAY_OUT = (
    "write headers as a JSON object of texts, and drop this row with "
    "`jobs-lib outbox drop`"
)


def produce(producer: Producer, records: Records) -> tuple[int, Exception] | None:
    """Put records into the transaction; returns the first that is refused, and why.

    Rows are also written by SQL, so a row may hold values that the client cannot take,
    such as a header that is a number. Only that row is refused.

    Raises:
        KafkaException: the error is about no record.
    """
    put = producer.produce
    place = 0
    try:
        for place, message in enumerate(make_messages(records), 1):
            topic, value, key, headers = message
            try:
                # Positional arguments: keywords would take a quarter of the call.
                put(topic, value, key, _ANY_PARTITION, None, None, _NOW, headers)
            except BufferError:
                refused = _produce_later(producer, message)
                if refused is not None:
                    return place - 1, refused
            except Exception as error:
                return place - 1, _about_record(error)
    # The record after the last one cannot even be made into a message.
    except (TypeError, ValueError, AttributeError) as error:
        return place, error
    return None


def _produce_later(producer: Producer, message: Message) -> Exception | None:
    """Put a record into a queue that is full; returns why it is refused, if it is.

    Raises:
        KafkaException: the error is about no record.
    """
    topic, value, key, headers = message
    while True:
        is_empty = not len(producer)
        try:
            producer.produce(
                topic, value, key, _ANY_PARTITION, None, None, _NOW, headers
            )
        except BufferError as error:
            if is_empty:
                return error  # this record alone is larger than the queue
            producer.poll(0.05)
        except Exception as error:
            return _about_record(error)
        else:
            return None


def _about_record(error: Exception) -> Exception:
    """Return the error if it is about the record that should be sent.

    Raises:
        KafkaException: it is about no record.
    """
    if isinstance(error, KafkaException) and not is_refusal(error.args[0]):
        raise error
    return error


def produce_from(
    producer: Producer, records: list[OutboxRecord], place: int
) -> tuple[list[OutboxRecord], list[Refusal]]:
    """Go on behind a record that was refused at once, in the same transaction.

    The client has not taken the refused record, so it is not in the transaction.
    Thousands may be refused, and a new transaction for each would send all others as
    often.

    Returns the records that are in the transaction, and the refusals.
    """
    sent = records[:place]
    refusals: list[Refusal] = []
    back = KeptBack()
    for record in records[place:]:
        if record in back:
            continue
        found = produce(producer, [record])
        if found is None:
            sent.append(record)
        else:
            refusal = explain(record, found[1])
            refusals.append(refusal)
            back.add(refusal)
    return sent, refusals


def is_refusal(error: KafkaError) -> bool:
    return not error.fatal() and error.code() in OF_RECORD | OF_TOPIC


def explain(record: OutboxRecord, error: KafkaError | Exception) -> Refusal:
    if isinstance(error, KafkaException):
        error = error.args[0]
    if isinstance(error, KafkaError):
        text = f"{error.name()}: {error.str()}"
        return Refusal(record, text, error.code() in OF_TOPIC)
    return Refusal(record, _explain_row(record, error))


def _explain_row(record: OutboxRecord, error: Exception) -> str:
    """Say what is wrong with a row that the client cannot take, and the way out."""
    if isinstance(error, BufferError):
        return (
            "the record alone is larger than the client's queue: raise "
            "`queue.buffering.max.kbytes` in JOBS_LIB_KAFKA"
        )
    headers: Any = record.more
    if isinstance(headers, Unreadable):
        return f"the row's headers are JSON that Python cannot read: {_HEADERS_WAY_OUT}"
    if headers and not isinstance(headers, dict):
        kind = type(headers).__name__
        return f"the row's headers are a JSON {kind}: {_HEADERS_WAY_OUT}"
    for name, value in (headers or {}).items():
        if value is not None and not isinstance(value, str):
            kind = type(value).__name__
            return f"the header {name!r} is of type {kind}: {_HEADERS_WAY_OUT}"
    return f"Kafka's client cannot take the row: {describe(error)}"
