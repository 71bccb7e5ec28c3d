"""A Spark cluster of three processes on this machine: one master and two workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs_lib.devstack.ports import free_port
from spark_bridge.session import java_home
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

_HOST = "127.0.0.1"
_WITHIN = 600.0
"""Seconds for the start of a JVM on a busy machine."""
_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs that live for a minute: all else costs more than it brings."""
SETTINGS = {
    "spark.driver.extraJavaOptions": _JAVA,
    "spark.executor.extraJavaOptions": _JAVA,
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
}
"""Settings of drivers that leave memory for the other processes."""


class SparkCluster:
    """A master and its workers; each is killed and started by its name."""

    workers = ("worker-0", "worker-1")

    def __init__(
        self,
        folder: Path,
        conf: Mapping[str, str] | None = None,
        host: str = _HOST,
    ) -> None:
        """Prepare a cluster whose logs and work lie in the folder.

        Args:
            folder: is empty.
            conf: settings of Spark for the three processes.
            host: the address of this machine at which they are.
        """
        self.folder = folder
        self.host = host
        self._port = free_port()
        self._page = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.conf = folder / "conf"
        """The folder of their settings."""
        self.conf.mkdir()
        lines = [f"{name} {value}\n" for name, value in (conf or {}).items()]
        (self.conf / "spark-defaults.conf").write_text("".join(lines))

    @property
    def service_file(self) -> Path:
        """The file in which workers look for the services of libpq; there is none."""
        return self.folder / "pg_service.conf"

    @property
    def master(self) -> str:
        """The address of the master."""
        return f"spark://{self.host}:{self._port}"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.push(self)
            self.mend()
            stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in list(self._processes):
            self.kill(name)

    def mend(self) -> None:
        """Start what does not run, and wait until all is there."""
        if "master" not in self._processes:
            self.start_master()
        for name in self.workers:
            if name not in self._processes:
                self.start_worker(name)
        self.await_workers(len(self.workers))

    def start_master(self) -> None:
        """Start the master, at the same address each time."""
        self._start(
            "master",
            "org.apache.spark.deploy.master.Master",
            *("--port", str(self._port), "--webui-port", str(self._page)),
        )
        wait_for(self.read, timeout=_WITHIN, what=lambda: self._tell("master"))

    def start_worker(self, name: str) -> None:
        """Start a worker of one core, and do not wait for it."""
        self._start(
            name,
            "org.apache.spark.deploy.worker.Worker",
            *("--cores", "1", "--memory", "600m", "--webui-port", "0"),
            *("--work-dir", str(self.folder / name), self.master),
        )

    def await_workers(self, number: int) -> None:
        """Wait until so many workers, and no more, are registered and alive."""
        wait_for(
            lambda: (self.read() or {}).get("aliveworkers") == number,
            timeout=_WITHIN,
            what=lambda: f"{number} workers are there: {self._tell('worker-0')}",
        )

    def await_idle(self) -> None:
        """Wait until no executor uses a core: that of a killed driver ends, too."""
        wait_for(
            lambda: (self.read() or {}).get("coresused") == 0,
            timeout=_WITHIN,
            what=lambda: f"no core is used: {self.read()}",
        )

    def kill(self, name: str) -> None:
        """SIGKILL a process and, of a worker, its executors, as if the machine died."""
        process = self._processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def read(self) -> dict[str, Any] | None:
        """Read the state of the master from its page; None if it does not answer."""
        try:
            with urllib.request.urlopen(self.page + "/json/", timeout=10) as page:
                found: dict[str, Any] = json.load(page)
        except (OSError, ValueError):
            return None
        return found

    @property
    def page(self) -> str:
        """The address of the master's page."""
        return f"http://{self.host}:{self._page}"

    def read_logs(self) -> str:
        """Read what the three processes and their executors have logged."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("worker-*/*/*/std*")]
        return "\n".join(file.read_text(errors="replace") for file in files)

    def _start(self, name: str, kind: str, *args: str) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(home / "bin" / "spark-class"), kind, "--host", self.host, *args],
                env={
                    "PATH": "/usr/bin:/bin",
                    "HOME": str(Path.home()),
                    "JAVA_HOME": str(java_home()),
                    "SPARK_HOME": str(home),
                    "SPARK_CONF_DIR": str(self.conf),
                    "SPARK_DAEMON_MEMORY": "256m",
                    "SPARK_DAEMON_JAVA_OPTS": _JAVA,
                    "SPARK_LOCAL_IP": self.host,
                    "SPARK_LOCAL_DIRS": str(self.folder / "local"),
                    "PGSERVICEFILE": str(self.service_file),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _tell(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return f"{self.read()}\n{log.read_text(errors='replace')[-2_000:]}"
