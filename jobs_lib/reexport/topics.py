"""What a topic must be for a re-export to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs_lib.errors import ReexportError
from jobs_lib.kafka.places import read_policy

if TYPE_CHECKING:
    from typing import Any

    from jobs_lib.outbox.topic import Topic
    from jobs_lib.settings import Settings


def check_compacted(settings: Settings, topic: str, otherwise: str) -> None:
    """Refuse a topic that does not keep the newest record of each key.

    Args:
        settings: where Kafka is.
        topic: by its name in Kafka. It is there.
        otherwise: what would come of it, for the error.

    Raises:
        ReexportError: it is not compacted.
        UnavailableError: no broker answers.
    """
    policy = read_policy(settings, topic)
    if "compact" not in policy.split(","):
        raise ReexportError(
            f"the topic {topic!r} is not compacted (cleanup.policy={policy}), so "
            f"{otherwise}: declare it with compacted=True, and run `jobs-lib topics "
            "apply`"
        )


def refuse_shared(topic: Topic[Any], otherwise: str) -> None:
    """Refuse a topic that holds the states of several entities.

    Args:
        topic: as the application declared it.
        otherwise: what would come of it, for the error.

    Raises:
        ReexportError: it holds those of several entities.
    """
    if len(tables := topic.sources) > 1:
        raise ReexportError(
            f"the topic {topic.name!r} holds the states of several entities (tables: "
            f"{', '.join(sorted(tables))}), so {otherwise}: give each entity a topic "
            "of its own"
        )
