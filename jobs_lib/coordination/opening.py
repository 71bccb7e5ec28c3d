"""Begin to read the log: from where, and what says that it must be read anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, TopicPartition

from jobs_lib.coordination.log_topic import check_log
from jobs_lib.coordination.patience import read_clock
from jobs_lib.coordination.place import Place
from jobs_lib.coordination.snapshots import find_last, is_near
from jobs_lib.errors import OffsetError
from jobs_lib.kafka.client import make_consumer
from jobs_lib.kafka.patience import read_range
from jobs_lib.kafka.refusal import SILENT, explain, is_soon_over

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from jobs_lib.errors import AccessError
    from jobs_lib.settings import Settings

_GROUP = "jobs-lib-coordination"
"""Names the client; nobody joins a group of that name."""
_ANSWER_SECONDS = 10.0
_CUT = {
    KafkaError._AUTO_OFFSET_RESET,
    KafkaError.OFFSET_OUT_OF_RANGE,
    KafkaError._LOG_TRUNCATION,
}
_GONE = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}


class ReadAnew(Exception):
    """The log must be read anew, and nobody has lost anything by that."""


class Cut(ReadAnew):
    """The log is another one than the one that was read."""


def open_log(
    settings: Settings,
    topic: str,
    interval: float,
    on_refused: Callable[[AccessError], None],
    gaps: Collection[int] = (),
) -> tuple[Consumer, list[Place]]:
    """Make a consumer that reads the log from the last snapshots on.

    Args:
        settings: where Kafka is.
        topic: the log's name in Kafka.
        interval: of the member, in seconds.
        on_refused: called when the brokers refuse the client.
        gaps: the places in which a gap was met: they begin with a snapshot behind it.

    Returns the consumer, and all places as they are where it begins.

    Raises:
        AccessError: Kafka does not let this client in, or denies a right.
        ConfigurationError: the topic cannot be the log.
        Cut: the log was cut meanwhile.
        UnavailableError: no broker answers.
    """
    partitions = check_log(settings, topic, interval)
    consumer = make_consumer(
        settings,
        _GROUP,
        on_refused,
        joins=False,
        reports_ends=True,
        sees_uncommitted=True,
    )
    try:
        places = [_begin(consumer, settings, topic, one) for one in range(partitions)]
        _use_snapshots(settings, topic, places, gaps)
        consumer.assign(
            [TopicPartition(topic, one.number, one.world.next_offset) for one in places]
        )
    except BaseException:
        consumer.close()
        raise
    return consumer, places


def raise_unless_soon_over(
    error: KafkaError, settings: Settings, topic: str, place: Place | None
) -> None:
    """Raise what does not pass by itself.

    Args:
        error: that the consumer has got instead of a record.
        settings: where Kafka is.
        topic: the log's name in Kafka.
        place: which it is about.
    """
    if error.code() in _CUT and place is not None:
        wanted = place.world.next_offset
        raise Cut(f"{topic}/{place.number} has no record at offset {wanted}")
    if error.code() in _GONE:
        raise Cut(f"Kafka does not show {topic!r}")
    if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
        return  # The client asks for a group that it never joins, and reads on.
    if error.code() not in SILENT and not is_soon_over(error):
        raise explain(error, settings, topic, "READ")


def _begin(consumer: Consumer, settings: Settings, topic: str, number: int) -> Place:
    asked_at = read_clock()
    low, end = read_range(consumer, settings, (topic, number), _ANSWER_SECONDS)
    place = Place(number, low, end, asked_at)
    # If nothing is gone, nothing is missing without a snapshot.
    place.is_partial = low > 0
    return place


def _use_snapshots(
    settings: Settings, topic: str, places: list[Place], gaps: Collection[int]
) -> None:
    """Begin behind the last snapshots; one near the start saves little."""
    ranges = {
        one.number: (one.world.next_offset, one.target)
        for one in places
        if one.is_partial
        or one.number in gaps
        or not is_near(one.world.next_offset, one.target)
    }
    try:
        found = find_last(settings, topic, _GROUP, ranges, len(places))
    except OffsetError as error:
        raise Cut(str(error)) from None
    for number, snapshot in found.items():
        places[number].restore(snapshot)
