"""A consumer group without members, that commits what a test says."""

from __future__ import annotations

from uuid import uuid4

from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.support.waiting import wait_for


class Group:
    """A group that other consumers wait for."""

    def __init__(self, bootstrap_servers: str, name: str | None = None) -> None:
        """Take the name, or one of its own."""
        self.name = name or f"group-{uuid4().hex[:8]}"
        self._client = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": self.name,
                "enable.auto.commit": False,
            }
        )

    def commit(self, topic: str, *offsets: int) -> None:
        """Commit an offset for each partition of a topic, from 0 on.

        A broker that has just started may not be the coordinator yet.
        """
        self.commit_soon(topic, dict(enumerate(offsets)))

    def commit_one(self, topic: str, offsets: dict[int, int]) -> None:
        """Commit offsets by partition."""
        places = [TopicPartition(topic, *place) for place in offsets.items()]
        self._client.commit(offsets=places, asynchronous=False)

    def commit_soon(self, topic: str, offsets: dict[int, int]) -> None:
        """The same, once the broker has come back."""

        def commit() -> bool:
            try:
                self.commit_one(topic, offsets)
            except KafkaException:
                return False
            return True

        wait_for(commit, timeout=60, what="the broker takes the offsets")

    def read(self, topic: str, partition: int) -> int:
        """Ask the broker how far the group is; negative if it has committed nothing."""
        (found,) = self._client.committed([TopicPartition(topic, partition)], 30)
        return int(found.offset)

    def close(self) -> None:
        """Close the client."""
        self._client.close()
