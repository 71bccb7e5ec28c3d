"""The topic that is the log, and whether its settings keep what is written to it.

See PROTOCOL.md, section 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.errors import ConfigurationError
from jobs_lib.kafka.client import count_partitions
from jobs_lib.kafka.topic_settings import read_effective

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from jobs_lib.settings import Settings

WANTED = {
    "message.timestamp.type": "LogAppendTime",
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "unclean.leader.election.enable": "false",
}
"""The settings of a new log. Only the retention may be another one."""
SHORTEST_RETENTION_MS = 3_600_000
INTERVALS = 100
"""The retention has at least so many intervals: a snapshot stands in what is left."""
PARTITIONS = 8
"""What the command for a new log proposes."""
_REASONS = {
    "message.timestamp.type": "the brokers' clock alone says what is stale",
    "cleanup.policy": "a compacted log has lost claims",
    "retention.bytes": "a snapshot must stand in what is left",
    "unclean.leader.election.enable": "such an election takes back what was read",
}


def check_log(settings: Settings, topic: str, interval: float) -> int:
    """Refuse a topic that cannot be the log; return how many partitions it has.

    Args:
        settings: where Kafka is.
        topic: the log's name in Kafka.
        interval: of the members, in seconds.

    Raises:
        AccessError: Kafka does not let this client in, or denies a right.
        ConfigurationError: it does not exist, or a setting of it loses records.
        UnavailableError: no broker answers.
    """
    partitions = count_partitions(settings, topic)
    if not partitions:
        raise ConfigurationError(
            f"the coordination log {topic!r} does not exist at "
            f"{settings.kafka_bootstrap_servers}, or is not visible. Create it: "
            f"{spell_creation(topic)}"
        )
    faults = find_faults(read_effective(settings, topic, WANTED), interval)
    if faults:
        names = {one.partition("=")[0] for one in faults}
        raise ConfigurationError(
            f"the topic {topic!r} cannot be a coordination log: {'; '.join(faults)}. "
            f"Change it: {spell_change(topic, names)}"
        )
    return partitions


def find_faults(found: Mapping[str, str], interval: float) -> list[str]:
    """Say what is wrong with the settings of a topic that is to be the log.

    Args:
        found: its settings.
        interval: of the members, in seconds.
    """
    faults = [
        f"{name}={found[name]}, and it needs {WANTED[name]}, since {reason}"
        for name, reason in _REASONS.items()
        if found[name].lower() != WANTED[name].lower()
    ]
    least = max(SHORTEST_RETENTION_MS, round(INTERVALS * interval * 1000))
    retention = int(found["retention.ms"] or -1)
    if 0 <= retention < least:
        faults.append(
            f"retention.ms={retention}, and it needs -1, or {least} at least: a "
            f"snapshot must stand in what is left, with an interval of {interval:g} s"
        )
    return faults


def spell_creation(topic: str) -> str:
    """The command that creates a log."""
    given = " ".join(f"--config {name}={value}" for name, value in WANTED.items())
    return f"kafka-topics.sh --create --topic {topic} --partitions {PARTITIONS} {given}"


def spell_change(topic: str, names: Collection[str]) -> str:
    """The command that changes settings of a topic to those that a log needs."""
    given = ",".join(f"{name}={WANTED[name]}" for name in WANTED if name in names)
    return (
        f"kafka-configs.sh --alter --entity-type topics --entity-name {topic} "
        f"--add-config {given}"
    )


def refuse_growth(topic: str, before: int, now: int) -> ConfigurationError:
    """Make the error for a log whose records are of another number of partitions."""
    return ConfigurationError(
        f"the coordination log {topic!r} has {now} partitions, and its records are of "
        f"a log of {before}: partitions were added, and each record would have "
        "another place. Stop all members, and delete and create the log anew; or give "
        "all of them a new log"
    )


def refuse_create_time(topic: str, place: int, offset: int) -> ConfigurationError:
    """Make the error for a record whose time is not the broker's."""
    return ConfigurationError(
        f"the record at offset {offset} of {topic}/{place} has no append time: the "
        "coordination log had message.timestamp.type=CreateTime when it was written. "
        "Set LogAppendTime, and give the members a new log, or make this one anew"
    )
