from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from urllib.parse import urlsplit

import psycopg
import pytest
from click.testing import CliRunner

from jobs_lib.cli.dev import dev
from jobs_lib.devstack import DevStack, PostgresServer
from jobs_lib.devstack.process import exists, start_of
from jobs_lib.errors import DevStackError
from tests.support.waiting import wait_for

from .conftest import DEV


def dev_command(*arguments):
    runner = CliRunner()
    return runner.invoke(dev, arguments, catch_exceptions=False)


def by_key(services):
    return {service.key: service for service in services}


def test_up_status_env_down_and_up_again_with_the_data_kept(open_folder, monkeypatch):
    monkeypatch.chdir(open_folder)
    try:
        first = dev_command("up")
        assert first.exit_code == 0
        lines = first.stdout.splitlines()
        exports = [line for line in lines if line.startswith("export ")]
        assert [line.partition("=")[0] for line in exports] == [
            "export JOBS_LIB_DATABASE_URL",
            "export JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS",
        ]
        assert dev_command("env").stdout.splitlines() == exports

        shown = json.loads(dev_command("status", "--json").stdout)
        assert [service["state"] for service in shown] == ["running", "running"]
        table = dev_command("status").stdout
        for service in shown:
            assert service["address"] in table
            assert str(service["pid"]) in table

        # A second `up` finds the first, even if its shell has the exports.
        url = shlex.split(exports[0])[1].partition("=")[2]
        monkeypatch.setenv("JOBS_LIB_DATABASE_URL", url)
        monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", shown[1]["address"])
        second = dev_command("up")
        assert "PostgreSQL: running" in second.stdout
        assert "Kafka: running" in second.stdout
        assert json.loads(dev_command("status", "--json").stdout) == shown
        with psycopg.connect(url) as conn:
            conn.execute("CREATE TABLE kept (value int)")

        assert "PostgreSQL: stopped" in dev_command("down").stdout
        assert "PostgreSQL: was not running" in dev_command("down").stdout
        for service in shown:
            assert start_of(service["pid"]) is None
        with pytest.raises(DevStackError, match="jobs-lib dev up"):
            dev_command("env")

        dev_command("up")
        again = json.loads(dev_command("status", "--json").stdout)
        assert again[0]["address"] == shown[0]["address"]
        with psycopg.connect(url) as conn:
            conn.execute("SELECT value FROM kept")
    finally:
        dev_command("down")


