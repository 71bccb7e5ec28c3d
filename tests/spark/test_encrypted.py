"""Over a network, a password goes to Spark's workers only if Spark encrypts it."""

from __future__ import annotations

import secrets
import socket

import psutil
import psycopg
import pytest

from jobs_lib import reexport
from jobs_lib.errors import ReexportError
from spark_bridge.master import is_here
from tests.spark.fleet import Fleet
from tests.spark.places import load_and_look
from tests.support.spark_cluster import SparkCluster

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(2_700)]


@pytest.fixture(scope="module")
def secret():
    """What the processes of a cluster share."""
    return secrets.token_hex(16)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, secret):
    """A cluster that encrypts, at an address that other machines could reach."""
    addresses = (one for ones in psutil.net_if_addrs().values() for one in ones)
    hosts = [one.address for one in addresses if one.family == socket.AF_INET]
    host = next((one for one in hosts if not one.startswith("127.")), None)
    if host is None:
        pytest.skip("this machine has no address but its own")
    conf = {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secret,
        "spark.network.crypto.enabled": "true",
        "spark.io.encryption.enabled": "true",
    }
    folder = tmp_path_factory.mktemp("spark-encrypted")
    with SparkCluster(folder, conf, host) as running:
        yield running


@pytest.fixture
def fleet(database, run_process, tmp_path):
    """A table of aircraft, and the command."""
    return Fleet(database, run_process, tmp_path)


@pytest.mark.guarantee("X13", "X15", "FS13")
def test_encrypted_traffic_may_have_the_password_and_shows_it_nowhere(
    cluster, fleet, secret, tmp_path
):
    assert not is_here(cluster.master)
    url = fleet.database.url
    password = str(psycopg.conninfo.conninfo_to_dict(url)["password"]).encode()
    places = load_and_look(
        *(cluster, fleet, tmp_path),
        SPARK_CONF_DIR=str(cluster.conf),
        SPARK_LOCAL_IP=cluster.host,
    )
    assert b"spark.network.crypto.enabled" in places["api environment"]
    for name, text in places.items():
        assert password not in text, name
        # Spark itself gives this one to its executors by their environment.
        assert secret.encode() not in text or name == "environments", name


@pytest.mark.guarantee("X15", "FS13")
def test_the_same_without_encryption_is_refused_with_both_ways_out(
    cluster, fleet, tmp_path
):
    refused = fleet.start(cluster.master, SPARK_CONF_DIR=str(tmp_path))
    assert refused.wait(timeout=600) == 2, refused.output
    (line,) = refused.errors
    assert "postgresql://?service=NAME" in line
    assert "spark.authenticate and spark.network.crypto.enabled" in line
    with pytest.raises(ReexportError, match="never re-exported"):
        reexport.status(fleet.database, "aircraft")
