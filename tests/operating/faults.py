"""Wrong set-ups, a function for each; it returns the arguments of the check."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest

from jobs_lib.devstack.ports import free_port
from jobs_lib.operating import Limits
from jobs_lib.outbox.capture import capture_changes
from jobs_lib.partitioner import choose_partition
from jobs_lib.postgres.database import Database
from jobs_lib.settings import load_settings
from tests.operating.helpers import add_job, add_owner
from tests.support import wait_for
from tests.support.records import make_producer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PGBOUNCER = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")


@dataclass
class Bench:
    """The place of a fault; `undo` removes what would outlive the database."""

    admin: psycopg.Connection[Any]
    database: Database
    request: pytest.FixtureRequest
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def fixture(self, name: str) -> Any:
        """A fixture that only some faults need."""
        return self.request.getfixturevalue(name)

    def fill(self, jobs: int, delete: str = "false") -> None:
        """Add jobs of one type to one origin, and delete some."""
        # A session reports its changes to the server at its end, at the latest.
        with psycopg.connect(self.database.url) as connection:
            connection.execute(
                "insert into jobs_lib.jobs (origin, type, payload)"
                " select 'local/3', 'work', '{}' from generate_series(1, %s)",
                (jobs,),
            )
            connection.execute(f"delete from jobs_lib.jobs where {delete}")

    def keep_dead_rows(self) -> None:
        """Keep autovacuum from repairing the fault before the check finds it."""
        self.admin.execute("alter table jobs_lib.jobs set (autovacuum_enabled = off)")


def old_schema(bench: Bench) -> None:
    bench.admin.execute(
        "update jobs_lib.jobs_lib_version set version_num = '0001_installation'"
    )


def weak_role(bench: Bench) -> dict[str, Any]:
    role = f"app_{uuid4().hex[:8]}"
    bench.admin.execute(f"create role {role}")
    bench.undo.callback(bench.admin.execute, f"drop role {role}")
    return {"role": role}


def function_without_path(bench: Bench) -> None:
    bench.admin.execute("alter function jobs_lib.note_touch set search_path = jobs_lib")


def function_for_everybody(bench: Bench) -> None:
    bench.admin.execute("grant execute on function jobs_lib.note_touch to public")


def schema_for_everybody(bench: Bench) -> None:
    bench.admin.execute("grant create on schema jobs_lib to public")


def autovacuum_off(bench: Bench) -> None:
    _set(bench, "autovacuum", "off")


def counts_off(bench: Bench) -> None:
    _set(bench, "track_counts", "off")


def long_naptime(bench: Bench) -> None:
    _set(bench, "autovacuum_naptime", "90s")


def table_without_autovacuum(bench: Bench) -> None:
    bench.keep_dead_rows()


def old_transaction(bench: Bench) -> dict[str, Any]:
    holder = bench.fixture("connect")(application_name="nightly report")
    holder.execute("select 1")
    return {"limits": Limits(old_transaction=0.3)}


def very_old_transaction(bench: Bench) -> dict[str, Any]:
    old_transaction(bench)
    return {"limits": Limits(old_transaction=0.03)}


def blind_role(bench: Bench) -> dict[str, Any]:
    role = f"app_{uuid4().hex[:8]}"
    bench.admin.execute(f"create role {role}")
    bench.undo.callback(bench.admin.execute, f"drop role {role}")
    bench.undo.callback(bench.admin.execute, f"drop owned by {role}")
    bench.admin.execute(f"grant usage on schema jobs_lib to {role}")
    bench.admin.execute(f"grant select on all tables in schema jobs_lib to {role}")
    url = psycopg.conninfo.make_conninfo(bench.database.url, options=f"-c role={role}")
    return {"database": Database(url, bench.database.schema)}


def dead_rows(bench: Bench) -> None:
    bench.keep_dead_rows()
    bench.fill(2_000, delete="id > 100")


def grown_index(bench: Bench) -> None:
    bench.fill(60_000, delete="id % 500 <> 0")
    bench.admin.execute("vacuum (analyze) jobs_lib.jobs")


def no_statistics(bench: Bench) -> None:
    bench.keep_dead_rows()
    bench.fill(2_000)


def blocked_group(bench: Bench) -> None:
    add_job(
        bench.admin,
        group="customer-12",
        state="scheduled",
        run_at="2999-01-01",
        attempt=9,
        errors='[{"error": "HTTP 503"}]',
    )
    for _ in range(12):
        add_job(bench.admin, group="customer-12")


def _offset(bench: Bench, partition: int, following: int | None, failed: int) -> None:
    bench.admin.execute(
        "insert into jobs_lib.offsets (consumer_group, topic, partition, next_offset,"
        " failed_offset, failure, failing_since) values ('shop', 'it''s', %s, %s, %s,"
        " 'LookupError: price', '2026-01-02 03:04:05Z')",
        (partition, following, failed),
    )


def stopped_partition(bench: Bench) -> None:
    # Somebody has passed the record of the second one over.
    _offset(bench, 4, 4712, 4711)
    _offset(bench, 3, 4710, 4711)


def stopped_at_the_start(bench: Bench) -> None:
    _offset(bench, 3, None, 0)


def skipped_records(bench: Bench) -> None:
    _offset(bench, 3, 30, 0)
    bench.admin.execute(
        "insert into jobs_lib.skipped (consumer_group, topic, partition, record_offset,"
        " error, skipped_at) select 'shop', 'it''s', 3, n, 'LookupError: ' || n,"
        " '2026-01-02 03:04:05Z' from generate_series(7, 9) n"
    )


def row_deleted_by_hand(bench: Bench) -> None:
    for _ in range(2):
        _touch(bench, "psql", "delete from jobs_lib.outbox where key = 'a'")


def row_changed_by_hand(bench: Bench) -> None:
    _touch(bench, "psql", "update jobs_lib.outbox set value = '' where key = 'a'")


def outbox_truncated(bench: Bench) -> None:
    _touch(bench, "", "truncate jobs_lib.outbox")


def capture_off(bench: Bench) -> None:
    bench.admin.execute("create table aircraft (tail text)")
    capture_changes(bench.admin, "aircraft", topic="aircraft-state", key="tail")
    bench.admin.execute("alter table aircraft disable trigger jobs_lib_capture")


def truncate_unseen(bench: Bench) -> None:
    bench.admin.execute("create table aircraft (tail text)")
    capture_changes(bench.admin, "aircraft", topic="aircraft-state", key="tail")
    bench.admin.execute("drop trigger jobs_lib_capture_truncate on aircraft")


def no_reexport_index(bench: Bench) -> None:
    bench.admin.execute("drop index jobs_lib.outbox_of_reexport")


def notes_off(bench: Bench) -> None:
    bench.admin.execute(
        "alter table jobs_lib.outbox enable replica trigger jobs_lib_touched"
    )


def nobody_owns(bench: Bench) -> None:
    add_job(bench.admin, origin="local/11")


def unknown_type(bench: Bench) -> None:
    add_owner(bench.admin, origin="local/13", types=["known"])
    add_job(bench.admin, origin="local/13", type="gone")


def types_apart(bench: Bench) -> None:
    add_owner(bench.admin, origin="local/14", types=["ours"])
    add_owner(bench.admin, origin="local/15", types=["theirs"])
    add_job(bench.admin, origin="local/14", type="theirs")


def old_multixacts(bench: Bench) -> dict[str, Any]:
    # Hundreds of millions would take hours, so the limit is lowered instead.
    return {"limits": Limits(multixacts=-1.0)}


def dead_owner(bench: Bench) -> None:
    add_owner(bench.admin, origin="local/12", silent=60)
    add_job(bench.admin, origin="local/12")


def undeclared_topic(bench: Bench) -> None:
    add_job(bench.admin, origin="nowhere/2")


def group_elsewhere(bench: Bench) -> None:
    wrong = (choose_partition("customer-12", 16) + 1) % 16
    add_job(bench.admin, group="customer-12", origin=f"local/{wrong}")


def row_elsewhere(bench: Bench) -> None:
    bench.admin.execute(
        "insert into jobs_lib.outbox (shard, topic, key) select n, 'states', 'a'"
        " from generate_series(0, 1) n"
    )


def other_partitioner(bench: Bench) -> dict[str, Any]:
    return {"settings": load_settings(kafka={"partitioner": "consistent"})}


def foreign_producer(bench: Bench) -> dict[str, Any]:
    given = _topic(bench, there=4, declared=4)
    _produce(bench, given.pop("topic"), "consistent_random")
    return given


def grown_topic(bench: Bench) -> dict[str, Any]:
    given = _topic(bench, there=4, declared=3)
    del given["topic"]
    return given


def shrunk_topic(bench: Bench) -> dict[str, Any]:
    given = _topic(bench, there=4, declared=6)
    del given["topic"]
    return given


def missing_topic(bench: Bench) -> dict[str, Any]:
    bench.admin.execute("insert into jobs_lib.topics values ('gone', 3)")
    servers = bench.fixture("bootstrap_servers")
    return {"settings": load_settings(kafka_bootstrap_servers=servers)}


def kafka_away(bench: Bench) -> dict[str, Any]:
    bench.admin.execute("insert into jobs_lib.topics values ('orders', 3)")
    return {"settings": load_settings(kafka_bootstrap_servers="127.0.0.1:1")}


def transaction_pooling(bench: Bench) -> dict[str, Any]:
    if PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed")
    folder = bench.fixture("tmp_path_factory").mktemp("pgbouncer")
    url = bench.undo.enter_context(pgbouncer(folder, bench.database.url, "transaction"))
    return {"database": Database(url, bench.database.schema)}


@contextlib.contextmanager
def pgbouncer(
    folder: Path, database_url: str, mode: str, size: int = 20
) -> Iterator[str]:
    """A PgBouncer in front of the test's database; the URL through it."""
    target = psycopg.conninfo.conninfo_to_dict(database_url)
    name, port = target["dbname"], free_port()
    file, users = folder / "pgbouncer.ini", folder / "users.txt"
    users.write_text(f'"{target["user"]}" "{target["password"]}"\n')
    lines = (
        "[databases]",
        f"{name} = host={target['host']} port={target['port']}",
        "[pgbouncer]",
        "listen_addr = 127.0.0.1",
        f"listen_port = {port}",
        "unix_socket_dir =",
        "auth_type = scram-sha-256",
        f"auth_file = {users}",
        f"pool_mode = {mode}",
        f"default_pool_size = {size}",
    )
    file.write_text("\n".join(lines))
    options = ["-q"]
    if os.geteuid() == 0:
        # PgBouncer refuses to run as root, and the other user must be able to read its
        # file.
        options += ["-u", "nobody"]
        for path in (file, users, *folder.parents[:2], folder):
            path.chmod(path.stat().st_mode | 0o055)
    assert PGBOUNCER
    process = subprocess.Popen(
        [PGBOUNCER, *options, str(file)], stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: _listens(port), timeout=60, what="PgBouncer listens")
        there = f"127.0.0.1:{port}/{name}"
        yield f"postgresql://{target['user']}:{target['password']}@{there}"
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _touch(bench: Bench, application: str, statement: str) -> None:
    bench.fixture("connect")(autocommit=True, application_name=application).execute(
        statement
    )


