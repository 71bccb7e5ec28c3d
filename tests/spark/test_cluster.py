"""The same command loads on a cluster, whichever process of it is killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from pyarrow import parquet

from jobs_lib import reexport
from spark_bridge.session import java_home
from tests.reexport.helpers import loaded_keys, query
from tests.spark.fleet import KEYS, RANGES, Fleet, spark_options
from tests.spark.places import load_and_look
from tests.support.spark_cluster import SETTINGS, SparkCluster

ROOT = Path(__file__).parents[2]
PLANES = """
import os
from dataclasses import dataclass

from jobs_lib import App

@dataclass
class Plane:
    tail: str
    seats: int
    version: int

app = App("planes")
planes = app.topic(
    os.environ.get("PLANES_TOPIC", "t"), value=Plane, compacted=True, partitions=4
)
app.entity(planes, source="nothing", key="tail", name="planes")(lambda _, __: {})
"""
BARE = str(Path(sys.base_prefix, "bin", "python3"))
"""The Python below the virtual environment, which has no packages of ours."""
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One master and two workers, for all of these tests."""
    with SparkCluster(tmp_path_factory.mktemp("spark-cluster")) as running:
        yield running


@pytest.fixture
def cluster(shared):
    """The cluster, whole again after what the test before has killed."""
    shared.mend()
    # One test writes it, and another looks for the password in the same folder.
    shared.service_file.unlink(missing_ok=True)
    return shared


@pytest.fixture
def fleet(database, run_process, tmp_path):
    """A table of 4,000 aircraft in 40 ranges, and the command."""
    return Fleet(database, run_process, tmp_path)


def await_end(worker, code=0):
    assert worker.wait(timeout=900) == code, worker.output


@pytest.mark.guarantee("X13", "X15")
def test_the_command_loads_on_a_cluster_and_shows_the_password_nowhere(
    cluster, fleet, tmp_path
):
    url = fleet.database.url
    password = str(psycopg.conninfo.conninfo_to_dict(url)["password"]).encode()
    for name, text in load_and_look(cluster, fleet, tmp_path).items():
        assert password not in text, name


