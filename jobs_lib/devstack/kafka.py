"""A real Apache Kafka broker, one node in KRaft mode."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import uuid
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Self

from jobs_lib.devstack.aot import use_cache
from jobs_lib.devstack.jars import ensure_jars, kafka_jars, lock_digest
from jobs_lib.devstack.java import find_java
from jobs_lib.devstack.places import cache_folder, close, temporary_folder
from jobs_lib.devstack.ports import free_port
from jobs_lib.devstack.server import Server
from jobs_lib.errors import DevStackError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jobs_lib.devstack.jars import Progress

#: A small heap and only the quick compiler: the JVM starts fast and stays under 200 MB.
SMALL_JVM: tuple[str, ...] = (
    "-Xms64m",
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
)

#: For benchmarks: a larger heap, and the compiler that makes the fastest code.
FAST_JVM: tuple[str, ...] = ("-Xms512m", "-Xmx512m", "-XX:+UseSerialGC")

#: Settings of every broker here.
COMMON_PROPERTIES: Mapping[str, str] = MappingProxyType(
    {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        # A topic comes from its declaration, never from a typing error.
        "auto.create.topics.enable": "false",
        # After a crash the old registration must expire first: 11 s with the defaults.
        # Much less is unsafe. A busy machine can delay the broker's heartbeats that
        # long: then it loses all its partitions, and every producer its coordinator.
        "broker.session.timeout.ms": "6000",
        "broker.heartbeat.interval.ms": "300",
        # Twice a second an idle broker would write a record and flush it: a quarter of
        # all that it costs.
        "metadata.max.idle.interval.ms": "5000",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "4",
        # The default takes 128 MB of heap.
        "log.cleaner.dedupe.buffer.size": "2097152",
    }
)

# Options of the JVM that only formats the folder.
_FORMAT_JVM = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_REQUEST_SECONDS = 1.0
_CACHE_SECONDS = 120.0
"""In this time even a busy machine writes the cache of Java's classes."""
_CHECKPOINT = "bootstrap.checkpoint"
_FORMATTED = (
    "process.roles",
    "node.id",
    "log.dir",
    "log.dirs",
    "metadata.log.dir",
    "controller.quorum.bootstrap.servers",
    "unstable.api.versions.enable",
    "unstable.feature.versions.enable",
)
"""All settings that make a difference to the files of a new data folder."""