def test_two_ups_at_once_start_one_stack(open_folder, monkeypatch):
    monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", _listening())
    found = []
    stacks = [DevStack(open_folder / "project") for _ in range(3)]
    threads = [
        threading.Thread(target=lambda stack=stack: found.append(stack.up()))
        for stack in stacks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len({by_key(services)["postgres"].pid for services in found}) == 1
        changed = [by_key(services)["postgres"].changed for services in found]
        assert sorted(changed) == [False, False, True]
    finally:
        stacks[0].down()


def test_servers_of_the_user_are_used_and_not_started(monkeypatch, stack):
    monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", _listening())
    with PostgresServer.ephemeral() as server:
        url = server.url
        secret = urlsplit(url).password
        assert secret
        monkeypatch.setenv("JOBS_LIB_DATABASE_URL", url)
        services = by_key(stack.up())
        assert {service.state for service in services.values()} == {"external"}
        assert services["postgres"].address == url
        folder = str(stack.folder)
        told = dev_command("up", "--folder", folder).stdout
        assert "JOBS_LIB_DATABASE_URL is set" in told
        assert secret not in told.split("export")[0]
        assert secret not in dev_command("status", "--folder", folder).stdout
        stack.down()
        assert server.running
    with pytest.raises(DevStackError, match="does not answer") as failure:
        stack.up()
    assert secret not in str(failure.value)


def test_a_port_that_cannot_be_is_no_other_one(monkeypatch, stack):
    host, _, port = _listening().rpartition(":")
    wrong = f"{host}:{int(port) + 65_536}"
    monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", wrong)
    with pytest.raises(DevStackError, match=f"{wrong}, which does not answer"):
        stack.up()


def test_a_stale_state_file_is_no_reason_to_end_another_process(stack, monkeypatch):
    monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", _listening())
    pid = by_key(stack.up())["postgres"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    # PostgreSQL takes one that nobody has reaped yet for one that runs.
    wait_for(lambda: not exists(pid), timeout=60, what="the killed one is reaped")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as other:
        # Now another process seems to have this number.
        state = json.loads((stack.folder / "state.json").read_text())
        state["postgres"]["pid"] = other.pid
        (stack.folder / "state.json").write_text(json.dumps(state))
        assert by_key(stack.status())["postgres"].state == "stopped"
        assert not by_key(stack.down())["postgres"].changed
        assert other.poll() is None
        other.kill()
    # The data folder still holds the lock file of the killed server.
    assert by_key(stack.up())["postgres"].changed


def test_a_taken_port_leaves_nothing_running(stack):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fixed = DevStack(stack.folder, kafka_port=port)
        with pytest.raises(DevStackError, match=f"port {port} for Kafka"):
            fixed.up()
    assert {service.state for service in stack.status()} == {"stopped"}


def test_a_running_server_does_not_move_to_another_port(stack, monkeypatch):
    monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", _listening())
    stack.up()
    with pytest.raises(DevStackError, match="jobs-lib dev down"):
        DevStack(stack.folder, postgres_port=5).up()
    assert by_key(stack.status())["postgres"].state == "running"


def test_a_damaged_state_file_is_named(stack):
    stack.folder.mkdir()
    file = stack.folder / "state.json"
    file.write_text("{")
    with pytest.raises(DevStackError, match=r"state\.json is damaged"):
        stack.status()
    file.unlink()


def test_an_ephemeral_stack_ends_with_ctrl_c_and_leaves_nothing(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", DEV, "up", "--ephemeral"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        url = ""
        for line in run.stdout:
            if line.startswith("export JOBS_LIB_DATABASE_URL="):
                url = line.strip().partition("=")[2]
            if "Ctrl-C" in line:
                break
        psycopg.connect(url).close()
        run.send_signal(signal.SIGINT)
    assert run.returncode == 0
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    assert not list(tmp_path.iterdir())


def _listening():
    """The address of a socket that accepts connections during the test."""
    server = socket.create_server(("127.0.0.1", 0))
    _kept.append(server)
    return f"127.0.0.1:{server.getsockname()[1]}"


_kept: list[socket.socket] = []


@pytest.fixture(autouse=True)
def close_what_listens():
    yield
    while _kept:
        _kept.pop().close()


@pytest.mark.guarantee("FS15")
def test_a_server_that_trusts_everybody_and_runs_is_closed_by_up(
    open_folder, monkeypatch, bootstrap_servers
):
    monkeypatch.chdir(open_folder)
    monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", bootstrap_servers)
    try:
        dev_command("up")
        (before, _) = DevStack().status()
        trust_everybody(before)
        for command in ("status", "env"):
            with pytest.raises(DevStackError, match="run `jobs-lib dev up`"):
                dev_command(command)
        up = dev_command("up")
        assert "PostgreSQL: started again, with a password from now on" in up.stdout
        (after, _) = DevStack().status()
        assert after.pid != before.pid
        assert urlsplit(after.address).port == urlsplit(before.address).port
        assert after.address is not None
        assert after.folder is not None
        with psycopg.connect(after.address) as conn:
            conn.execute("SELECT value FROM kept")
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(without_password(after.address))
        log = (after.folder / "server.log").read_text()
        assert "received fast shutdown request" in log
        assert "not properly shut down" not in log
        assert "PostgreSQL: running" in dev_command("up").stdout
    finally:
        dev_command("down")


def without_password(url):
    return f"postgresql://postgres@127.0.0.1:{urlsplit(url).port}/jobs_lib"


def trust_everybody(service):
    """Make a running server like one that an earlier release has started."""
    with psycopg.connect(service.address, autocommit=True) as conn:
        conn.execute("CREATE TABLE kept (value int)")
        rule = "host all all 127.0.0.1/32 trust\n"
        (service.folder / "data" / "pg_hba.conf").write_text(rule)
        conn.execute("SELECT pg_reload_conf()")
    (service.folder / "password").unlink()
    state = service.folder.parent / "state.json"
    records = json.loads(state.read_text())
    records["postgres"]["address"] = without_password(service.address)
    state.write_text(json.dumps(records))
