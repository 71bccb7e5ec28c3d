"""A broker that some tests alone use and may kill, and a way to it through a proxy."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING
from uuid import uuid4

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from jobs_lib.devstack import KafkaBroker
from jobs_lib.devstack.kafka import COMMON_PROPERTIES
from jobs_lib.devstack.ports import free_port
from tests.support.groups import Group
from tests.support.proxy import Proxy
from tests.support.records import produce
from tests.support.topics import create_topic
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAP = "listener.security.protocol.map"
_NAMES = "abcd"
"""Of groups and transactions: one in each partition of the topics that keep them."""


@dataclass
class OwnBroker:
    """The broker, and a proxy before its second listener.

    A broker gives its own address to its clients, which then connect past any proxy. So
    one listener gives the proxy's address: a client that starts at it stays behind the
    proxy.
    """

    server: KafkaBroker
    proxy: Proxy

    @property
    def bootstrap_servers(self) -> str:
        """The address of the broker itself."""
        return self.server.bootstrap_servers

    @property
    def proxied(self) -> str:
        """The address of the proxy."""
        return f"127.0.0.1:{self.proxy.port}"

    @cached_property
    def admin(self) -> AdminClient:
        """An admin client."""
        return AdminClient({"bootstrap.servers": self.bootstrap_servers})

    def create(self, partitions: int = 1, config: dict[str, str] | None = None) -> str:
        """Create a topic and return its name; it is deleted with the broker."""
        name = f"test-{uuid4().hex[:12]}"
        create_topic(self.admin, name, partitions, config)
        return name

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """SIGKILL the broker, and start it again at the end of the block."""
        self.server.kill()
        try:
            yield
        finally:
            self.server.start()


def await_coordinators(bootstrap_servers: str) -> None:
    """Wait until a new broker coordinates every group and transaction.

    It makes the topics that keep them when somebody asks for the first one. While a
    machine is busy, that takes longer than clients wait.
    """

    def answers(group: Group) -> bool:
        try:
            group.read("none", 0)
        except KafkaException:
            return False
        return True

    def begins(producer: Producer) -> bool:
        try:
            producer.init_transactions(60)
        except KafkaException:
            return False
        return True

    for name in _NAMES:
        group = Group(bootstrap_servers, name)
        wait_for(partial(answers, group), timeout=120, what="a coordinator")
        group.close()
        producer = Producer(
            {"bootstrap.servers": bootstrap_servers, "transactional.id": name}
        )
        wait_for(partial(begins, producer), timeout=120, what="a coordinator")


@contextlib.contextmanager
def start_own_broker() -> Iterator[OwnBroker]:
    """A running broker with a proxied listener; its data are deleted at the end."""
    plain, behind, controller = free_port(), free_port(), free_port()
    local = "127.0.0.1"
    with Proxy(local, behind) as proxy:
        properties = {
            _MAP: f"{COMMON_PROPERTIES[_MAP]},PROXIED:PLAINTEXT",
            "listeners": f"PLAINTEXT://{local}:{plain},PROXIED://{local}:{behind},"
            f"CONTROLLER://{local}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{local}:{plain},"
            f"PROXIED://{local}:{proxy.port}",
            "controller.quorum.voters": f"1@{local}:{controller}",
        }
        with KafkaBroker(port=plain, properties=properties) as server:
            await_coordinators(server.bootstrap_servers)
            broker = OwnBroker(server, proxy)
            # The first idempotent producer waits for a second until the broker is
            # ready.
            produce(broker.bootstrap_servers, broker.create(), [("k", 1)])
            yield broker
