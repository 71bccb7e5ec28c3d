"""All places in which others might see what Spark was given."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from jobs_lib.devstack.ports import free_port
from tests.reexport.helpers import loaded_keys
from tests.spark.fleet import KEYS

if TYPE_CHECKING:
    from tests.spark.fleet import Fleet
    from tests.support.spark_cluster import SparkCluster


def load_and_look(
    cluster: SparkCluster, fleet: Fleet, folder: Path, **env: str
) -> dict[str, bytes]:
    """Load all keys on the cluster; return what each place has shown meanwhile.

    Each is checked for something that it should have, as a place that is looked for in
    vain shows nothing.
    """
    events, port = folder / "events", free_port()
    events.mkdir()
    options = (
        *("--conf", "spark.eventLog.enabled=true"),
        *("--conf", "spark.eventLog.compress=false"),
        *("--conf", f"spark.eventLog.dir={events.as_uri()}"),
        *("--conf", "spark.ui.enabled=true", "--conf", f"spark.ui.port={port}"),
        *("--conf", "spark.log.level=INFO"),
    )
    with fleet.slowed():
        worker = fleet.start(cluster.master, *options, **env)
        fleet.await_loaded(5, worker)
        pages = read_pages(f"http://{cluster.host}:{port}", cluster)
        commands, environments = read_processes(cluster)
    assert worker.wait(timeout=900) == 0, worker.output
    assert loaded_keys(fleet.database) == KEYS
    found = pages | {
        "output": worker.output.encode(),
        "event log": read_files(events),
        "logs and work": read_files(cluster.folder, without=cluster.conf),
        "command lines": commands,
        "environments": environments,
    }
    assert b"SparkListenerJobEnd" in found["event log"]
    assert b"spark.speculation" in pages["environment/"]
    assert any(b"MapInArrow" in page for page in pages.values())
    assert b"CoarseGrainedExecutorBackend" in commands
    assert b"pyspark.daemon" in commands
    assert b"SPARK_EXECUTOR_DIRS" in environments
    assert b"Running task" in found["logs and work"]
    return found


def read_files(folder: Path, without: Path | None = None) -> bytes:
    """Read all files of a folder, except those of another one in it."""
    files = (
        path
        for path in folder.rglob("*")
        if path.is_file() and (without is None or without not in path.parents)
    )
    return b"".join(path.read_bytes() for path in files)


def read_pages(driver: str, cluster: SparkCluster) -> dict[str, bytes]:
    """The pages of the driver, the master and the workers, and what fills them."""
    pages = {"applications": read_page(f"{driver}/api/v1/applications")}
    (application,) = json.loads(pages["applications"])
    api = f"{driver}/api/v1/applications/{application['id']}"
    names = ["jobs/", "stages/", "SQL/", "executors/", "environment/"]
    names += ["SQL/execution/?id=0", "jobs/job/?id=0", "stages/stage/?id=0&attempt=0"]
    addresses = {name: f"{driver}/{name}" for name in names}
    for name in ("sql?details=true&planDescription=true", "environment", "stages"):
        addresses[f"api {name}"] = f"{api}/{name}"
    state = cluster.read() or {}
    addresses |= {one["id"]: one["webuiaddress"] for one in state["workers"]}
    addresses |= {"master": cluster.page, "json": f"{cluster.page}/json/"}
    return pages | {name: read_page(address) for name, address in addresses.items()}


def read_page(address: str) -> bytes:
    """Read one page."""
    with urllib.request.urlopen(address, timeout=60) as page:
        text: bytes = page.read()
    return text


def read_processes(cluster: SparkCluster) -> tuple[bytes, bytes]:
    """The command lines of all processes, and the environments of the cluster's."""
    # The driver may have its folder in its environment, and has the URL.
    mark = f"PGSERVICEFILE={cluster.service_file}".encode()
    commands, environments = [], []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            environment = (process / "environ").read_bytes()
        except OSError:
            continue  # it has ended, or is another user's
        commands.append(command)
        if mark in environment.split(b"\0"):
            environments.append(environment)
    return b"\n".join(commands), b"\n".join(environments)