@pytest.mark.guarantee("X13")
def test_inside_spark_submit_the_given_session_loads(cluster, fleet):
    import pyspark

    conf = [f"--conf={name}={value}" for name, value in SETTINGS.items()]
    program = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    done = subprocess.run(
        [
            *(program, "--master", cluster.master, *conf),
            *("--conf", "spark.speculation=true", "--conf", "spark.ui.enabled=false"),
            *("--conf", f"spark.executorEnv.PYTHONPATH={ROOT}"),
            *(ROOT / "tests/spark/submitted.py", fleet.database.url),
        ],
        env={
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(Path.home()),
            "JAVA_HOME": str(java_home()),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[-1] == "running 4000, and 3"
    assert loaded_keys(fleet.database) == KEYS


@pytest.mark.guarantee("X12", "X13")
def test_a_killed_worker_costs_no_key_and_loads_none_twice(cluster, fleet):
    with fleet.slowed():
        worker = fleet.start(cluster.master)
        fleet.await_loaded(5, worker)
        before = fleet.read_loaded()
        cluster.kill("worker-0")
    await_end(worker)
    assert loaded_keys(fleet.database) == KEYS
    # What was loaded was not loaded again.
    assert before.items() <= fleet.read_loaded().items()


@pytest.mark.guarantee("X12", "W32")
def test_after_a_killed_driver_another_one_goes_on_at_the_last_range(cluster, fleet):
    with fleet.slowed():
        killed = fleet.start(cluster.master)
        fleet.await_loaded(5, killed)
        killed.kill()
        cluster.await_idle()
        before = fleet.read_loaded()
    worker = fleet.start(cluster.master)
    await_end(worker)
    left = re.search(r"resumed: loading (\d+) of 40 ranges", worker.output)
    # A task of the killed one may have waited for its lock, and loaded its range.
    assert left is not None, worker.output
    assert RANGES - len(before) - 1 <= int(left[1]) <= RANGES - len(before)
    assert loaded_keys(fleet.database) == KEYS
    assert before.items() <= fleet.read_loaded().items()


@pytest.mark.guarantee("X12")
def test_without_its_master_a_driver_loads_all_by_the_executors_that_it_has(
    cluster, fleet
):
    with fleet.slowed():
        worker = fleet.start(cluster.master)
        fleet.await_loaded(5, worker)
        cluster.kill("master")
    await_end(worker)
    assert loaded_keys(fleet.database) == KEYS
    refused = fleet.start(cluster.master)
    await_end(refused, 2)
    assert "does not answer" in refused.errors[-1]
    assert len(refused.errors) == 1


def test_a_driver_without_any_executor_ends_with_the_reason(cluster, fleet):
    with fleet.slowed():
        worker = fleet.impatient(cluster.master)
        fleet.await_loaded(5, worker)
        for name in ("master", "worker-0", "worker-1"):
            cluster.kill(name)
        await_end(worker, 2)
    assert "Spark had no executor for 5 s" in worker.errors[-1]
    # Another start goes on.
    before = fleet.read_loaded()
    cluster.mend()
    await_end(fleet.start(cluster.master))
    assert loaded_keys(fleet.database) == KEYS
    assert before.items() <= fleet.read_loaded().items()


@pytest.mark.guarantee("X13", "X15")
def test_bare_workers_load_by_a_packed_library_and_a_service_file(
    cluster, fleet, tmp_path
):
    packed = tmp_path / "packed.tar.gz"
    packing = fleet.command("pack", str(packed))
    await_end(packing)
    assert f"--packed {packed}" in packing.output

    bare = {"packages": "", "PYSPARK_PYTHON": BARE}
    refused = fleet.start(cluster.master, **bare)
    await_end(refused, 2)
    assert "lacks a package" in refused.errors[-1]
    assert "--packed FILE" in refused.errors[-1]

    # The driver's service file is not that of the workers, which have none.
    mine = tmp_path / "mine.conf"
    mine.write_text(describe_service(fleet.database.url))
    bare |= {"url": "postgresql://?service=fleet", "PGSERVICEFILE": str(mine)}
    refused = fleet.start(cluster.master, "--packed", str(packed), **bare)
    await_end(refused, 2)
    assert "does not reach the database" in refused.errors[-1]
    assert reexport.status(fleet.database, "aircraft").loaded_ranges == 0

    cluster.service_file.write_text(mine.read_text())
    await_end(fleet.start(cluster.master, "--packed", str(packed), **bare))
    assert loaded_keys(fleet.database) == KEYS


@pytest.mark.guarantee("X4", "X13")
def test_bare_workers_load_a_data_frame_by_a_packed_application(
    cluster, fleet, topic, bootstrap_servers, tmp_path
):
    name = topic(4, config={"cleanup.policy": "compact"})
    (tmp_path / "planes.py").write_text(PLANES)
    files = tmp_path / "planes.parquet"
    tails = [f"N{n:05}" for n in range(2_000)]
    columns = {"tail": tails, "seats": [*range(2_000)], "version": [3] * 2_000}
    parquet.write_table(pa.table(columns), files)
    env = {
        "JOBS_LIB_APP": "planes:app",
        "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
        "PLANES_TOPIC": name,
        "PYSPARK_PYTHON": BARE,
    }
    options = (
        *("--rate", "6000", "--ranges", "8", "--parquet", str(files)),
        *spark_options(cluster.master, packages=""),
    )

    def start(*modules):
        packed = str(tmp_path / "packed.tar.gz")
        await_end(fleet.command("pack", packed, *modules, **env))
        given = ("start", "planes", *options, "--packed", packed)
        return fleet.command(*given, **env)

    refused = start()
    await_end(refused, 2)
    assert "No module named 'planes'" in refused.errors[-1]
    assert "--module NAME" in refused.errors[-1]
    assert query(fleet.database, "select from jobs_lib.reexports") == []

    await_end(start("--module", "planes"))
    assert reexport.status(fleet.database, "planes").loaded == 2_000
    assert loaded_keys(fleet.database) == tails


def describe_service(url):
    """The section of a service file that says the same as a URL."""
    parts = psycopg.conninfo.conninfo_to_dict(url)
    return "[fleet]\n" + "".join(f"{name}={value}\n" for name, value in parts.items())
