"""Kafka Connect with Debezium's jars: a peer of the relay, and one of read models."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jobs_lib.devstack.java import find_java
from jobs_lib.devstack.places import cache_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

_GOAL = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_MAIN = "org.apache.kafka.connect.cli.ConnectStandalone"
_HERE = Path(__file__).parent
_PEERS = cache_folder() / "benchmark-peers"


class DebeziumError(Exception):
    """Debezium cannot be installed, or did not start; the message says why."""


@dataclass(frozen=True)
class Connect:
    """Kafka Connect and one connector of Debezium."""

    pom: Path
    """Names the jars."""
    folder: Path
    """Where the jars are, once they are installed."""

    @property
    def installed(self) -> bool:
        """Whether all jars are there."""
        return (self.folder / "complete").exists()

    def install(self) -> None:
        """Fetch the jars by Maven, if they are missing.

        Raises:
            DebeziumError: there is no Maven, or it failed.
        """
        if self.installed:
            return
        try:
            done = subprocess.run(
                [
                    *("mvn", "-q", "-B", "-f", str(self.pom), _GOAL),
                    *(f"-DoutputDirectory={self.folder}", "-DincludeScope=runtime"),
                ],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            raise DebeziumError("Maven (mvn) is not installed") from None
        if done.returncode:
            raise DebeziumError(f"Maven failed: {done.stdout.strip()[-2_000:]}")
        (self.folder / "complete").touch()

    def command(
        self, folder: Path, worker: Mapping[str, str], connector: Mapping[str, str]
    ) -> list[str]:
        """The command line of one process; its settings are written to a folder."""
        return [
            *(str(find_java().program), "-Xmx512m", "-cp", f"{self.folder}/*", _MAIN),
            str(_write(folder / "worker.properties", worker)),
            str(_write(folder / "connector.properties", connector)),
        ]


OUTBOX = Connect(_HERE / "relay" / "debezium" / "pom.xml", _PEERS / "debezium")
"""The connector that reads the write-ahead log."""
SINK = Connect(_HERE / "consume" / "debezium" / "pom.xml", _PEERS / "debezium-sink")
"""The connector that writes rows by JDBC."""


def _write(path: Path, properties: Mapping[str, str]) -> Path:
    lines = (f"{key}={value}\n" for key, value in properties.items())
    path.write_text("".join(lines), encoding="utf-8")
    return path
