"""A re-synchronisation survives the kill of its processes, while changes go on."""

from __future__ import annotations

import json
from signal import SIGKILL, SIGTERM

import pytest
from confluent_kafka.admin import AdminClient

from jobs_lib.devstack import KafkaBroker
from tests.support import create_topic
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

    def send(keys: range, version: int, broker: str = bootstrap_servers) -> None:
        producer = make_producer(broker)
        for key in keys:
            value = json.dumps({"n": key + version})
            headers: dict[str, str | bytes | None] = {"ce_version": str(version)}
            producer.produce(name, value, f"k{key}", headers=headers)
        assert producer.flush(30) == 0

    return send


@pytest.fixture
def start(run_process, database_url, bootstrap_servers, name):
    """A function that starts a command of the service, as a pod of its own."""

    def start(command: str, pod: str, dies_at: int | None = None, **more):
        given = {
            "url": database_url,
            "kafka_bootstrap_servers": bootstrap_servers,
            "topic": name,
            "pod": pod,
            "consumer_block": 50,
            "dies_at": {} if dies_at is None else {"records.committed": dies_at},
            **more,
        }
        words = ("-m", "jobs_lib.cli", *command.split())
        return run_process(*words, env={"MODEL": json.dumps(given)})

    return start


# Two processes share the partitions: on a busy machine one loses some to the other.
@pytest.mark.expects("loop.failed", "origins.lost")
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
        "select model from jobs_lib.resync_noted"
        " union select key from jobs_lib.resync_unshown"
        " union select model from jobs_lib.resync_shown"
        " union select origin from jobs_lib.origins where role like '%resync%'"
        " union select topic from jobs_lib.offsets where consumer_group like '%resync%'"
    )
    assert left.fetchall() == []
    service.signal(SIGTERM)
    assert service.wait() == 0


@pytest.fixture
def filled(start, send, admin, wait_for):
    """A running service that tells of changes, with wrong rows and five orphans."""
    admin.execute(
        "create table model (id text primary key, version bigint, n int, twice int)"
    )
    admin.execute("create table told (key text)")
    send(range(KEYS), 1)
    service = start(f"run {APP}", "service", tells=True)
    wait_for(
        lambda: admin.execute("select count(*) from told").fetchone() == (KEYS,),
        timeout=60,
        what=lambda: service.output,
    )
    admin.execute("update model set n = -1, twice = null")
    admin.execute(
        "insert into model select 'x' || n, 1, 0, 0 from generate_series(1, 5) n"
    )
    yield
    service.signal(SIGTERM)
    assert service.wait() == 0


@pytest.fixture
def read_owned(admin):
    """A function that counts the partitions of each process that reads again."""

    def read_owned() -> list[int]:
        rows = admin.execute(
            "select count(*) from jobs_lib.origins join jobs_lib.processes p"
            " on p.id = owner and p.heartbeat_at > now() - interval '1 second'"
            " where role like 'consume:%resync%' group by owner"
        )
        return sorted(count for (count,) in rows)

    return read_owned


def is_right(admin) -> bool:
    """Whether all rows are right, the orphans are gone, and nothing more was told."""
    rows, right = admin.execute(
        "select count(*), count(*) filter (where twice = 2 * n and n > 0) from model"
    ).fetchone()
    (told,) = admin.execute("select count(*) from told").fetchone()
    return (rows, right, told) == (KEYS, KEYS, KEYS)


# A block at the gate may outlast the hand-over of its partition.
@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("W66", "W64")
def test_several_commands_share_the_partitions_and_one_ends_the_work(
    start, filled, admin, read_owned, tmp_path, wait_for
):
    gate = tmp_path / "gate"
    resync = f"readmodel resync {APP} model"
    # All have the pod's name, as several processes in one container do.
    given = {"slow_until": str(gate), "tells": True, "static_membership": True}
    several = [start(resync, "one", **given) for _ in range(3)]
    outputs = lambda: "\n".join(one.output for one in several)  # noqa: E731
    wait_for(lambda: read_owned() == [1, 1, 2], timeout=60, what=outputs)
    killed, *others = several
    killed.signal(SIGKILL)
    wait_for(lambda: read_owned() == [2, 2], timeout=60, what=outputs)
    gate.touch()
    for one in others:
        assert one.wait(timeout=60) == 0, one.output
    assert is_right(admin)
    lines = sorted(line for one in others for line in one.lines if "removed" in line)
    assert lines == [
        "another process has ended the work on model; 0 keys removed here",
        "model was read again to the end; 5 keys removed",
    ]


# A block at the gate may outlast the hand-over of its partition, and is refused then.
@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("W66")
def test_one_command_starts_processes_that_share_the_partitions(
    start, filled, admin, read_owned, tmp_path, wait_for
):
    gate = tmp_path / "gate"
    parent = start(
        f"readmodel resync {APP} model --processes 2",
        "one",
        slow_until=str(gate),
        tells=True,
    )
    wait_for(lambda: read_owned() == [2, 2], timeout=60, what=lambda: parent.output)
    gate.touch()
    assert parent.wait(timeout=60) == 0, parent.output
    assert is_right(admin)
    assert parent.output.count("model was read again to the end; 5 keys") == 1


@pytest.mark.slow
@pytest.mark.guarantee("W62")
def test_it_runs_on_a_broker_that_knows_no_group_yet(start, send, admin, name):
    # Such a broker has no coordinator of groups for a moment, as one that dies.
    with KafkaBroker.ephemeral() as broker:
        servers = broker.bootstrap_servers
        create_topic(AdminClient({"bootstrap.servers": servers}), name, PARTITIONS)
        send(range(10), 1, servers)
        admin.execute(
            "create table model (id text primary key, version bigint, n int, twice int)"
        )
        resync = f"readmodel resync {APP} model"
        process = start(resync, "resync", kafka_bootstrap_servers=servers)
        assert process.wait(timeout=60) == 0, process.output
    assert admin.execute("select count(*) from model").fetchone() == (10,)
