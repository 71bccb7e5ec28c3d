"""The same command loads on a cluster, whichever process of it is killed."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import psycopg
import pytest

from jobs_lib import reexport
from jobs_lib.devstack.ports import free_port
from spark_bridge.session import java_home
from tests.reexport.helpers import loaded_keys, query
from tests.spark.fleet import KEYS, RANGES, Fleet
from tests.support.spark_cluster import SETTINGS, SparkCluster

ROOT = Path(__file__).parents[2]
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
    events, page = tmp_path / "events", free_port()
    events.mkdir()
    fleet.slow_down()
    worker = fleet.start(
        cluster.master,
        *("--conf", "spark.eventLog.enabled=true"),
        *("--conf", "spark.eventLog.compress=false"),
        *("--conf", f"spark.eventLog.dir={events.as_uri()}"),
        *("--conf", "spark.ui.enabled=true", "--conf", f"spark.ui.port={page}"),
        *("--conf", "spark.log.level=INFO"),
    )
    fleet.await_loaded(5, worker)
    pages = read_pages(f"http://127.0.0.1:{page}", cluster)
    commands, environments = read_processes(worker.pid, cluster)
    await_end(worker)
    assert loaded_keys(fleet.database) == KEYS

    logs = b"".join(path.read_bytes() for path in events.rglob("*") if path.is_file())
    work = b"".join(f.read_bytes() for f in cluster.folder.rglob("*") if f.is_file())
    # Each place is looked into where it has what it should.
    assert b"SparkListenerJobEnd" in logs
    assert b"spark.speculation" in pages["environment/"]
    assert b"MapInArrow" in pages["SQL/"]
    assert b"CoarseGrainedExecutorBackend" in commands
    assert b"pyspark.daemon" in commands
    assert b"SPARK_EXECUTOR_DIRS" in environments
    assert b"Running task" in work
    for place in (
        *(worker.output.encode(), logs, work, commands, environments),
        *pages.values(),
    ):
        assert password not in place


def read_pages(driver, cluster):
    """The pages of the driver, the master and the workers."""
    names = ["jobs/", "stages/", "SQL/", "executors/", "environment/"]
    names += ("SQL/execution/?id=0", "jobs/job/?id=0", "stages/stage/?id=0&attempt=0")
    addresses = {name: f"{driver}/{name}" for name in names}
    state = cluster.read()
    addresses |= {one["id"]: one["webuiaddress"] for one in state["workers"]}
    addresses |= {"master": cluster.page, "json": f"{cluster.page}/json/"}
    pages: dict[str, bytes] = {}
    for name, address in addresses.items():
        with urllib.request.urlopen(address, timeout=60) as page:
            pages[name] = page.read()
    return pages


def read_processes(driver, cluster):
    """The command lines of all processes, and the environments of the cluster's."""
    commands, environments = [], []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            environment = (process / "environ").read_bytes()
        except OSError:
            continue  # it has ended, or is another user's
        commands.append(command)
        if str(cluster.folder).encode() in environment:
            environments.append(environment)
    return b"\n".join(commands), b"\n".join(environments)


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
    fleet.slow_down()
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
    fleet.slow_down()
    killed = fleet.start(cluster.master)
    fleet.await_loaded(5, killed)
    killed.kill()
    before = fleet.read_loaded()
    worker = fleet.start(cluster.master)
    await_end(worker)
    assert f"resumed: loading {RANGES - len(before)} of" in worker.output
    assert loaded_keys(fleet.database) == KEYS
    assert before.items() <= fleet.read_loaded().items()


@pytest.mark.guarantee("X12")
def test_without_its_master_a_driver_loads_all_by_the_executors_that_it_has(
    cluster, fleet
):
    fleet.slow_down()
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
    fleet.slow_down()
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


def test_the_re_export_of_a_refused_start_is_not_loaded(cluster, fleet):
    for python, told in (
        ("/none/python", "Cannot run program"),
        (BARE, "lacks a package"),
    ):
        worker = fleet.start(cluster.master, packages="", PYSPARK_PYTHON=python)
        await_end(worker, 2)
        assert told in worker.errors[-1]
        assert "--packed FILE" in worker.errors[-1]
    assert not loaded_keys(fleet.database)
    assert reexport.status(fleet.database, "aircraft").state == "loading"
    assert query(fleet.database, "select count(*) from jobs_lib.jobs") == [(0,)]
