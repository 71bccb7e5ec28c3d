"""The commands about read models are killed at their work: a repeat ends it."""

from __future__ import annotations

import json
from signal import SIGKILL, SIGTERM

import pytest

from tests.support.records import make_producer

APP = "tests.support.model_service:app"
KEYS = 50
TABLES = """
create table model (id text primary key, version bigint, n int, twice int);
create table model_v2 (id text primary key, version bigint, n int, thrice int)
"""


@pytest.fixture
def name(topic, bootstrap_servers):
    """A topic with a state of each key."""
    name = topic(2, config={"cleanup.policy": "compact"})
    producer = make_producer(bootstrap_servers)
    for key in range(KEYS):
        value = json.dumps({"n": key})
        producer.produce(name, value, f"k{key}", headers={"ce_version": "1"})
    assert producer.flush(30) == 0
    return name


@pytest.fixture
def start(run_process, database_url, bootstrap_servers, name):
    """A function that starts a command of the service, as a pod of its own."""

    def start(command: str, pod: str):
        given = {
            "url": database_url,
            "kafka_bootstrap_servers": bootstrap_servers,
            "topic": name,
            "pod": pod,
            "versions": [1, 2],
        }
        return run_process(
            *("-m", "jobs_lib.cli", *command.split()),
            env={"MODEL": json.dumps(given), "SOURCE_DATABASE_URL": database_url},
        )

    return start


@pytest.fixture
def kill(start, admin, wait_for):
    """A function that kills a command once one of its statements waits for a lock."""

    def kill(command: str, statement: str) -> None:
        waiting = (
            "select pid from pg_stat_activity where wait_event_type = 'Lock'"
            " and query like '%%' || %s || '%%'"
        )
        victim = start(command, "killed")
        wait_for(
            lambda: admin.execute(waiting, (statement,)).rowcount,
            timeout=60,
            what=lambda: victim.output,
        )
        victim.signal(SIGKILL)
        assert victim.wait(timeout=30) == -SIGKILL

    return kill


@pytest.mark.expects("origins.lost")
@pytest.mark.guarantee("W82")
def test_a_switch_and_a_verification_that_are_killed_are_ended_by_a_repeat(
    start, kill, admin, connect, name, wait_for
):
    admin.execute(TABLES)
    service = start(f"run {APP}", "service")

    def read() -> tuple[int, int]:
        """The rows that readers see, and those among them of the second version."""
        return admin.execute(
            "select count(*), count(to_jsonb(m) ->> 'thrice') from model m"
        ).fetchone()

    def count(table: str) -> int:
        return admin.execute(f"select count(*) from {table}").fetchone()[0]

    wait_for(
        lambda: (count("model"), count("model_v2")) == (KEYS, KEYS),
        timeout=60,
        what=lambda: service.output,
    )
    switch = f"readmodel switch {APP} model 2"
    with connect() as blocking:
        # It is killed once the tables have their new names, before they are committed.
        blocking.execute(
            "insert into jobs_lib.filled_topics (consumer_group, topic)"
            " values (%s, %s)",
            (f"{name}.v2", name),
        )
        kill(switch, "filled_topics")
        assert read() == (KEYS, 0)
        blocking.rollback()
    again = start(switch, "again")
    assert again.wait(timeout=60) == 0, again.output
    assert read() == (KEYS, KEYS)
    admin.execute("create table source as select id, version from model")
    verify = f"readmodel verify {APP} model --table source --key id --json"
    with connect() as blocking:
        blocking.execute("lock table source")
        kill(verify, "digest")
    again = start(verify, "again")
    assert again.wait(timeout=60) == 0, again.output
    assert "[]" in again.lines
    service.signal(SIGTERM)
    assert service.wait(timeout=60) == 0, service.output
