"""A service with all its parts: a failure in a job stays with that job."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs_lib import exponential
from jobs_lib.consuming.queues import Queues
from jobs_lib.kafka.member import GroupMember
from jobs_lib.outbox.relay_thread import RelayThread
from tests.support.apps import make_app, running
from tests.support.records import produce, read_topic

if TYPE_CHECKING:
    from jobs_lib import Job

RECORDS = 10_000


def next_offset(admin, topic: str) -> int:
    row = admin.execute(
        "select next_offset from jobs_lib.offsets where topic = %s", (topic,)
    ).fetchone()
    return row[0] if row and row[0] else 0


def name_threads() -> set[str]:
    """The names of the threads of this process."""
    return {thread.name for thread in threading.enumerate()}


def completed(admin) -> int:
    return admin.execute("select count(*) from jobs_lib.history").fetchone()[0]


@pytest.mark.guarantee("S1")
def test_a_bad_message_does_not_stop_the_rest_of_its_partition(
    admin, database_url, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    app = make_app(database_url, home=name, kafka_bootstrap_servers=bootstrap_servers)

    @app.job(group="key", retry=exponential(first=0.05, cap=0.05))
    def work(job: Job, key: str) -> None:
        if key == "bad":
            raise ValueError("cannot be handled")

    @app.consumer(name, group=f"{name}-service")
    def handle(record, connection) -> None:
        work.enqueue(connection, key=record.key)

    keys = ["bad", *(f"k{n}" for n in range(RECORDS)), "bad"]
    produce(bootstrap_servers, name, [(key, {}) for key in keys])
    with running(app, "consumers", "executor"):
        wait_for(lambda: completed(admin) == RECORDS, timeout=120, what="the rest ran")
        # The last record is a bad one: its block may come after all that has run.
        wait_for(
            lambda: next_offset(admin, name) == RECORDS + 2,
            timeout=60,
            what="all are handled",
        )
        left = 'select "group", attempt > 0 from jobs_lib.jobs order by id'
        wait_for(
            lambda: admin.execute(left).fetchall() == [("bad", True), ("bad", False)],
            timeout=60,
            what="the first bad one is tried, and the second waits behind it",
        )
    assert admin.execute(left).fetchall() == [("bad", True), ("bad", False)]


@pytest.mark.guarantee("S24")
def test_a_hung_call_holds_up_its_own_group_and_not_the_consumer(
    admin, database_url, bootstrap_servers, topic, wait_for
):
    name = topic(1)
    app = make_app(
        database_url,
        home=name,
        kafka_bootstrap_servers=bootstrap_servers,
        workers=2,
    )
    ran: list[str] = []
    # This server accepts, and never answers.
    endpoint = socket.create_server(("127.0.0.1", 0))
    calls: list[int] = []

    @app.job(group="key", time_limit=1.5, retry=exponential(first=0.05, cap=0.05))
    def call(job: Job, key: str, n: int) -> None:
        if key == "hung":
            calls.append(job.attempt)
            with socket.create_connection(endpoint.getsockname()) as connection:
                connection.recv(1)
        ran.append(key)

    @app.consumer(name, group=f"{name}-service")
    def handle(record, connection) -> None:
        call.enqueue(connection, key=record.key, n=record.value)

    produce(bootstrap_servers, name, [("hung", 0), ("hung", 1)])
    with endpoint, running(app, "consumers", "executor"):
        wait_for(lambda: calls, timeout=30, what="the call hangs")
        for n in range(5):
            produce(bootstrap_servers, name, [(f"k{n}-{i}", i) for i in range(20)])
            wait_for(
                lambda n=n: len(ran) == 20 * (n + 1), timeout=60, what="others run"
            )
            assert next_offset(admin, name) == 2 + 20 * (n + 1)
        # Its time is limited, so it is tried again, and its group waits for it.
        wait_for(lambda: len(calls) > 3, timeout=60, what="it has been tried again")
        assert calls[:4] == [1, 2, 3, 4]
        assert "hung" not in ran
    left = admin.execute(
        "select payload->>'n' from jobs_lib.jobs where \"group\" = 'hung' order by id"
    ).fetchall()
    assert left == [("0",), ("1",)]


@pytest.mark.guarantee("S18")
def test_a_single_process_consumes_runs_jobs_and_sends(
    admin, database_url, bootstrap_servers, topic, wait_for, tmp_path, run_process
):
    source, target = topic(1), topic(1)
    (tmp_path / "whole.py").write_text(
        textwrap.dedent(f"""
            from jobs_lib import App, Job

            app = App("whole", home={source!r})
            states = app.topic({target!r})

            @app.job(group="key")
            def publish(job: Job, key: str) -> None:
                with job.transaction() as connection:
                    states.send(connection, key=key, value={{"key": key}})

            @app.consumer({source!r}, group="{source}-whole")
            def handle(record, connection) -> None:
                publish.enqueue(connection, key=record.key)
        """)
    )
    produce(bootstrap_servers, source, [("a", {})])
    service = run_process(
        "-m",
        "jobs_lib.cli",
        "run",
        "whole:app",
        env={
            "PYTHONPATH": f".:{tmp_path}",
            "JOBS_LIB_DATABASE_URL": database_url,
            "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
        },
    )
    wait_for(
        lambda: [seen.key for seen in read_topic(bootstrap_servers, target)] == ["a"],
        timeout=60,
        what=lambda: f"record, job and message went through\n{service.output}",
    )
    # The only process beside it is the shell that ends it together with the tests: the
    # one that has asked for the members of groups at the start ends soon.
    wait_for(
        lambda: list_beside(service.pid) == ["sh"],
        timeout=60,
        what=lambda: f"it is alone: {list_beside(service.pid)}",
    )
    # The server has nothing installed.
    extensions = admin.execute("select extname from pg_extension").fetchall()
    assert extensions == [("plpgsql",)]
    (clients,) = admin.execute(
        "select array_agg(distinct backend_type) from pg_stat_activity"
        " where datname = current_database()"
    ).fetchone()
    assert set(clients) <= {"client backend", "autovacuum worker"}


def list_beside(service: int) -> list[str]:
    """The programs of the other processes in the session of a service."""
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) != service and session_of(pid) == service:
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


def session_of(pid: str) -> int:
    """The session that a process belongs to; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[3])