def _set(bench: Bench, name: str, value: str) -> None:
    before = _show(bench, name)

    def reset() -> None:
        bench.admin.execute(f"alter system reset {name}")
        bench.admin.execute("select pg_reload_conf()")
        # The next test has this server, which reads its settings a moment later.
        wait_for(lambda: _show(bench, name) == before, what=f"{name} is {before}")

    bench.undo.callback(reset)
    bench.admin.execute(f"alter system set {name} = '{value}'")
    bench.admin.execute("select pg_reload_conf()")


def _show(bench: Bench, name: str) -> str:
    """The value that a setting has in a new session."""
    with psycopg.connect(bench.database.url) as connection:
        (value,) = connection.execute(f"show {name}").fetchall()[0]
    return str(value)


def _topic(bench: Bench, *, there: int, declared: int) -> dict[str, Any]:
    topic = bench.fixture("topic")(there)
    bench.admin.execute(
        "insert into jobs_lib.topics (topic, partitions) values (%s, %s)",
        (topic, declared),
    )
    servers = bench.fixture("bootstrap_servers")
    settings = load_settings(kafka_bootstrap_servers=servers)
    return {"topic": topic, "settings": settings}


def _produce(bench: Bench, topic: str, partitioner: str) -> None:
    servers = bench.fixture("bootstrap_servers")
    producer = make_producer(servers, partitioner)
    for n in range(40):
        producer.produce(topic, key=f"key-{n}", value=b"")
    producer.flush(10)
