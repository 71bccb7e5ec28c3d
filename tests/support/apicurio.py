"""A real schema registry in memory: Apicurio, with Confluent's interface."""

from __future__ import annotations

import tarfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jobs_lib.devstack.jars import Jar, ensure_jars
from jobs_lib.devstack.java import find_java
from jobs_lib.devstack.places import temporary_folder
from jobs_lib.devstack.server import Server

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_REQUEST_SECONDS = 2.0


@dataclass(frozen=True)
class Bundle(Jar):
    """A program together with all of its jars."""

    @property
    def path(self) -> str:
        """Its path in a Maven repository."""
        return super().path.removesuffix(".jar") + "-all.tar.gz"


APICURIO = Bundle(
    "io.apicurio",
    "apicurio-registry-app",
    "3.3.3",
    "8bc6751c76d963734224b01d5e7f84ccb3cb61c87d3bd77c36c35f10a5cbed63",
)


class Apicurio(Server):
    """Apicurio on 127.0.0.1. It loses its data when it stops. Needs Java 21."""

    name: ClassVar[str] = "Apicurio"
    _port_option: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__(None, port=None, detached=False)

    @property
    def address(self) -> str:
        """The registry's URL for clients."""
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def _make_folder(self) -> Path:
        return temporary_folder(None, "jobs-lib-apicurio-")

    def _prepare(self, port: int) -> None:
        if not (self.folder / "quarkus-run.jar").exists():
            (bundle,) = ensure_jars([APICURIO])
            with tarfile.open(bundle) as archive:
                archive.extractall(self.folder, filter="data")

    def _command(self, port: int) -> Sequence[str]:
        return [
            str(find_java().program),
            "-Xmx384m",
            "-XX:TieredStopAtLevel=1",
            "-Dquarkus.http.host=127.0.0.1",
            f"-Dquarkus.http.port={port}",
            "-jar",
            str(self.folder / "quarkus-run.jar"),
        ]

    def _answers(self, port: int) -> bool:
        url = f"http://127.0.0.1:{port}/apis/ccompat/v7/subjects"
        try:
            with urllib.request.urlopen(url, timeout=_REQUEST_SECONDS) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _settle(self) -> None:
        """Do nothing more."""