@pytest.mark.guarantee("I38")
def test_a_service_that_has_stopped_leaves_nothing_open(
    database_url, bootstrap_servers, topic, connect, admin, wait_for
):
    home, target = topic(2), topic(1)
    app = make_app(database_url, home=home, kafka_bootstrap_servers=bootstrap_servers)
    states = app.topic(target)

    @app.job()
    def publish(job: Job) -> None:
        with job.transaction() as connection:
            states.send(connection, key="a", value=1)

    @app.consumer(home, group=f"{home}-g")
    def handle(record, connection) -> None:
        publish.enqueue(connection)

    def run_once(runs: int) -> tuple[set[str], int]:
        with running(app):
            produce(bootstrap_servers, home, [("a", 1)])
            wait_for(
                lambda: admin.execute("select from jobs_lib.history").rowcount == runs,
                timeout=40,
                what="the job has run",
            )
            wait_for(
                lambda: not admin.execute("select from jobs_lib.outbox").rowcount,
                timeout=60,
                what="its record is sent",
            )
        gc.collect()
        return name_threads(), len(os.listdir("/proc/self/fd"))

    found = []
    for runs in range(1, 4):
        found.append(run_once(runs))
        # librdkafka's own threads close their sockets when they end.
        wait_for(
            lambda: len(os.listdir("/proc/self/fd")) <= found[0][1],
            timeout=60,
            what=lambda: f"no more descriptors than after the first: {found}",
        )
    # A thread that waits for an answer may end a little later.
    wait_for(
        lambda: name_threads() <= found[0][0],
        timeout=60,
        what=lambda: f"no more threads than after the first: {name_threads()}",
    )


def test_a_service_leaves_all_its_groups_at_the_same_time(
    database_url, bootstrap_servers, topic, monkeypatch
):
    home = topic(1)
    app = make_app(database_url, home=home, kafka_bootstrap_servers=bootstrap_servers)
    for name in "abc":

        @app.consumer(home, group=f"{home}-{name}")
        def handle(record, connection) -> None: ...

    # It opens only if each member is stopped while the others are, too.
    barrier, left = threading.Barrier(3), []
    leave = GroupMember.stop

    def stop(self: GroupMember, timeout: float | None = None) -> None:
        barrier.wait(60)
        leave(self, timeout)
        left.append(self.group)

    monkeypatch.setattr(GroupMember, "stop", stop)
    with running(app, "consumers"):
        assert not left
    assert sorted(left) == [f"{home}-{name}" for name in "abc"]


@pytest.mark.guarantee("O2", "FJ19")
@pytest.mark.parametrize(
    ("owner", "method", "name"),
    [
        (RelayThread, "_round", "jobs_lib relay"),
        (GroupMember, "_poll_once", "jobs_lib poll"),
        (Queues, "take", "jobs_lib consume"),
    ],
)
def test_a_stuck_kafka_thread_fails_liveness(
    database_url, bootstrap_servers, topic, monkeypatch, wait_for, owner, method, name
):
    monkeypatch.setattr("jobs_lib.service.service.SILENT", 4.0)
    freed, stuck = threading.Event(), threading.Event()
    real = getattr(owner, method)

    def stand(*args):
        if stuck.is_set():
            freed.wait(60)
        return real(*args)

    monkeypatch.setattr(owner, method, stand)
    source = topic(1)
    app = make_app(
        database_url,
        home=source,
        kafka_bootstrap_servers=bootstrap_servers,
        database_timeout=1,
    )
    app.topic(source, value=int)

    @app.consumer(source, group=f"{source}-still")
    def handle(record, connection) -> None: ...

    with running(app, "consumers", "relay") as service:
        judge = service._liveness
        assert judge.find_silent() == []
        stuck.set()
        wait_for(
            lambda: any(name in silent for silent in judge.find_silent()),
            timeout=60,
            what="it counts as dead",
        )
        freed.set()