class KafkaBroker(Server):
    """One Kafka broker that is its own controller. It listens on 127.0.0.1 only.

    - folder: where data and log are kept; None for a temporary one (see `ephemeral`).
    - port: the port to use; None for any free one.
    - properties: broker settings on top of, or instead of, COMMON_PROPERTIES.
    - jvm: options of the JVM. Defaults to SMALL_JVM.
    - detached: let it outlive this process. Defaults to False.
    - progress: called as (jars present, all jars) while jars are fetched.

    The first start on a machine downloads the broker (42 MB), and runs it once more to
    keep its classes (62 MB) for quick starts. `start` raises
    DevStackError when jars cannot be fetched, Java is missing or too old, a fixed port
    is taken or the broker does not start.
    """

    name: ClassVar[str] = "Kafka"
    _port_option: ClassVar[str] = "--kafka-port"

    def __init__(
        self,
        folder: Path | None = None,
        *,
        port: int | None = None,
        properties: Mapping[str, str] | None = None,
        jvm: Sequence[str] = SMALL_JVM,
        detached: bool = False,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(folder, port=port, detached=detached)
        self.properties = {**COMMON_PROPERTIES, **(properties or {})}
        self.jvm = tuple(jvm)
        self._progress = progress
        self._java: list[str] = []
        self._cache: tuple[str, ...] | None = None

    @classmethod
    def ephemeral(
        cls,
        *,
        properties: Mapping[str, str] | None = None,
        jvm: Sequence[str] = SMALL_JVM,
    ) -> Self:
        """A broker for tests. It loses its data, and never outlives this process."""
        return cls(properties=properties, jvm=jvm)

    @property
    def bootstrap_servers(self) -> str:
        """What clients get as `bootstrap.servers`."""
        return f"127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """What clients get as `bootstrap.servers`."""
        return self.bootstrap_servers

    def _make_folder(self) -> Path:
        if self._wanted is None:
            return temporary_folder(None, "jobs-lib-kafka-")
        self._wanted.mkdir(parents=True, exist_ok=True)
        return self._wanted

    def _prepare(self, port: int) -> None:
        close(self.folder)
        if not self._java:
            java = find_java()
            jars = ensure_jars(kafka_jars(), self._progress)
            self._java = [str(java.program), "-cp", os.pathsep.join(map(str, jars))]
            if self._cache is None:
                self._cache = use_cache(java, _run_once)
        # Written at every start, since the ports may have changed.
        self._settings_file.write_text(self._settings(port), encoding="utf-8")
        if not (self.folder / "data" / "meta.properties").exists():
            self._format()

    @property
    def _settings_file(self) -> Path:
        return self.folder / "server.properties"

    def _settings(self, port: int) -> str:
        controller = free_port()
        own = {
            "listeners": f"PLAINTEXT://127.0.0.1:{port},"
            f"CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            # A backslash begins an escape in this format.
            "log.dirs": str(self.folder / "data").replace("\\", "\\\\"),
        }
        lines = (
            f"{name}={value}\n" for name, value in {**own, **self.properties}.items()
        )
        return "".join(lines)

    def _format(self) -> None:
        """Make the data folder, as the broker's own tool does.

        The tool writes the same files each time, except for two identifiers. So it runs
        once on a machine, and its files are kept beside the jars. That saves the start
        of a JVM, a second, at every first start in a new folder.
        """
        data, cluster = self.folder / "data", _new_identifier()
        usual = all(
            self.properties.get(name) == COMMON_PROPERTIES.get(name)
            for name in _FORMATTED
        )
        kept = cache_folder() / "jars" / f"format-{lock_digest()[:16]}" / _CHECKPOINT
        if usual and kept.exists():
            data.mkdir(exist_ok=True)
            shutil.copyfile(kept, data / _CHECKPOINT)
            # Written last, since this file marks a complete folder.
            (data / "meta.properties").write_text(
                f"version=1\ncluster.id={cluster}\nnode.id=1\n"
                f"directory.id={_new_identifier()}\n",
                encoding="ascii",
            )
            return
        self._run_format_tool(cluster)
        if usual:
            kept.parent.mkdir(parents=True, exist_ok=True)
            draft = kept.with_name(f"{_CHECKPOINT}.{os.getpid()}")
            shutil.copyfile(data / _CHECKPOINT, draft)
            draft.replace(kept)

    def _run_format_tool(self, cluster: str) -> None:
        made = subprocess.run(
            [
                *(self._java[0], *_FORMAT_JVM, *self._java[1:]),
                *("kafka.tools.StorageTool", "format", "--ignore-formatted"),
                # One argument: an identifier may begin with a hyphen.
                *(f"--cluster-id={cluster}", "-c", str(self._settings_file)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            last = "\n".join(made.stdout.strip().splitlines()[-10:])
            raise DevStackError(f"Kafka's storage could not be formatted:\n{last}")

    def _command(self, port: int) -> Sequence[str]:
        return [
            self._java[0],
            *self.jvm,
            *(self._cache or ()),
            "-Dorg.slf4j.simpleLogger.showDateTime=true",
            "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss,SSS",
            *self._java[1:],
            "kafka.Kafka",
            str(self._settings_file),
        ]

    def _answers(self, port: int) -> bool:
        import socket

        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        try:
            # A bare connection first: Kafka's client waits and logs when it is refused.
            socket.create_connection(("127.0.0.1", port), _REQUEST_SECONDS).close()
            client = AdminClient(
                {"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0}
            )
            return bool(client.list_topics(timeout=_REQUEST_SECONDS).brokers)
        except (OSError, KafkaException):
            return False

    def _settle(self) -> None:
        """Do nothing: each application makes the topics that it declares."""


def _run_once(options: tuple[str, ...]) -> None:
    """Start a broker with options of the JVM, and stop it as soon as it answers."""
    broker = KafkaBroker.ephemeral()
    broker._cache = options
    with broker:
        broker.process.signal(signal.SIGTERM)
        if not broker.process.wait(_CACHE_SECONDS):
            # It is killed, and what it has written is not whole.
            raise DevStackError(f"{broker.name} did not stop in order")


def _new_identifier() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
