"""Three Kafka nodes as processes of their own: each is broker and controller."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING
from uuid import uuid4

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from jobs_lib.devstack import KafkaBroker
from jobs_lib.devstack.ports import free_port
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LOCAL = "127.0.0.1"
_NODES = 3
_OFFSETS = "__consumer_offsets"
_REPLICATED = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    # Tests know which node leads what, as long as none gives it back by itself.
    "auto.leader.rebalance.enable": "false",
}
_SECONDS = 30.0


class Node(KafkaBroker):
    """A node of a cluster, which has the cluster's identifier."""

    def __init__(
        self, number: int, port: int, cluster: str, properties: dict[str, str]
    ) -> None:
        super().__init__(port=port, properties=properties)
        self.number = number
        self._cluster = cluster

    def _format(self) -> None:
        self._run_format_tool(self._cluster)


class Cluster:
    """Three nodes; one of them may be killed and nothing that two have is lost."""

    def __init__(self) -> None:
        ports = [(free_port(), free_port()) for _ in range(_NODES)]
        voters = ",".join(
            f"{number}@{_LOCAL}:{controller}"
            for number, (_, controller) in enumerate(ports, 1)
        )
        # An identifier of Kafka has 22 characters.
        cluster = f"{uuid4().hex[:21]}A"
        self.nodes = [
            Node(
                number,
                port,
                cluster,
                {
                    **_REPLICATED,
                    "node.id": str(number),
                    "controller.quorum.voters": voters,
                    "listeners": f"PLAINTEXT://{_LOCAL}:{port},"
                    f"CONTROLLER://{_LOCAL}:{controller}",
                },
            )
            for number, (port, controller) in enumerate(ports, 1)
        ]
        self._still: list[Node] = []

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A node that stops in order waits for the others.
        for node in self.nodes:
            node.kill()
            node.stop()

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of all nodes."""
        return ",".join(node.bootstrap_servers for node in self.nodes)

    @property
    def awake_servers(self) -> str:
        """The addresses of the nodes that do not stand still."""
        awake = [node for node in self.nodes if node not in self._still]
        return ",".join(f"{_LOCAL}:{node._required_port}" for node in awake)

    @cached_property
    def admin(self) -> AdminClient:
        """An admin client, which knows the nodes that do not stand still."""
        return AdminClient({"bootstrap.servers": self.awake_servers, "log_level": 0})

    def start(self) -> None:
        """Start all nodes that do not run, and wait until each replica is in sync."""
        # A node answers only when most of them run.
        with ThreadPoolExecutor(_NODES) as pool:
            for started in [pool.submit(node.start) for node in self.nodes]:
                started.result()
        wait_for(self._is_in_sync, timeout=120, what="all replicas are in sync")

    def create(
        self, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> str:
        """Create a topic that each node has, and return its name."""
        name = f"test-{uuid4().hex[:12]}"
        new = NewTopic(name, partitions, _NODES, config=dict(config or {}))
        self.admin.create_topics([new], request_timeout=_SECONDS)[name].result()
        wait_for(
            lambda: (
                name in self.admin.list_topics(timeout=_SECONDS).topics
                and self._is_in_sync()
            ),
            timeout=60,
            what=f"{name} has its replicas",
        )
        return name

    def leader_of(self, topic: str, partition: int = 0) -> Node:
        """The node that leads a partition."""

        def find() -> Node | None:
            found = self.admin.list_topics(topic, timeout=_SECONDS).topics[topic]
            leader = found.partitions[partition].leader
            return self.nodes[leader - 1] if leader > 0 else None

        leader = wait_for(find, timeout=60, what=f"{topic}/{partition} has a leader")
        assert leader is not None
        return leader

    def coordinator_of(self, group: str) -> Node:
        """The node that coordinates a group whose offsets are there already."""
        partitions = self.admin.list_topics(_OFFSETS, timeout=_SECONDS).topics[_OFFSETS]
        number = _java_hash(group) % len(partitions.partitions)
        return self.leader_of(_OFFSETS, number)

    @contextmanager
    def down(self, *nodes: Node) -> Iterator[None]:
        """SIGKILL nodes, and start them again at the end of the block."""
        for node in nodes:
            node.kill()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def still(self, node: Node) -> Iterator[None]:
        """SIGSTOP a node, and let it go on at the end of the block.

        Its connections stay, and nothing answers on them.
        """
        os.kill(node.pid, signal.SIGSTOP)
        self._still.append(node)
        # A client that has a connection to this node asks it, and gets no answer.
        self.__dict__.pop("admin", None)
        try:
            yield
        finally:
            os.kill(node.pid, signal.SIGCONT)
            self._still.remove(node)
            wait_for(self._is_in_sync, timeout=120, what="all replicas are in sync")

    def _is_in_sync(self) -> bool:
        topics = self.admin.list_topics(timeout=_SECONDS).topics.values()
        return all(
            len(partition.isrs) == len(partition.replicas) and partition.leader > 0
            for topic in topics
            for partition in topic.partitions.values()
        )


def _java_hash(text: str) -> int:
    """The hash of a text by which Kafka chooses a group's coordinator."""
    found = 0
    for one in text:
        found = (31 * found + ord(one)) & 0xFFFFFFFF
    return 0x100000000 - found if found > 0x80000000 else found & 0x7FFFFFFF
