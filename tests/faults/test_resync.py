"""A re-synchronisation survives the kill of its processes, while changes go on."""

from __future__ import annotations

import json
from signal import SIGKILL, SIGTERM

import pytest

from tests.support.records import make_producer

APP = "tests.support.model_service:app"
KEYS = 1_000
PARTITIONS = 4


@pytest.fixture
def name(topic):
    """A topic of four partitions."""
    return topic(PARTITIONS, config={"cleanup.policy": "compact"})


@pytest.fixture
def send(bootstrap_servers, name):
    """A function that sends a state of each key, of one version."""

    def send(keys: range, version: int) -> None:
        producer = make_producer(bootstrap_servers)
        for key in keys:
            value = json.dumps({"n": key + version})
            headers: dict[str, str | bytes | None] = {"ce_version": str(version)}
            producer.produce(name, value, f"k{key}", headers=headers)
        assert producer.flush(30) == 0

    return send


@pytest.fixture
def start(run_process, database_url, bootstrap_servers, name):
    """A function that starts a command of the service, as a pod of its own."""

    def start(command: str, pod: str, dies_at: int | None = None):
        given = {
            "url": database_url,
            "kafka_bootstrap_servers": bootstrap_servers,
            "topic": name,
            "pod": pod,
            "consumer_block": 50,
            "dies_at": {} if dies_at is None else {"records.committed": dies_at},
        }
        words = ("-m", "jobs_lib.cli", *command.split())
        return run_process(*words, env={"MODEL": json.dumps(given)})

    return start


@pytest.mark.guarantee("W62", "W63", "W64")
def test_a_killed_resync_goes_on_and_ends_equal_while_changes_go_on(
    start, send, admin, wait_for
):
    admin.execute(
        "create table model (id text primary key, version bigint, n int, twice int)"
    )
    for version in (1, 2):
        send(range(KEYS), version)

    def wrong() -> int:
        (count,) = admin.execute(
            "select count(*) from model"
            " where n is distinct from substr(id, 2)::int + version or twice <> 2 * n"
        ).fetchone()
        return count

    def versions() -> dict[int, int]:
        rows = admin.execute("select version, count(*) from model group by version")
        return dict(rows.fetchall())

    service = start(f"run {APP}", "service")
    wait_for(lambda: versions() == {2: KEYS}, timeout=60, what=lambda: service.output)
    admin.execute("update model set n = -1, twice = null")
    admin.execute(
        "insert into model select 'x' || n, 1, 0, 0 from generate_series(1, 5) n"
    )
    resync = f"readmodel resync {APP} model"
    for dies_at in (3, 5):
        assert start(resync, "resync-0", dies_at).wait(timeout=90) == -SIGKILL
        # Live changes meanwhile.
        send(range(dies_at * 10, dies_at * 10 + 10), 3)
    last = [start(resync, f"resync-{n}") for n in range(2)]
    for one in last:
        assert one.wait(timeout=90) == 0, one.output
    wait_for(
        lambda: (wrong(), versions()) == (0, {2: KEYS - 20, 3: 20}),
        timeout=30,
        what=lambda: f"{wrong()} rows are wrong, versions {versions()}",
    )
    left = admin.execute(
        "select key from jobs_lib.resync_keys"
        " union select origin from jobs_lib.origins where role like '%resync%'"
        " union select topic from jobs_lib.offsets where consumer_group like '%resync%'"
    )
    assert left.fetchall() == []
    service.signal(SIGTERM)
    assert service.wait() == 0
