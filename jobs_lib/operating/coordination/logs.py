"""Make a coordination log, and look whether a topic keeps what is written to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from confluent_kafka import KafkaException

from jobs_lib.coordination.log import Log
from jobs_lib.coordination.log_topic import (
    PARTITIONS,
    WANTED,
    check_log,
    find_faults,
    spell_change,
)
from jobs_lib.coordination.names import check_interval
from jobs_lib.errors import ConfigurationError
from jobs_lib.kafka.client import create_topic, make_admin, read_topics
from jobs_lib.kafka.refusal import explain_failed
from jobs_lib.kafka.topic_settings import read_effective
from jobs_lib.operating.coordination.session import INTERVAL, OPERATORS, name_operator

if TYPE_CHECKING:
    from jobs_lib.settings import Settings

_IN_SYNC = "min.insync.replicas"
_SAFE_REPLICAS = 3
"""With so many, two must have a record: one may be away, and one be lost."""

_CREATE = f"jobs-lib coordination create --log NAME --replication {_SAFE_REPLICAS}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a coordination log."""

    level: Literal["warn", "error"]
    """Members refuse a log with an ``error``."""
    what: str
    way_out: str


def create_log(
    settings: Settings,
    log: str,
    *,
    partitions: int = PARTITIONS,
    replication: int | None = None,
) -> bool:
    """Create a coordination log; False if it is there already, as it was asked for.

    Args:
        settings: where Kafka is.
        log: its name in Kafka.
        partitions: how many it has, for ever.
        replication: how many brokers have each record; None for Kafka's default.

    Raises:
        AccessError: Kafka does not let this client in, or denies a right.
        ConfigurationError: there is a topic of that name, with other settings or
            another number of partitions.
        TopicError: Kafka refuses; the message says what.
        UnavailableError: no broker answers.
    """
    wanted = dict(WANTED)
    if replication is not None and replication >= _SAFE_REPLICAS:
        wanted[_IN_SYNC] = "2"
    read_topics(settings)  # Says why no broker answers, if none does.
    try:
        if create_topic(
            make_admin(settings),
            log,
            partitions,
            wanted,
            replication=-1 if replication is None else replication,
        ):
            return True
    except KafkaException as error:
        told = f"the topic {log!r} cannot be created"
        raise explain_failed(error.args[0], settings, log, "CREATE", told) from None
    count = check_log(settings, log, INTERVAL)
    if count != partitions:
        raise ConfigurationError(
            f"the coordination log {log!r} exists with {count} partitions, and "
            f"{partitions} are asked for: it can never have others. Give "
            f"--partitions {count}, or another name"
        )
    return False


def find_log_faults(
    settings: Settings, log: str, interval: float = INTERVAL
) -> list[Fault]:
    """Find what is wrong with a coordination log; nothing if all is in order.

    Args:
        settings: where Kafka is.
        log: its name in Kafka.
        interval: the longest one of its members, in seconds.

    Raises:
        AccessError: Kafka does not let this client in, or denies a right.
        ConfigurationError: the interval is out of bounds.
        UnavailableError: no broker answers, or the log cannot be read in time.
    """
    check_interval(interval)
    there = read_topics(settings).get(log)
    if there is None or there.error is not None:
        return [
            Fault(
                "error",
                f"the coordination log {log!r} does not exist at "
                f"{settings.kafka_bootstrap_servers}, or is not visible",
                f"jobs-lib coordination create --log {log}",
            )
        ]
    found = read_effective(settings, log, [*WANTED, _IN_SYNC])
    faults = [
        Fault("error", one, spell_change(log, {one.partition("=")[0]}))
        for one in find_faults(found, interval)
    ]
    if not faults:
        faults += _find_read_faults(settings, log, interval)
    replicas = min(len(one.replicas) for one in there.partitions.values())
    return faults + _find_risks(log, replicas, found[_IN_SYNC])


def _find_read_faults(settings: Settings, log: str, interval: float) -> list[Fault]:
    """Read the log: its records say how many partitions it had."""
    sender = name_operator(settings, OPERATORS)
    try:
        with Log(settings, log, sender, interval=interval, only_reads=True):
            return []
    except ConfigurationError as error:
        return [Fault("error", str(error), f"a new log: {_CREATE}")]


def _find_risks(log: str, replicas: int, in_sync: str) -> list[Fault]:
    """Find what members take, and what loses the log together with one broker."""
    if replicas < 2:
        return [
            Fault(
                "warn",
                f"{log!r} has one replica: all claims and positions are lost with the "
                "disk of its broker",
                f"give it {_SAFE_REPLICAS} by kafka-reassign-partitions.sh, or make a "
                f"new log: {_CREATE}",
            )
        ]
    if in_sync.isdigit() and int(in_sync) < 2:
        return [
            Fault(
                "warn",
                f"{_IN_SYNC}={in_sync}: what one broker alone has is acknowledged, and "
                "lost with its disk",
                "kafka-configs.sh --alter --entity-type topics --entity-name "
                f"{log} --add-config {_IN_SYNC}=2",
            )
        ]
    return []
