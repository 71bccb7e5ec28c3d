"""One Spark session for all of these tests, since its start takes ten seconds."""

from __future__ import annotations

import warnings

import pytest

from spark_bridge import open_session
from tests.support.py4j import drop_connection


def pytest_collection_modifyitems(items):
    """Add the marker to each test that uses the session, and give it time.

    On a busy machine Spark's start takes a minute, and so does its first job.
    """
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


def pytest_runtest_makereport(item, call):
    """Let a test that broke a call off, as a timeout does, fail no other one."""
    session = getattr(item, "funcargs", {}).get("spark")
    if call.excinfo is not None and session is not None:
        drop_connection(session)


@pytest.fixture(scope="session")
def event_log(tmp_path_factory):
    """The folder of Spark's event log."""
    return tmp_path_factory.mktemp("spark-events")


@pytest.fixture(scope="session")
def spark(event_log):
    """A local session of two threads that tries a failed task again."""
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": event_log.as_uri(),
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
    }
    with warnings.catch_warnings():
        # These are pyspark's own warnings, about its sockets and pandas.
        warnings.simplefilter("ignore")
        with open_session("local[2,4]", settings) as session:
            yield session
