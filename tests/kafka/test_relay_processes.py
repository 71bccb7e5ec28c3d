"""Several relay processes run under one parent."""

from __future__ import annotations

import os
import signal

import pytest

from jobs_lib.coordination.log_topic import WANTED
from tests.support.apps import QUICK, make_app
from tests.support.pods import count_shares
from tests.support.records import read_topic

pytestmark = pytest.mark.expects("fenced")

APP = """
from jobs_lib import App

app = App("several")
app.topic("{topic}", value=int)
"""


@pytest.fixture
def app(database_url, bootstrap_servers):
    """An app with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)


@pytest.fixture
def start(tmp_path, database_url, bootstrap_servers, run_process):
    """A function that starts the parent of two relay processes."""

    def start(topic: str, **settings: str):
        (tmp_path / "several.py").write_text(APP.format(topic=topic))
        given = (QUICK | settings).items()
        quick = {f"JOBS_LIB_{name.upper()}": str(one) for name, one in given}
        return run_process(
            *("-m", "jobs_lib.cli", "relay", "several:app", "--processes", "2"),
            env={
                **quick,
                "JOBS_LIB_DATABASE_URL": database_url,
                "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
                "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}",
            },
        )

    return start


@pytest.mark.guarantee("M24")
@pytest.mark.parametrize("ownership", ["database", "coordination"])
def test_two_processes_share_the_shards_and_stop_on_one_signal(
    start, app, admin, topic, connect, bootstrap_servers, wait_for, ownership
):
    numbers = app.topic(topic(4), value=int)
    settings = {
        "ownership": ownership,
        # Both live: a busy machine must not let one count as dead.
        "stale_after": "20",
        "coordination_topic": topic(2, prefix="log", config=WANTED),
        "coordination_interval": "2",
    }
    parent = start(numbers.name, **settings)

    wait_for(
        lambda: count_shares(admin, "relay") == [8, 8],
        timeout=60,
        what=lambda: (
            f"each has a half: {count_shares(admin, 'relay')}\n{parent.output}"
        ),
    )
    with connect() as connection:
        for n in range(1_000):
            numbers.send(connection, key=f"k{n % 50}", value=n)
    left = "select from jobs_lib.outbox limit 1"
    wait_for(lambda: not admin.execute(left).fetchall(), timeout=30, what="all is sent")
    found: dict[str, list[int]] = {}
    for record in read_topic(bootstrap_servers, numbers.name):
        found.setdefault(record.key, []).append(record.json)
    assert found == {f"k{n}": list(range(n, 1_000, 50)) for n in range(50)}
    parent.signal(signal.SIGTERM)
    assert parent.wait(timeout=30) == 0
    assert count_shares(admin, "relay") == []
