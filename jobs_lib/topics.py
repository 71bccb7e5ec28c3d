"""Topics: recorded for the origins, and created in Kafka."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from jobs_lib.errors import TopicError
from jobs_lib.kafka.client import count_partitions, create_topic, make_admin

if TYPE_CHECKING:
    from jobs_lib.app import App


def declare_topic(
    app: App, topic: str, *, home: bool = False, partitions: int | None = None
) -> None:
    """Record a topic, and how many partitions count for the origins of its groups.

    Args:
        app: whose database and Kafka.
        topic: the topic's name.
        home: whether groups get their origins from it.
        partitions: defaults to what Kafka has; an existing record is never changed.

    Raises:
        TopicError: Kafka has no such topic, or jobs wait under another home topic.
    """
    database = app.database()
    with database.connect("topics") as connection, connection.transaction():
        known = {
            name: (count, is_home)
            for name, count, is_home in connection.execute(
                database.queries["read_topics"]
            )
        }
        if topic not in known:
            count = partitions or count_partitions(app.settings, topic)
            if not count:
                raise TopicError(
                    f"Kafka has no topic {topic!r} at "
                    f"{app.settings.kafka_bootstrap_servers}: create it first, or give "
                    "the number of partitions"
                )
            connection.execute(
                database.queries["declare_topic"],
                {"topic": topic, "partitions": count},
            )
        if home and not known.get(topic, (0, False))[1]:
            connection.execute(database.queries["move_home"], {"topic": topic})
            moved = connection.execute(database.queries["set_home"], {"topic": topic})
            if not moved.rowcount:
                raise TopicError(
                    f"{topic!r} cannot become the home topic while jobs wait under the "
                    "old one: their groups would be split. Let an executor finish them "
                    "first"
                )


def create_topics(app: App) -> list[str]:
    """Create the topics that the app declares; returns those that were missing.

    Raises:
        TopicError: a broker refuses one of them.
    """
    admin = make_admin(app.settings)
    created = []
    for topic in app.topics.values():
        try:
            if create_topic(
                admin, topic.name, topic.partitions, compacted=topic.compacted
            ):
                created.append(topic.name)
        except KafkaException as error:
            raise TopicError(
                f"the topic {topic.name!r} cannot be created: {error.args[0].str()}"
            ) from None
    return created
